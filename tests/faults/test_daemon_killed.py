"""The daemon is killed and comes back; engines go on and find it again by themselves."""

import numpy as np
import pytest

from kvstore.client.results import MISS
from kvstore.protocol.errors import PeerUnreachable
from tests.conftest import WaitUntil
from tests.faults import content
from tests.faults.conftest import CAPACITY_BYTES, EXTENT_BYTES, Scene

CHAIN, OTHER = 1, 2
HELD = 8
TIMEOUT_S = 2.0


def test_a_load_goes_on_over_a_kill_and_a_restart_of_the_daemon(
    frail: Scene, wait_until: WaitUntil
):
    engines = [frail.puppet(TIMEOUT_S) for _ in range(2)]
    for number, engine in enumerate(engines):
        engine.do("start_load", chain=10 + 10 * number, count=4)
    wait_until(lambda: all(engine.do("seen")["got"] >= 12 for engine in engines))

    frail.daemon.process.kill()
    for engine in engines:
        wait_until(lambda engine=engine: engine.do("seen")["put_errors"])
        assert not engine.do("state")["connected"]
    before = [engine.do("seen") for engine in engines]
    frail.restart_daemon()
    wait_until(
        lambda: all(
            engine.do("seen")["got"] >= then["got"] + 12
            and engine.do("seen")["stored"] >= then["stored"] + 12
            for engine, then in zip(engines, before, strict=True)
        ),
        what="stored and read again",
    )

    for engine in engines:
        seen = engine.do("stop_load")
        assert seen["raised"] == [], "reading never raises"
        assert seen["wrong"] == 0
        assert seen["slowest_s"] < TIMEOUT_S + 5.0
    assert frail.daemon.memory_bytes() <= CAPACITY_BYTES


def test_what_a_put_raises_without_a_daemon_can_be_retried(frail: Scene, wait_until: WaitUntil):
    store = frail.client()
    space = content.open_space(store)
    names, bytes_ = content.keys(CHAIN, HELD), content.pages(CHAIN, HELD)
    assert space.put(names, bytes_).stored == HELD

    frail.daemon.process.kill()

    with pytest.raises(PeerUnreachable) as raised:
        space.put(names, bytes_)
    assert raised.value.retryable
    out = [np.ones(content.PAGE_BYTES, dtype=np.uint8) for _ in range(HELD)]
    assert space.lookup(names) == MISS
    assert space.get(names, out=out) == 0
    assert len(space.get(names)) == 0
    assert all((page == 1).all() for page in out), "a miss writes nothing"

    frail.restart_daemon()
    wait_until(lambda: store.connected)
    assert space.lookup(names).pages == 0, "the new node is empty"
    assert space.put(names, bytes_).stored == HELD
    assert space.get(names, out=out) == HELD
    assert content.wrong_pages(CHAIN, out) == []


def test_memory_that_a_view_keeps_alive_counts_against_the_next_daemon(
    frail: Scene, wait_until: WaitUntil
):
    engine, idle = frail.puppet(), frail.puppet()
    assert engine.do("put", chain=CHAIN, count=HELD)["stored"] == HELD
    assert idle.do("get", chain=CHAIN, count=HELD)["pages"] == HELD
    assert engine.do("view", name="a", chain=CHAIN, count=HELD) == HELD
    frail.daemon.process.kill()
    wait_until(lambda: idle.do("state")["maps"] == 0, what="who uses nothing unmaps")

    frail.restart_daemon()

    assert frail.daemon.host("withheld") == EXTENT_BYTES
    assert frail.daemon.host("capacity") == CAPACITY_BYTES - EXTENT_BYTES
    assert frail.daemon.memory_bytes() <= CAPACITY_BYTES
    wait_until(lambda: engine.do("state")["connected"])
    assert engine.do("check_view", name="a", chain=CHAIN) == []
    assert engine.do("put", chain=OTHER, count=HELD)["stored"] == HELD
    assert engine.do("get", chain=OTHER, count=HELD) == {"pages": HELD, "wrong": []}
    assert engine.do("check_view", name="a", chain=CHAIN) == [], "two boots side by side"
    assert frail.daemon.memory_bytes() <= CAPACITY_BYTES

    engine.do("close_view", name="a")

    wait_until(lambda: frail.daemon.host("withheld") == 0)
    assert frail.daemon.host("capacity") == CAPACITY_BYTES
    assert frail.daemon.memory_bytes() <= CAPACITY_BYTES


def test_a_put_over_a_restart_of_the_daemon_stores_nothing_wrong(
    frail: Scene, wait_until: WaitUntil
):
    engine = frail.puppet()
    engine.do("arm", where="gather", when="middle")
    put = engine.begin("put", chain=CHAIN, count=HELD)
    engine.at("gather")
    frail.daemon.process.kill()
    frail.restart_daemon()
    wait_until(lambda: engine.do("state")["connected"])
    # What the new daemon puts where the old one had granted slots must stay as it is.
    other = frail.puppet()
    assert other.do("put", chain=OTHER, count=HELD)["stored"] == HELD

    engine.go()

    assert "error" in engine.end(put)
    assert other.do("lookup", chain=CHAIN, count=HELD) == 0
    assert other.do("get", chain=OTHER, count=HELD) == {"pages": HELD, "wrong": []}
    assert engine.do("put", chain=CHAIN, count=HELD)["stored"] == HELD
    assert other.do("get", chain=CHAIN, count=HELD) == {"pages": HELD, "wrong": []}


@pytest.mark.parametrize("when", ["before", "middle"])
def test_a_restore_over_a_restart_of_the_daemon_gives_no_wrong_byte(
    frail: Scene, wait_until: WaitUntil, when: str
):
    engine = frail.puppet()
    assert engine.do("put", chain=CHAIN, count=HELD)["stored"] == HELD
    engine.do("arm", where="scatter", when=when)
    restore = engine.begin("restore", chain=CHAIN, count=HELD)
    engine.at("scatter")
    frail.daemon.process.kill()
    frail.restart_daemon()
    other = frail.puppet()
    assert other.do("put", chain=OTHER, count=HELD)["stored"] == HELD
    wait_until(lambda: engine.do("state")["connected"])

    engine.go()

    assert engine.end(restore) == {"pages": HELD, "wrong": []}, "its memory was kept until its end"
    wait_until(lambda: frail.daemon.host("withheld") == 0)
    assert engine.do("restore", chain=CHAIN, count=HELD) == {"pages": 0, "wrong": []}
    assert engine.do("restore", chain=OTHER, count=HELD) == {"pages": HELD, "wrong": []}
