"""Goal: many that greet at once wait for each other; whoever says nothing keeps nobody out."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.handoff import crowd, greeting, listening
from kvstore.handoff import registry as registries
from kvstore.handoff.crowd import Crowd
from kvstore.handoff.greeting import Greeter
from kvstore.handoff.registry import HandoffRegistry, RegistryClient
from tests.handoff.pair import SECRET, managers
from tests.handoff.test_mad_peers import Peer

GREETERS = 40


class Guests:
    """A crowd, and who was cut off."""

    def __init__(self, most: int) -> None:
        self.crowd = Crowd(most)
        self.cut: list[str] = []

    def enter(self, name: str, address: str = "x") -> tuple[bool, bool]:
        return self.crowd.enter(name, lambda: self.cut.append(name), address)


@pytest.mark.parametrize("at_first", [8, 64])
def test_ranks_that_greet_all_at_once_are_all_let_in(at_first, wait_until, monkeypatch):
    """As after a start of prefill; it takes its time for the first ones."""
    monkeypatch.setattr(listening, "GREETINGS_MAX", at_first)
    monkeypatch.setattr(crowd, "TURN_S", 60.0)
    monkeypatch.setattr(greeting, "GREETING_S", 30.0)
    answer, gate, inside = Greeter.answer, threading.Event(), []

    def slow(self, stream):
        inside.append(stream)
        assert gate.wait(30)
        return answer(self, stream)

    monkeypatch.setattr(Greeter, "answer", slow)
    with managers() as pair, ThreadPoolExecutor(GREETERS) as threads:
        try:
            made = [threads.submit(Peer, pair, os.urandom(16)) for _ in range(GREETERS)]
            wait_until(lambda: len(inside) == min(at_first, GREETERS))
        finally:
            gate.set()
        peers = [one.result(30) for one in made]
        wait_until(lambda: pair.prefill.stats()["links"] == GREETERS)
        assert len(inside) == 2 * GREETERS, "two connections each, and none came again"
        assert (pair.prefill.stats().get("greetings", 0) > 0) == (at_first < GREETERS)
        for one in peers:
            one.close()
        wait_until(lambda: pair.prefill.stats()["threads"] == 0)


def test_ranks_that_ask_a_registry_all_at_once_are_all_answered(wait_until, monkeypatch):
    monkeypatch.setattr(registries, "_REQUESTS_MAX", 4)
    monkeypatch.setattr(crowd, "TURN_S", 60.0)
    answer, gate, inside = HandoffRegistry.answer, threading.Event(), []

    def slow(self, request, body):
        inside.append(request)
        assert gate.wait(30)
        answer(self, request, body)

    monkeypatch.setattr(HandoffRegistry, "answer", slow)
    registry = HandoffRegistry("127.0.0.1", 0, SECRET)
    client = RegistryClient(registry.url, SECRET)
    with ThreadPoolExecutor(GREETERS) as threads:
        try:
            asked = [threads.submit(client.ranks) for _ in range(GREETERS)]
            wait_until(lambda: len(inside) == 4)
            gate.set()
            assert [one.result(30) for one in asked] == [[]] * GREETERS
            assert len(inside) == GREETERS
        finally:
            gate.set()
            registry.close()


def test_the_newest_waits_for_a_place_and_cuts_off_nobody(wait_until, monkeypatch):
    monkeypatch.setattr(crowd, "TURN_S", 60.0)
    guests = Guests(2)
    assert guests.enter("a") == guests.enter("b") == (True, False)
    with ThreadPoolExecutor(1) as threads:
        try:
            newest = threads.submit(guests.enter, "c")
            wait_until(lambda: guests.crowd._changed._waiters)
            assert len(guests.crowd) == 2
            guests.crowd.leave("b")
            assert newest.result(10) == (True, True)
            assert guests.cut == []

            newest = threads.submit(guests.enter, "d")
            wait_until(lambda: guests.crowd._changed._waiters)
            guests.crowd.close()
            assert newest.result(10) == (False, True)
        finally:
            guests.crowd.close()
    assert guests.cut[:2] == ["a", "c"], "all that are there, when it closes"


def test_who_has_had_its_turn_gives_way(monkeypatch):
    monkeypatch.setattr(crowd, "TURN_S", 0.05)
    guests, begun = Guests(1), time.monotonic()
    guests.enter("a")
    assert guests.enter("b") == (True, True)
    assert time.monotonic() - begun >= 0.05
    assert guests.cut == ["a"]
    assert len(guests.crowd) == 2
    assert guests.enter("c") == (False, True), "one that was cut off has not left yet"
    assert guests.cut == ["a"], "nobody was cut off in vain"
    guests.crowd.leave("a")
    assert guests.enter("c") == (True, True)
    assert guests.cut == ["a", "b"]


def test_an_address_takes_places_only_from_those_with_more_and_from_itself(monkeypatch):
    monkeypatch.setattr(crowd, "TURN_S", 0.0)
    guests = Guests(4)
    for name, address in (("a", "x"), ("b", "x"), ("c", "x"), ("d", "y")):
        assert guests.enter(name, address) == (True, False)
    for name, address, gone in (
        ("e", "z", "a"), ("f", "z", "e"), ("g", "y", "d"), ("h", "x", "b"), ("i", "w", "c"),
        ("j", "w", "i"),
    ):  # fmt: skip
        assert guests.enter(name, address) == (True, True)
        assert guests.cut[-1] == gone, name
        guests.crowd.leave(gone)

    guests = Guests(2)
    guests.enter("a", "x")
    guests.enter("b", "y")
    assert guests.enter("c", "z") == (True, True)
    assert guests.cut == ["a"], "each has one: the oldest"
