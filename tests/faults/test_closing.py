"""A store is closed while something still moves; a process has no memory to map with."""

from tests.conftest import WaitUntil
from tests.faults import content
from tests.faults.conftest import Scene, StatsUntil

CHAIN, OTHER = 1, 2
HELD = 8


def test_a_store_closed_in_the_middle_of_a_copy_keeps_its_memory_until_the_end(
    scene: Scene, wait_until: WaitUntil
):
    engine = scene.puppet()
    assert engine.do("put", chain=CHAIN, count=HELD)["stored"] == HELD
    engine.do("arm", where="scatter", when="middle")
    get = engine.begin("get", chain=CHAIN, count=HELD)
    engine.at("scatter")

    engine.do("close")
    engine.go()

    assert engine.end(get) == {"pages": HELD, "wrong": []}
    wait_until(lambda: engine.do("state")["maps"] == 0, what="the link's thread unmaps")
    assert engine.process.returncode is None


def test_a_view_outlives_the_closing_of_its_store(scene: Scene, wait_until: WaitUntil):
    engine = scene.puppet()
    assert engine.do("put", chain=CHAIN, count=HELD)["stored"] == HELD
    assert engine.do("view", name="a", chain=CHAIN, count=HELD) == HELD

    engine.do("close")

    assert engine.do("check_view", name="a", chain=CHAIN) == []
    engine.do("close_view", name="a")
    wait_until(lambda: engine.do("state")["maps"] == 0, what="the link's thread unmaps")


def test_a_process_that_can_map_nothing_misses_and_goes_on(scene: Scene, stats_until: StatsUntil):
    store = scene.client()
    content.open_space(store).put(content.keys(CHAIN, 2), content.pages(CHAIN, 2))
    engine = scene.puppet()
    engine.do("limit_memory", spare_bytes=12 << 20)

    assert engine.do("get", chain=CHAIN, count=1) == {"pages": 0, "wrong": []}
    assert engine.do("view", name="a", chain=CHAIN, count=1) == 0
    assert engine.do("put", chain=OTHER, count=1)["error"] == "tier_unavailable"
    stats_until(lambda stats: stats["leases"] == stats["puts"] == 0)
    descriptors = engine.do("state")["descriptors"]
    assert engine.do("get", chain=CHAIN, count=1)["pages"] == 0
    assert engine.do("state")["descriptors"] == descriptors

    engine.do("limit_memory", spare_bytes=None)
    assert engine.do("get", chain=CHAIN, count=2) == {"pages": 2, "wrong": []}
    assert engine.do("put", chain=OTHER, count=1)["stored"] == 1
