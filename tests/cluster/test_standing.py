"""Goal: an operator reads once that a node came, left or was refused, and why; a storm is quiet."""

import asyncio
import logging
from contextlib import AsyncExitStack
from time import monotonic
from typing import Any

import pytest

from kvstore.cluster import standing
from kvstore.cluster.links import PeerLink
from kvstore.cluster.standing import Refusals, Standing
from kvstore.protocol import wire
from tests.cluster.fake_transport import Network
from tests.cluster.whole_node import NODES, local, reading, serving, whole_node
from tests.loops import eventually


class Lines:
    """The events in the log, as their names and fields."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "kvstore.cluster.standing")
        self._caplog = caplog

    def all(self) -> list[tuple[str, dict[str, Any]]]:
        return [
            (one.message, one.fields)  # type: ignore[attr-defined]
            for one in self._caplog.records
            if one.name == standing.__name__
        ]

    def names(self) -> list[str]:
        return [name for name, _ in self.all()]


@pytest.fixture
def lines(caplog):
    return Lines(caplog)


def test_a_session_that_comes_and_goes_is_one_line_each_time(lines):
    one = Standing("a", "10.0.0.1:7400")

    one.failed("unreachable", "Connection refused")
    one.came(b"\1" * 16, "tcp")
    one.failed("closed", "the other node closed the connection")
    one.came(b"\2" * 16, "tcp")

    assert lines.names() == ["node down", "node up", "node down", "node up"]
    assert lines.all()[2][1] == {
        "peer": "a", "at": "10.0.0.1:7400", "cause": "closed",
        "why": "the other node closed the connection",
    }  # fmt: skip
    assert lines.all()[3][1]["boot"] == "02" * 16


def test_further_attempts_that_fail_are_counted_and_not_logged(lines):
    one = Standing("a", "10.0.0.1:7400")

    for _ in range(50):
        one.failed("closed", "no more")
        one.failed("unreachable", "Connection refused")

    assert lines.names() == ["node down"]
    assert one.faults == {"closed": 50, "unreachable": 50}


def test_a_refusal_names_its_field_once_until_the_session_was_up(lines):
    one = Standing("a", "10.0.0.1:7400")

    for _ in range(20):
        one.failed("refused", "cluster: 'red'", "cluster")
        one.failed("unreachable", "Connection refused")
        one.failed("refused", "scheme: 'md5'", "scheme")
    one.came(b"\1" * 16, "tcp")
    one.failed("refused", "cluster: 'red'", "cluster")

    refused = [fields["field"] for name, fields in lines.all() if name == "node refused"]
    assert refused == ["cluster", "scheme", "cluster"]
    assert lines.names().count("node down") == 1


def test_text_of_the_other_node_does_not_become_a_field_or_break_a_line(lines):
    one = Standing("a", "10.0.0.1:7400")

    for at in range(30):
        one.failed("refused", "one\ntwo", f"field {at}")

    ((_, fields),) = lines.all()
    assert fields["field"] == ""
    assert fields["why"] == "one?two"


def test_the_last_fault_stays_to_be_seen_when_the_session_is_up_again():
    one = Standing("a", "10.0.0.1:7400")
    assert one.fault() is None

    one.failed("silent", "no answer for 2 s")
    one.came(b"\1" * 16, "tcp")

    fault = one.fault()
    assert one.up
    assert (fault.cause, fault.why) == ("silent", "no answer for 2 s")
    assert fault.s_ago >= 0


def test_a_node_that_is_not_admitted_is_told_once_for_each_field(lines, monkeypatch):
    monkeypatch.setattr(standing, "SAID_MAX", 4)
    one = Refusals()

    for _ in range(20):
        one.refused("b", "cluster", "no")
        one.refused("b", "scheme", "no")
    one.admitted("b")
    one.refused("b", "cluster", "no")
    assert [fields["field"] for _, fields in lines.all()] == ["cluster", "scheme", "cluster"]

    for at in range(100):
        one.refused(f"x{at}\n" + "y" * 500, "node", "no")
    assert len(one._said) == 4
    assert all(len(fields["peer"]) <= standing.NAME_MAX for _, fields in lines.all())


async def _a_session_of_two_nodes(lines: Lines) -> None:
    network = Network()
    async with AsyncExitStack() as undo:
        a = await undo.enter_async_context(whole_node("a", network))
        b = await undo.enter_async_context(whole_node("b", network))
        async with serving(a) as service:
            place = service.endpoint
            await undo.enter_async_context(reading(b, {"a": place}))
            await eventually(b.up)
            assert lines.names() == ["node up"]
        await eventually(lambda: b.faults().get("unreachable", 0) >= 3)
        assert lines.names() == ["node up", "node down"]
        async with serving(a, listen=place):
            await eventually(b.up)
        assert lines.names()[:3] == ["node up", "node down", "node up"]
        assert lines.all()[0][1]["transport"] == b.peers.sessions()["a"].transport


def test_a_node_that_stops_and_comes_back_is_three_lines(lines):
    asyncio.run(_a_session_of_two_nodes(lines))


async def _a_node_of_another_cluster(lines: Lines) -> dict[str, Any]:
    network = Network()
    async with AsyncExitStack() as undo:
        a = await undo.enter_async_context(whole_node("a", network))
        b = await undo.enter_async_context(whole_node("b", network))
        b.local = type(b.local)("red", "b", b.local.boot, b.local.scheme)
        service = await undo.enter_async_context(serving(a))
        await undo.enter_async_context(reading(b, {"a": service.endpoint}))
        await eventually(lambda: b.peers.sessions() and b.faults().get("refused", 0) >= 3)
        assert service.stats().refused["cluster"] >= 3
        return b.peers.sessions()["a"]


def test_a_node_of_another_cluster_is_refused_by_field_on_both_sides_once(lines):
    told = asyncio.run(_a_node_of_another_cluster(lines))

    assert sorted(lines.names()) == ["node not admitted", "node refused"]
    assert {fields["field"] for _, fields in lines.all()} == {"cluster"}
    assert not told.up
    assert told.fault is not None
    assert told.fault.field == "cluster"
    assert "'blue'" in told.fault.why


async def _what_flaps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses after sessions that end at once."""
    pauses: list[float] = []

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 8:
            raise EnoughError

    async def connect(self: PeerLink) -> None:
        self._up_s = monotonic()

    monkeypatch.setattr("kvstore.cluster.links.asyncio.sleep", sleep)
    monkeypatch.setattr(PeerLink, "_connect", connect)
    session = type("Session", (), {"peer": "a"})()
    link = PeerLink(session, "127.0.0.1:1", None, lambda *_: None)
    with pytest.raises(EnoughError):
        await link.run()
    return pauses


class EnoughError(Exception):
    """The test has seen enough."""


def test_a_session_that_breaks_as_soon_as_it_is_up_is_tried_less_and_less_often(monkeypatch):
    pauses = asyncio.run(_what_flaps(monkeypatch))

    assert pauses[0] < 1
    assert pauses == sorted(pauses)
    assert pauses[-1] == 5.0


def test_the_fields_that_a_refusal_may_name_are_those_of_the_greeting():
    refused = set()
    for hello in (
        wire.PeerHello(1, 9, 9, "blue", "b", b"", local("b").scheme),
        wire.PeerHello(1, wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR, "red", "b", b"", "x"),
        wire.PeerHello(1, wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR, "blue", "b", b"", "x"),
        wire.PeerHello(1, wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR, "blue", "z", b"",
                       local("a").scheme),
    ):  # fmt: skip
        with pytest.raises(Exception, match=":") as error:
            local("a").admit(hello, frozenset(NODES).__contains__)
        refused.add(error.value.field)  # type: ignore[attr-defined]

    assert refused == standing.FIELDS


def test_a_flood_of_names_is_not_a_flood_of_lines(lines, monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(standing, "monotonic", lambda: now_s)
    refusals = Refusals()

    for number in range(standing.SAID_MAX + 1_000):
        refusals.refused(f"n{number}", "cluster", "'red'")
    assert len(lines.names()) == standing.SAID_MAX + 1

    now_s += standing.MANY_S
    for number in range(1_000):
        refusals.refused(f"m{number}", "cluster", "'red'")
    assert len(lines.names()) == standing.SAID_MAX + 2
