"""The daemon is stopped (SIGSTOP): nobody waits for it twice, and it comes back clean."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import pytest

import kvstore.client.exchange
from tests.conftest import WaitUntil, wait_for
from tests.faults import content
from tests.faults.conftest import CAPACITY_BYTES, Daemon, Puppet, Scene

CHAIN, OTHER = 1, 2
HELD = 8
DEADLINE_S = 0.5
"""A lookup that is not even sent by then breaks no connection."""
BRIEF_S, PATIENT_S = 0.2, 5.0
SLACK_S = 8.0
"""What a busy machine may add to a deadline."""


def stop(daemon: Daemon) -> None:
    os.kill(daemon.pid, signal.SIGSTOP)
    status = Path(f"/proc/{daemon.pid}/stat")
    assert wait_for(lambda: status.read_text().rpartition(")")[2].split()[0] == "T")


def go_on(daemon: Daemon) -> None:
    os.kill(daemon.pid, signal.SIGCONT)


@contextmanager
def stopped(daemon: Daemon, engine: Puppet) -> Iterator[None]:
    """The daemon is stopped; only meanwhile does the engine wait briefly for its answers."""
    engine.do("wait_for_answers", seconds=BRIEF_S)
    stop(daemon)
    try:
        yield
    finally:
        go_on(daemon)
    engine.do("wait_for_answers", seconds=PATIENT_S)


def test_a_stopped_daemon_costs_one_deadline_and_then_nothing(
    scene: Scene,
    wait_until: WaitUntil,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    store = scene.client(DEADLINE_S)
    caplog.clear()  # of a first attempt to connect that came to nothing
    space = content.open_space(store)
    names = content.keys(CHAIN, HELD)
    content.open_space(scene.client()).put(names, content.pages(CHAIN, HELD))
    wait_until(lambda: space.lookup(names).pages == HELD)
    before = store.troubles["transfer_timeout"]
    connects: list[int] = []
    really_open = kvstore.client.exchange.open_socket

    def noted_open(path: str) -> object:
        connects.append(threading.get_ident())
        return really_open(path)

    monkeypatch.setattr(kvstore.client.exchange, "open_socket", noted_open)
    stop(scene.daemon)
    try:
        start = monotonic()
        assert space.lookup(names).pages == 0
        first_s = monotonic() - start
        assert not store.connected
        start = monotonic()
        misses = [space.lookup(names).pages for _ in range(1000)]
        thousand_s = monotonic() - start
        wait_until(lambda: connects, what="the background thread tries again")
    finally:
        go_on(scene.daemon)

    assert DEADLINE_S * 0.5 <= first_s <= DEADLINE_S * 2 + SLACK_S
    assert not any(misses)
    assert thousand_s < SLACK_S
    assert threading.get_ident() not in connects
    assert store.troubles["transfer_timeout"] == before + 1
    (said,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert "lost the node" in said
    wait_until(lambda: store.connected)
    wait_until(lambda: space.lookup(names).pages == HELD)


def test_a_put_that_misses_its_deadline_leaves_nothing_in_the_daemon(
    scene: Scene, wait_until: WaitUntil
):
    engine = scene.puppet(PATIENT_S)
    engine.do("arm", where="gather", when="before")
    put = engine.begin("put", chain=CHAIN, count=HELD)
    engine.at("gather")
    with stopped(scene.daemon, engine):
        engine.go()  # its CommitPut waits in the socket of a daemon that does not read
        outcome = engine.end(put)
        again = engine.do("put", chain=OTHER, count=HELD)

    assert (outcome["error"], outcome["retryable"]) == ("transfer_timeout", True)
    assert (again["error"], again["retryable"]) == ("peer_unreachable", True)
    wait_until(lambda: engine.do("state")["connected"])
    stats = scene.daemon.stats
    wait_until(lambda: stats()["puts"] == stats()["host"]["limbo_bytes"] == 0)
    assert stats()["host"]["writing_bytes"] == 0
    # Its answer was lost, not the put: it came over whole, or not at all.
    assert engine.do("get", chain=CHAIN, count=HELD)["pages"] in (0, HELD)
    assert engine.do("put", chain=OTHER, count=HELD)["stored"] == HELD


def test_a_reader_whose_acquire_got_no_answer_keeps_no_lease(scene: Scene, wait_until: WaitUntil):
    engine = scene.puppet(PATIENT_S)
    assert engine.do("put", chain=CHAIN, count=HELD)["stored"] == HELD
    with stopped(scene.daemon, engine):
        assert engine.do("view", name="a", chain=CHAIN, count=HELD) == 0
        assert engine.do("get", chain=CHAIN, count=HELD)["pages"] == 0

    wait_until(lambda: engine.do("state")["connected"])
    stats = scene.daemon.stats
    wait_until(lambda: stats()["leases"] == stats()["host"]["pinned_bytes"] == 0)
    assert engine.do("get", chain=CHAIN, count=HELD) == {"pages": HELD, "wrong": []}


def test_a_client_that_came_back_after_a_stop_is_still_watched(scene: Scene, wait_until: WaitUntil):
    engine = scene.puppet(PATIENT_S)
    for _ in range(3):
        with stopped(scene.daemon, engine):
            assert engine.do("lookup", chain=CHAIN, count=1) == 0
            assert not engine.do("state")["connected"]
        wait_until(lambda: engine.do("state")["connected"])
    engine.do("arm", where="gather", when="before")
    engine.begin("put", chain=CHAIN, count=HELD)
    engine.at("gather")
    assert scene.daemon.host("writing") == HELD * content.PAGE_BYTES

    engine.signal(signal.SIGKILL)

    wait_until(lambda: scene.daemon.host("free") == CAPACITY_BYTES)


def test_a_client_that_dies_while_the_daemon_is_stopped_leaves_nothing(
    scene: Scene, wait_until: WaitUntil
):
    engine = scene.puppet()
    assert engine.do("put", chain=CHAIN, count=HELD)["stored"] == HELD
    assert engine.do("view", name="a", chain=CHAIN, count=HELD) == HELD
    engine.do("arm", where="gather", when="before")
    engine.begin("put", chain=OTHER, count=HELD)
    engine.at("gather")
    stop(scene.daemon)
    try:
        engine.process.kill()
    finally:
        go_on(scene.daemon)

    wait_until(lambda: scene.daemon.stats()["sessions"] == [])
    host = scene.daemon.stats()["host"]
    assert host["writing_bytes"] == host["pinned_bytes"] == host["limbo_bytes"] == 0
