"""What an engine's work costs: its slowest data-parallel rank, and prompts computed together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.costs.book import CostBook
from conductor.routing.engines import EngineInfo, EngineRegistry, Role
from conductor.routing.fleet import kinds_of
from conductor.routing.joining import RankEvents
from conductor.routing.load import EngineLoads
from conductor.routing.others import USUAL_TOKENS


def engine(ranks: int = 1) -> EngineInfo:
    return EngineInfo(
        id="e", role=Role.MIXED, url="http://x", model="m", page_tokens=64, domain="d",
        shape="llama3-70b", hardware="8xa800",
        ranks=tuple(RankEvents(rank, None, None, None) for rank in range(ranks)),
    )  # fmt: skip


@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(st.integers(1, 90_000), st.sampled_from([None, 0, 1, 2, 3]), st.booleans()),
        min_size=1, max_size=12,
    ),
    st.sampled_from([0.0, 0.5, 1.0, 7.0, 40.0]),
)  # fmt: skip
def test_the_rank_with_most_of_what_was_sent_to_it_counts(
    ranks: int, requests: list[tuple[int, int | None, bool]], others: float
) -> None:
    """Those of others, of which only the number is known, spread evenly and are as long as ours."""
    loads, one = EngineLoads(CostBook()), engine(ranks)
    for number, (tokens, rank, ends) in enumerate(requests):
        loads.decodes(number, one, tokens, 0.0, rank=rank)
        if ends:
            loads.left(number, "e", 0.0)
        loads.check()

    left = [(tokens, rank) for tokens, rank, ends in requests if not ends]
    loads.tell_others("e", len(left) + others, 0.0, len(left))
    loads.columns([one], 0.0)  # counts them
    of_rank = [[t for t, rank in left if rank == number] for number in range(4)]
    known = of_rank if ranks > 1 else []
    mean = sum(one for one, _ in left) / len(left) if left else USUAL_TOKENS
    spread = -(-(len(left) + others + 1) // ranks)  # with one more
    assert loads.step_s(one) == pytest.approx(
        loads.costs(one).step_seconds(
            max([spread, *map(len, known)]),
            max([spread * mean if left or others else 0.0, *map(sum, known)]),
        )
    )


def test_steps_of_a_full_rank_teach_nothing_of_the_engine_that_is_not_so() -> None:
    """All requests are at one of four ranks, and its steps take what so many requests take."""
    spread, sent = EngineLoads(CostBook()), EngineLoads(CostBook())
    one = engine(4)
    for loads, rank in ((spread, None), (sent, 2)):
        step_s = loads.costs(one).prior.decode_step_seconds(32, 32 * 20_000)
        for turn in range(40):
            numbers = range(32 * turn, 32 * turn + 32)
            for number in numbers:
                loads.decodes(number, one, 20_000, 100.0 * turn, rank=rank)
            for number in numbers:
                loads.decoded(number, "e", 101, 100.0 * turn + 100 * step_s)
            for number in numbers:
                loads.left(number, "e", 100.0 * turn + 100 * step_s)
            loads.check()

    assert sent.costs(one).step_factors.tolist() == pytest.approx([1.0] * 3, rel=0.02)
    assert max(spread.costs(one).step_factors.tolist()) > 1.5


def test_an_engine_that_registers_with_other_ranks_counts_requests_as_it_did() -> None:
    loads = EngineLoads(CostBook())
    loads.decodes(1, engine(2), 100, 0.0, rank=1)
    loads.decodes(1, engine(), 100, 1.0, rank=1)
    loads.check()
    loads.left(1, "e", 2.0)
    loads.check()
    assert not loads._loads["e"].of_rank


@pytest.mark.parametrize("together", [1, 2, 8])
def test_prompts_computed_in_one_step_are_learned_as_one(together: int) -> None:
    loads, one, now = EngineLoads(CostBook()), engine(), 0.0
    prior = loads.costs(one).prior
    for turn in range(60):
        numbers = range(8 * turn, 8 * turn + together)
        step_s = prior.prefill_seconds(together * 400, 500 - (together - 1) * 200)
        for number in numbers:
            loads.assigned(number, one, (400, 500), (0.0, 0.05), now)
        for number in numbers:
            loads.computed(number, "e", now + step_s, None)
        for number in numbers:
            loads.left(number, "e", now + step_s)
        now += step_s + 1.0
    loads.columns([one], now)

    fit, bias = loads.costs(one).prefill_fit, loads.costs(one).prefill_bias
    assert fit.count == 60
    assert fit.factors.tolist() == pytest.approx([1.0] * 3, rel=0.02)
    assert bias.factor == pytest.approx(1.0, rel=0.02)


def test_one_prompt_after_another_is_learned_by_itself() -> None:
    loads, one = EngineLoads(CostBook()), engine()
    loads.assigned(1, one, (400, 0), (0.0, 0.05), 0.0)
    loads.assigned(2, one, (400, 0), (0.0, 0.05), 0.0)
    loads.computed(1, "e", 0.05, None)
    loads.computed(2, "e", 0.1, None)
    loads.columns([one], 1.0)

    assert loads.costs(one).prefill_fit.count == 2


@pytest.mark.parametrize("ranks", [1, 4])
def test_advice_and_lending_think_of_steps_as_decisions_do(ranks: int) -> None:
    """Also where a lasting bias corrects them, and where ranks share the requests."""
    registry, loads, one = EngineRegistry(), EngineLoads(CostBook()), engine(ranks)
    registry.register(one, 0.0)
    for _ in range(20):
        loads.costs(one).step_bias.observe(1.0, 1.4)
    [kind] = kinds_of(registry, loads)

    assert loads.costs(one).step_bias.factor > 1.5
    assert kind.step_s(32.0, 64_000.0) == pytest.approx(loads.step_seconds("e", 32.0, 64_000.0))
