"""A restore that its engine gives up, or whose connection breaks, writes nothing it should not."""

from tests.conftest import WaitUntil
from tests.faults import content
from tests.faults.conftest import Scene, StatsUntil

CHAIN = 1
HELD = 8


def test_an_aborted_restore_does_not_write_into_blocks_that_are_used_again(
    scene: Scene, stats_until: StatsUntil
):
    engine = scene.puppet()
    assert engine.do("put", chain=CHAIN, count=HELD)["stored"] == HELD
    engine.do("arm", where="scatter", when="middle")
    job = engine.begin("restore_and_reuse", chain=CHAIN, count=HELD)
    engine.at("scatter")
    engine.at("cancel")
    engine.go("cancel")
    engine.at("cancelled")
    assert scene.daemon.stats()["leases"] == 1, "it still copies: its lease stands"
    engine.go("scatter")
    engine.go("cancelled")

    outcome = engine.end(job)

    assert not outcome["ended_early"], "cancelling is a hint, not an end"
    assert outcome["pages"] < HELD
    assert outcome["untouched"]
    assert outcome["after"] == {"pages": HELD, "wrong": []}
    stats_until(lambda stats: stats["leases"] == 0)
    assert scene.counted("removed_corrupt") == 0, "giving up is no corruption"


def test_a_restore_that_was_cancelled_at_once_restores_only_whole_pages(scene: Scene):
    engine = scene.puppet()
    assert engine.do("put", chain=CHAIN, count=HELD)["stored"] == HELD

    outcome = engine.do("restore", chain=CHAIN, count=HELD, cancel=True)

    assert outcome["wrong"] == []
    assert engine.do("get", chain=CHAIN, count=HELD) == {"pages": HELD, "wrong": []}


def test_a_restore_whose_connection_is_cut_gives_only_verified_pages(
    scene: Scene, stats_until: StatsUntil, wait_until: WaitUntil
):
    engine = scene.puppet()
    assert engine.do("put", chain=CHAIN, count=HELD)["stored"] == HELD
    engine.do("arm", where="scatter", when="middle")
    restore = engine.begin("restore", chain=CHAIN, count=HELD)
    engine.at("scatter")
    engine.do("cut")
    wait_until(lambda: engine.do("state")["connected"])
    assert scene.daemon.host("pinned") == HELD * content.PAGE_BYTES, "it has not settled yet"

    engine.go()

    assert engine.end(restore) == {"pages": HELD, "wrong": []}
    stats_until(lambda stats: stats["leases"] == stats["host"]["pinned_bytes"] == 0)
