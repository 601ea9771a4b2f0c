"""KV on its way to engines: what is in flight, and what is learned of how long it takes."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.costs.book import CostBook, EngineCosts, Machine
from conductor.routing.engines import EngineInfo, Role
from conductor.routing.load import EngineLoads
from conductor.routing.moving import FetchedTokens, MovingKv, Restored, SharedLink
from conductor.routing.work import ComingPrompt

MACHINE = Machine("llama3-70b", "a800", 8)


def engine(name: str, hardware: str = "8xa800") -> EngineInfo:
    return EngineInfo(
        id=name, role=Role.MIXED, url="http://x", model="m", page_tokens=64, domain="d",
        shape="llama3-70b", hardware=hardware,
    )  # fmt: skip


def test_fetches_are_in_flight_until_the_prompt_is_computed() -> None:
    moving = MovingKv()
    moving.fetch(1, FetchedTokens(100, 20, 3))
    moving.fetch(2, FetchedTokens(network=7))
    assert moving.in_flight == (100, 20, 10)
    moving.computed(1)
    assert moving.in_flight == (0, 0, 7)
    moving.left(2, 0.0)
    assert moving.in_flight == (0, 0, 0)
    moving.fetch(3, FetchedTokens())
    assert not moving.fetches.keys() - {1}


@pytest.mark.parametrize("kind", ["memory", "disk", "network"])
def test_the_speed_of_each_place_is_learned_from_what_engines_tell(kind: str) -> None:
    costs, moving, chance = EngineCosts(MACHINE), MovingKv(), random.Random(kind)
    line = costs.prior.fetch
    true = line._replace(**{f"{kind}_s": 3.0 * getattr(line, f"{kind}_s")})
    for number in range(120):
        tokens = FetchedTokens(**{kind: chance.randrange(20_000, 100_000)})
        moving.fetch(number, tokens)
        size = [costs.prior.kv_bytes(one) for one in tokens]
        moving.restored(number, Restored(int(sum(tokens)), sum(true.terms(*size))), costs)

    learned = costs.fetch_line
    assert getattr(learned, f"{kind}_s") == pytest.approx(getattr(true, f"{kind}_s"), rel=0.1)
    others = {"memory_s", "disk_s", "network_s"} - {f"{kind}_s"}
    assert all(getattr(learned, one) == getattr(line, one) for one in others), "never measured"


def test_what_was_in_flight_before_a_fetch_is_no_fault_of_its_link() -> None:
    costs, moving = EngineCosts(MACHINE), MovingKv()
    size = costs.prior.kv_bytes(50_000)
    for number in range(0, 80, 2):
        moving.fetch(number, FetchedTokens(disk=50_000))
        moving.fetch(number + 1, FetchedTokens(disk=50_000))
        moving.restored(
            number + 1, Restored(50_000, sum(costs.prior.fetch.terms(0, 2 * size, 0))), costs
        )
        moving.left(number, 0.0)

    assert costs.fetch_fit.count == 40
    assert costs.fetch_fit.factors.tolist() == pytest.approx([1.0] * 4)


def test_tokens_that_nobody_knew_of_came_from_the_memory_of_the_node() -> None:
    costs, moving = EngineCosts(MACHINE), MovingKv()
    moving.restored(1, Restored(50_000, 9.0), costs)

    constant, memory, *others = costs.fetch_fit.factors.tolist()
    assert memory > constant > 1.0
    assert others == [1.0, 1.0]


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0.01, 10)), min_size=1, max_size=8),
)
def test_a_link_alone_is_what_is_left_of_equal_shares(times: list[tuple[float, float]]) -> None:
    """Beside a brute-force sum over the moments between all changes."""
    link, began, alone_s = SharedLink(), dict[int, float](), dict[int, float]()
    changes = [(at, 1, one) for one, (at, _) in enumerate(times)]
    changes += [(at + lasts, -1, one) for one, (at, lasts) in enumerate(times)]
    for at, more, one in sorted(changes):
        now_s = link.change(more, at)
        if more > 0:
            began[one] = now_s
        else:
            alone_s[one] = now_s - began[one]

    moments = sorted({at for at, _, _ in changes})
    for one, (at, lasts) in enumerate(times):
        expected = 0.0
        for start, end in itertools.pairwise(moments):
            if at <= start and end <= at + lasts:
                sharing = sum(a <= start and end <= a + b for a, b in times)
                expected += (end - start) / sharing
        assert alone_s[one] == pytest.approx(expected)
    assert link.count == 0


def handed_over(loads: EngineLoads, count: int, factor: float) -> None:
    """As many handoffs to d at once as there are, which share the link; two at a time start."""
    to, sender = loads.costs(engine("d")), loads.costs(engine("p"))
    bytes_per_s = min(to.prior.network.bytes_per_s, sender.prior.network.bytes_per_s)
    transfer_s = factor * to.prior.kv_bytes(100_000) / bytes_per_s
    now, number = 0.0, 0
    for _ in range(60):
        numbers = range(number, number + count)
        number += count
        for one in numbers:
            loads.assigned(one, engine("p"), (100_000, 0), (0.0, 1.0), now)
            loads.comes(one, engine("d"), ComingPrompt(100_000, 100_000), "p", now)
        for one in numbers:
            loads.computed(one, "p", now + 1.0, None)
            loads.left(one, "p", now + 1.0)
            loads.decodes(one, engine("d"), 100_000, now + 1.0)
            loads.hands_over(one, engine("d"), 100_000, now + 1.0)
        now += 1.0 + to.prior.handoff_s + transfer_s * count
        for one in numbers:
            loads.sent(one, now)
            loads.arrived(one, "d", now)
            loads.left(one, "d", now)
        loads.check()


@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_handoff_is_learned_as_if_it_had_its_links_alone(count: int) -> None:
    loads = EngineLoads(CostBook())
    handed_over(loads, count, 2.0)

    costs = loads.costs(engine("d"))
    assert costs.handoff_fit.count == 60 * count
    assert costs.handoff_line.factor == pytest.approx(2.0, rel=0.1)
    assert loads.costs(engine("p")).handoff_fit.count == 0
    gauges = loads.gauges()
    assert gauges["cost_factor"]["d", "handoff", "network"] == pytest.approx(2.0, rel=0.1)
    assert gauges["cost_error"]["d", "handoff", "0.5"] < 0.1


def test_the_slower_of_both_links_counts() -> None:
    slow = engine("p", "8xl40s")
    loads = EngineLoads(CostBook())
    loads.assigned(1, slow, (100_000, 0), (0.0, 1.0), 0.0)
    loads.comes(1, engine("d"), ComingPrompt(100_000, 100_000), "p", 0.0)
    loads.decodes(1, engine("d"), 100_000, 1.0)
    loads.hands_over(1, engine("d"), 100_000, 1.0)
    prior, to = loads.costs(slow).prior, loads.costs(engine("d"))
    loads.arrived(
        1, "d", 1.0 + to.prior.handoff_s + prior.kv_bytes(100_000) / prior.network.bytes_per_s
    )

    assert to.handoff_fit.count == 1
    assert to.handoff_fit.factors.tolist() == pytest.approx([1.0, 1.0])


def test_an_engine_that_is_removed_leaves_the_links_of_others_free() -> None:
    loads = EngineLoads(CostBook())
    loads.assigned(1, engine("p"), (100, 0), (0.0, 1.0), 0.0)
    loads.comes(1, engine("d"), ComingPrompt(100, 100), "p", 0.0)
    loads.decodes(1, engine("d"), 100, 1.0)
    loads.hands_over(1, engine("d"), 100, 1.0)
    outgoing = loads._loads["p"].moving.outgoing
    assert outgoing.count == 1

    loads.forget("d")

    assert outgoing.count == 0


def test_a_fetch_that_ends_while_others_are_computed_holds_nobody_up() -> None:
    loads, one = EngineLoads(CostBook()), engine("e")
    loads.assigned(1, one, (100, 0), (0.0, 2.0), 0.0)
    loads.assigned(2, one, (100, 900), (1.5, 1.0), 0.0)
    loads.assigned(3, one, (100, 900), (5.0, 1.0), 0.0)

    assert loads.columns([one], 0.0).backlog_s.tolist() == [pytest.approx(2.0 + 1.0 + 3.0)]


@pytest.mark.parametrize("took_s", [0.5, 20.0], ids=["soon", "after it counted as computed"])
def test_the_time_of_a_fetch_is_not_that_of_the_prompt(took_s: float) -> None:
    told, silent = EngineLoads(CostBook()), EngineLoads(CostBook())
    for loads in (told, silent):
        one, prefill_s = engine("e"), loads.costs(engine("e")).prior.prefill_seconds(1000, 9000)
        for number in range(40):
            at = 100.0 * number
            fetch = FetchedTokens(disk=9000)
            loads.assigned(number, one, (1000, 9000), (0.2, prefill_s), at, fetch)
            restored = Restored(9000, took_s) if loads is told else None
            loads.computed(number, "e", at + took_s + prefill_s, 9000, restored)
            loads.left(number, "e", at + took_s + prefill_s)

    assert told.costs(engine("e")).fetch_fit.count == 40
    factors = told.costs(engine("e")).prefill_fit.factors.tolist()
    assert factors == pytest.approx([1.0, 1.0, 1.0], rel=0.05)
    assert max(silent.costs(engine("e")).prefill_fit.factors.tolist()) > 2.0
