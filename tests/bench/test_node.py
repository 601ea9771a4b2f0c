"""``python -m bench node`` measures what it says; how long that takes is no matter here."""

import gc
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from bench import __main__ as dispatch
from bench import node, node_memory, node_rates, node_turns, node_watch
from bench.node_alone import PAGE_BYTES, Clock, Engine, LoneNode
from bench.node_operator import Busy
from bench.node_rates import PROMPT_PAGES, FullNode, Rates
from bench.node_watch import Collector, Watch, WatchedLoop
from bench.node_world import World
from kvstore.protocol.page import KEY_BYTES
from kvstore.server import operations
from kvstore.state.choice.eviction import GRACE_NS

ROOT = Path(__file__).resolve().parents[2]
FIELDS = ["case", "value", "unit", "bound", "bound_value", "ratio", "asked", "wall"]
FEW_PAGES = 1024
FEW = "1024"


def printed(*arguments: str) -> list[dict[str, object]]:
    """Run the group as a user does, as shortly as it can; its results."""
    run = subprocess.run(
        [sys.executable, "-m", "bench", "node", "--json", "--pages", FEW, "--seconds", "0",
         *arguments],
        capture_output=True,
        text=True,
        timeout=55,
        cwd=ROOT,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "commit" in run.stderr.splitlines()[0], "machine and commit come first, on stderr"
    return [json.loads(line) for line in run.stdout.splitlines()]


def a_full_node(policy: str = "lru", *, ssd: bool = False) -> FullNode:
    return FullNode(FEW_PAGES, policy, ssd=ssd)


def evicted_since(full: FullNode, there: list[tuple[int, bytes]]) -> list[int]:
    """When the prompts were stored of which less is there than was, nanoseconds."""
    engine = full.engine
    return [stored for stored, keys in there if engine.in_memory(keys) < PROMPT_PAGES]


# The cases


def test_every_case_of_the_issue_is_there():
    names = set(node.names())

    wanted = {"bound/dict"}
    for policy in ("lru", "kvstore"):
        for size in (128, 8):
            wanted.add(f"put/fresh/{size}/{policy}")
            for age in ("old", "young", "old+ssd", "young+ssd"):
                wanted.add(f"put/full/{size}/{age}/{policy}")
        wanted |= {f"{case}/{policy}" for case in ("acquire/128", "lookup/128", "lookup/2048")}
        wanted |= {f"memory/{place}/{policy}" for place in ("host", "ssd", "loaded")}
        turns = (
            "models", "clear", "corrupt", "evict", "quota", "policy", "session", "list", "explain",
            "reclaim", "stats", "gc", "expire", "pins", "keep", "leases", "fill", "messages",
            "messages+ssd", "pins+ssd", "keep+ssd", "quota+ssd", "clear+ssd",
        )  # fmt: skip
        wanted |= {f"turn/{case}/{policy}" for case in turns}
    assert wanted <= names


def test_a_pattern_that_no_case_matches_is_refused(capsys):
    assert dispatch.main(["node", "--json", "--cases", "no such case"]) == 2

    captured = capsys.readouterr()
    assert "no such case" in captured.err
    assert not captured.out


def test_rates_stand_beside_their_bound_and_beside_what_is_asked_of_a_machine_as_fast():
    cases = "^bound|^put/fresh/128/lru$|^lookup/2048/lru$|^acquire/128.ssd/lru$"
    bound, put, lookup, acquire = printed("--cases", cases)

    assert [one["case"] for one in (bound, put, lookup, acquire)] == [
        "bound/dict", "put/fresh/128/lru", "lookup/2048/lru", "acquire/128+ssd/lru",
    ]  # fmt: skip
    for result in (bound, put, lookup, acquire):
        assert list(result) == FIELDS
        assert math.isfinite(result["value"])
        assert result["value"] > 0
        assert result["wall"] is None
    for result, asked, floor in ((put, 250_000, True), (acquire, 1e6, True), (lookup, 30, False)):
        value, bound_value = float(result["value"]), float(result["bound_value"])
        better = value / bound_value if floor else bound_value / value
        assert result["bound"] == "bound/dict"
        assert result["ratio"] == pytest.approx(better, rel=2e-3)
        speed = bound_value if floor else 2048e6 / bound_value
        scaled = asked * speed / 2e6 if floor else asked * 2e6 / speed
        assert result["asked"] == pytest.approx(scaled, rel=2e-3)


def test_memory_and_turns_stand_beside_what_is_asked():
    memory, told, turn = printed("--cases", "^memory/host.*/lru$|^turn/stats/lru$")

    assert (memory["case"], memory["unit"]) == ("memory/host/lru", "bytes/page")
    assert (memory["asked"], told["asked"]) == (300, None), "tokens are no part of what is asked"
    assert (turn["case"], turn["unit"], turn["asked"]) == ("turn/stats/lru", "ms", 5)
    assert turn["value"] > 0
    assert turn["wall"] > 0
    assert {one["ratio"] for one in (memory, told, turn)} == {None}


# Rates


@pytest.mark.parametrize("name", [name for name in node_rates.names() if name.endswith("/lru")])
def test_every_rate_is_measured(name):
    rate = Rates(FEW_PAGES, 0).measure(name)

    assert rate.calls >= node_rates.ROUNDS_MIN
    assert rate.pages_per_s > 0
    assert rate.bound_pages_per_s > 0


def test_the_clock_of_a_rate_is_the_cpu_time_of_its_thread(monkeypatch):
    ticks = iter(range(1_000_000))
    monkeypatch.setattr(node_rates, "thread_time", lambda: next(ticks))
    full = a_full_node()

    assert full.puts(128, old=True).call() == 1
    assert full.leases().call() == 1
    assert full.lookups(128).call() == 1
    assert node_rates.dict_bound(1024)(512) == 0.5


@pytest.mark.parametrize("policy", node_rates.POLICIES)
@pytest.mark.parametrize("size", node_rates.SIZES)
def test_a_full_node_evicts_a_page_for_each_that_is_put(policy, size):
    full = a_full_node(policy)
    calls = full.puts(size, old=True)
    before = full.lone.counts()

    calls.call()

    counts = full.lone.counts()
    assert counts["stored_pages"] - before["stored_pages"] == calls.pages
    assert counts["removed_evicted"] - before.get("removed_evicted", 0) == calls.pages
    assert full.lone.stored() == full.lone.in_memory() == full.lone.pages_max


def test_what_old_puts_evict_is_past_its_grace_and_what_young_ones_evict_is_within():
    full = a_full_node()
    for old in (True, False):
        calls = full.puts(128, old=old)
        there = [one for one in full.prompts if full.engine.lookup(one[1]) == PROMPT_PAGES]
        calls.call()

        gone = evicted_since(full, there)
        assert gone
        ages = {full.clock.now_ns - stored > GRACE_NS for stored in gone}
        assert ages == {old}


@pytest.mark.parametrize("size", node_rates.SIZES)
def test_with_an_ssd_tier_all_that_is_evicted_is_on_disk_first(size, monkeypatch):
    waited = []
    monkeypatch.setattr(LoneNode, "tick", lambda lone: waited.append(lone))
    full = a_full_node(ssd=True)
    calls = full.puts(size, old=True)
    before = full.lone.stored()
    for _ in range(20):
        calls.call()

    counts = full.lone.counts()
    assert full.lone.stored() == before + 20 * calls.pages
    assert counts["evicted_to_disk"] >= 20 * calls.pages
    assert counts["demoted_pages"] >= counts["evicted_to_disk"]
    assert "removed_evicted" not in counts
    assert not waited, "its jobs should have ended at once"
    for _, keys in full.prompts:
        assert full.engine.lookup(keys) == PROMPT_PAGES


def test_a_fresh_node_has_room_for_all_that_is_put(monkeypatch):
    made = []

    class Noted(node_rates.Node):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(node_rates, "Node", Noted)
    calls = node_rates.fresh_puts(FEW_PAGES, "lru", 8)
    for _ in range(2 * FEW_PAGES // calls.pages):
        calls.call()

    assert len(made) > 1, "a full node should have been replaced"
    for one in made:
        assert one.lone.stored() == len(one.prompts) * PROMPT_PAGES
        assert "removed_evicted" not in one.lone.counts()


# Memory


@pytest.mark.parametrize("place", node_memory.PLACES)
def test_memory_grows_with_pages_that_are_where_the_case_says(place):
    asked = f"node_memory.grow({place!r}, 8192, 'lru', tokens=True)"
    program = f"import json; from bench import node_memory; print(json.dumps({asked}._asdict()))"
    ran = subprocess.run(  # in a process that has no memory to use again
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True
    )
    grown = node_memory.Growth(**json.loads(ran.stdout))

    assert grown.pages == 8192
    assert grown.on_disk == (0 if place == "host" else 8192 - node_memory.SMALL_PAGES_MIN)
    assert grown.bytes > 100 * grown.pages, "a key and a digest alone are 48 bytes"


# Turns


@pytest.fixture(scope="module")
def outcomes() -> dict[str, node_turns.Outcome]:
    return dict(node_turns.measure(FEW_PAGES, "lru", node_turns.names()))


def test_every_turn_is_measured_in_its_order(outcomes):
    assert list(outcomes) == node_turns.names()
    for name, outcome in outcomes.items():
        if name == "gc" and not outcome.turns:
            continue  # so few objects are made that nothing was collected
        assert outcome.turns > 0, name
        assert outcome.longest.cpu_s > 0, name
        assert outcome.longest.name, name


@pytest.mark.parametrize("case", ["policy", "corrupt", "models", "expire", "quota", "reclaim"])
def test_cases_find_what_they_assert_under_the_policy_that_learns(case):
    ((name, outcome),) = node_turns.measure(FEW_PAGES, "kvstore", [case])

    assert (name, outcome.turns > 0) == (case, True)


def test_a_full_world_is_full_and_its_pages_are_past_their_grace():
    world = World(FEW_PAGES, "lru")
    try:
        world.fill()
        first = world.prompts[0]
        assert world.lone.stored() == world.pages == FEW_PAGES
        assert world.clock.skipped_s * 1e9 > GRACE_NS
        world.put()
        assert world.engine.lookup(first) < len(first) // KEY_BYTES, "a put evicts"
    finally:
        world.close()


def test_the_watch_keeps_the_longest_turn_and_leaves_out_what_the_collector_took(monkeypatch):
    cpu, wall = [0.0], [0.0]
    monkeypatch.setattr(node_watch, "thread_time", lambda: cpu[0])
    monkeypatch.setattr(node_watch, "perf_counter", lambda: wall[0])
    collector = Collector()
    watch = Watch(collector)

    def work(seconds: float, collected: float = 0.0) -> str:
        if collected:
            collector._collects("start", {})
            cpu[0] += collected
            wall[0] += collected
            collector._collects("stop", {"generation": 2, "collected": 3})
        cpu[0] += seconds
        wall[0] += 2 * seconds
        return "done"

    assert watch("short", work, 0.001, 0.5) == "done"
    watch("long", work, 0.006)
    watch("other", work, 0.002)

    assert watch.longest.name == "long"
    assert watch.longest.cpu_s == pytest.approx(0.006)
    assert watch.longest.wall_s == pytest.approx(0.012)
    assert (watch.turns, watch.over) == (3, 1)
    assert collector.longest.name == "generation 2"
    assert (collector.pauses, collector.over, collector.found) == (1, 1, 3)
    watch.begin()
    assert (watch.turns, watch.longest.cpu_s) == (0, 0)


def test_the_collector_is_watched_while_it_is_asked_for():
    before = list(gc.callbacks)
    with Collector() as collector:
        ring: list[object] = []
        ring.append(ring)
        del ring
        gc.collect()
    pauses = collector.pauses
    gc.collect()

    assert collector.found >= 1
    assert collector.longest.cpu_s > 0
    assert collector.pauses == pauses
    assert gc.callbacks == before


def test_every_callback_of_a_watched_loop_is_a_turn():
    watch = Watch(Collector())
    loop = WatchedLoop(watch)
    called = []
    try:
        loop.name = "soon"
        loop.call_soon(called.append, 1)
        loop.name = "later"
        loop.call_later(0.001, called.append, 2)
        loop.call_later(0.002, loop.stop)
        loop.run_forever()
    finally:
        loop.close()

    assert called == [1, 2]
    assert watch.turns == 3


# A node alone


def test_a_put_that_finds_room_in_parts_is_stored_whole():
    clock = Clock()
    lone = LoneNode(FEW_PAGES, "lru", clock, at_once=False, ssd_pages=0)
    engine = Engine(lone, 1)
    prompts = [lone.keys(512) for _ in range(4)]
    for keys in prompts:
        clock.skip(1)
        engine.put(keys, tokens=True)

    assert [engine.lookup(keys) for keys in prompts] == [512] * 4
    assert lone.stored() == 2048
    assert lone.in_memory() <= lone.pages_max == FEW_PAGES


def test_a_refusal_ends_a_bench():
    engine = Engine(LoneNode(FEW_PAGES, "lru", Clock()), 1)

    with pytest.raises(AssertionError, match="not a whole number of 32-byte keys"):
        engine.lookup(b"no key")


def test_operators_are_answered_by_the_code_of_the_daemon():
    world = World(FEW_PAGES, "lru")
    try:
        world.put()
        (row,) = world.operator.ask(operations.ListSpaces())["spaces"]
        assert row["host_bytes"] == node_turns.PROMPT_PAGES * PAGE_BYTES
        job = world.operator.job(operations.Clear(space=row["space"]))
        assert job["result"] == {"dropped": 32, "kept": 0, "durable": True}
        with pytest.raises(AssertionError, match="not_found"):
            world.operator.ask(operations.Evict(space="no such space"))
        limits = operations.SetLimits(space=row["space"], reserved_bytes=1 << 60)
        with pytest.raises(Busy, match="reservations may total"):
            world.operator.ask(limits)
    finally:
        world.close()
