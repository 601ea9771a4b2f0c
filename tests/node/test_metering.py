"""Goal: what a node measures of itself is what happened, and costs a bounded amount of memory."""

import re
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.node.desk import Desk
from kvstore.protocol import wire
from kvstore.protocol.page import page_keys
from kvstore.server.metrics import COUNTED
from kvstore.state.disk.jobs import DiskRead, DiskSync, DiskWrite
from kvstore.state.metering import (
    BOUNDS_S,
    MODEL_CHARACTERS_MAX,
    MODELS_MAX,
    OTHER,
    Histogram,
    Meter,
)
from tests.conftest import ROOT
from tests.node.test_durable_waits import DurableWorld
from tests.node.test_protocol import MS, Wire

KEYS = page_keys(range(8), 2)


@pytest.fixture
def node() -> Wire:
    made = Wire()
    made.join(1)
    made.join(2)
    return made


def measured(histogram: Histogram) -> list[float]:
    """The bound of each bucket, as often as something is in it."""
    bounds = [*BOUNDS_S, float("inf")]
    return [b for b, count in zip(bounds, histogram.counts, strict=True) for _ in range(count)]


def lookups(meter: Meter) -> dict[str, tuple[int, int, int]]:
    return {one.model: (one.host_pages, one.ssd_pages, one.missed_pages) for one in meter.lookups()}


@example([50_000, 50_001, 30_000_000_000, 30_000_000_001])
@given(st.lists(st.integers(0, 10**12)))
def test_each_time_is_in_the_first_bucket_whose_bound_it_does_not_exceed(times: list[int]):
    histogram = Histogram()
    for took_ns in times:
        histogram.observe(took_ns)

    bounds = [*BOUNDS_S, float("inf")]
    expected = sorted(next(b for b in bounds if took_ns <= b * 1e9) for took_ns in times)
    assert measured(histogram) == expected
    stats = histogram.stats()
    assert (stats.count, stats.sum_s) == (len(times), pytest.approx(sum(times) / 1e9))


def test_the_bounds_reach_from_50_microseconds_to_30_seconds():
    assert (BOUNDS_S[0], BOUNDS_S[-1]) == (50e-6, 30.0)
    assert list(BOUNDS_S) == sorted(set(BOUNDS_S))


def test_models_beyond_the_first_ones_are_counted_together():
    meter = Meter()
    for number in range(MODELS_MAX + 100):
        meter.found(f"m{number}", 1, 0, 0)
    meter.found("m0", 1, 2, 3)

    found = lookups(meter)
    assert len(found) == MODELS_MAX + 1
    assert (found["m0"], found[OTHER]) == ((2, 2, 3), (100, 0, 0))


def test_names_of_models_are_cut_and_stay_told_apart_when_there_are_many():
    meter = Meter()
    meter.found("x" * 10_000, 1, 0, 0)
    for number in range(MODELS_MAX):
        meter.found(f"m{number}", 0, 0, 1)
    meter.found("x" * 10_000, 1, 0, 0)

    assert lookups(meter)["x" * MODEL_CHARACTERS_MAX] == (2, 0, 0)


def test_a_lookup_is_counted_once_when_it_is_answered_however_often_it_asks(node: Wire):
    put = node.begin(1, KEYS[:2])
    assert node.lookup(2, KEYS, wait_ms=100) is None
    assert lookups(node.node.pages.meter) == {}, "it waits"
    node.ask(1, wire.AbortPut(put))

    assert node.found(2) == [(0, 0)]
    assert lookups(node.node.pages.meter) == {"m": (0, 0, 4)}
    counts = node.node.pages.counts
    assert (counts["lookup_pages"], counts["hit_pages"]) == (4, 0)

    node.store(1, KEYS[:3])
    assert node.lookup(2, KEYS) == (3, 0)
    assert lookups(node.node.pages.meter) == {"m": (3, 0, 5)}


def test_a_lookup_that_waited_took_as_long_as_it_waited(node: Wire):
    put = node.begin(1, KEYS[:2])
    assert node.lookup(2, KEYS[:2], wait_ms=1000) is None
    node.now_ns += 30 * MS
    node.ask(1, wire.CommitPut(0, put, b"d" * 32))

    meter = node.node.pages.meter
    assert node.found(2) == [(2, 0)]
    assert measured(meter.wait) == measured(meter.lookup) == measured(meter.put) == [0.05]
    assert meter.put.sum_ns == 30 * MS, "from the grant to the commit"


def test_a_request_that_was_answered_at_once_did_not_wait(node: Wire):
    assert node.node.receive(1, wire.Lookup(90, 0, [0], KEYS.packed, 100), node.now_ns)
    assert node.answers(1)
    node.begin(1, KEYS[:1])
    assert not node.node.receive(2, wire.Lookup(91, 0, [0], KEYS[:1].packed, 100), node.now_ns)

    assert measured(node.node.pages.meter.wait) == []


def test_the_desk_measures_what_is_answered_at_once_and_nothing_twice(node: Wire):
    answers: list[wire.Answer] = []
    desk = Desk(node.node, SimpleNamespace(replace=list.clear), lambda _actions: None)
    for number in (1, 2):
        desk.lines[number] = SimpleNamespace(answer=answers.append)
    send = desk.receive

    meter = node.node.pages.meter
    send(1, wire.Lookup(90, 0, [0], KEYS.packed, 0))
    assert (len(answers), sum(meter.lookup.counts), sum(meter.wait.counts)) == (1, 1, 0)
    assert 0 < meter.lookup.sum_ns < 10**10

    send(1, wire.BeginPut(91, 7, 0, 0, KEYS[:1].packed, b""))
    send(2, wire.Lookup(92, 0, [0], KEYS[:1].packed, 60_000))
    assert (len(answers), sum(meter.lookup.counts)) == (2, 1), "it waits"
    send(1, wire.CommitPut(93, 7, b"d" * 16))
    assert (len(answers), sum(meter.lookup.counts), sum(meter.wait.counts)) == (4, 2, 1)


def test_a_page_that_is_loaded_is_counted_where_it_was_found_and_timed_until_it_is_ready():
    world = DurableWorld()
    keys = world.store(1)
    world.persist(keys)
    world.end(DiskWrite, DiskSync)
    [space] = world.node.pages.spaces
    assert world.node.pages.residents.release_memory(space.nodes[keys[0]])
    world.ask(wire.Lookup(6, 0, [0], keys.packed, 0))

    assert world.ask(wire.Acquire(7, 1, 0, 0, keys.packed, 1000, 1000)) == []
    world.now_ns += 3 * MS
    [acquired] = world.end(DiskRead)

    meter = world.node.pages.meter
    assert isinstance(acquired, wire.Acquired)
    assert lookups(meter) == {"m": (0, 1, 0)}
    assert measured(meter.disk_load) == measured(meter.acquire) == [0.005]
    assert measured(meter.wait) == [0.00005, 0.005], "the persist's, and the acquire's"
    assert meter.disk_load.sum_ns == 3 * MS


def test_whatever_the_state_counts_by_name_is_exported():
    named = re.compile(r'counts\["(\w+)"\] \+=')
    counted = {
        name
        for part in ("state", "node")
        for path in (ROOT / "kvstore" / part).rglob("*.py")
        if path.name != "slab.py"  # of a client: render_slab
        for name in named.findall(path.read_text())
    }
    by_label = {"disk_checked_records", "disk_corrupt_records", "disk_refused_quota"}

    assert len(counted) > 25
    assert counted - by_label == set(COUNTED), "nothing is left out, nothing is dead"
