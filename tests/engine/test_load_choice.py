"""Goal: of loading, loading a part and computing, the fastest is chosen, as far as is known."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.results import Hit
from kvstore.engine.fit import OnlineFit
from kvstore.engine.load_choice import (
    LOADS_MAX,
    PREFER,
    PROBE_AFTER,
    PROBE_SHARE,
    HitOffer,
    LoadChooser,
    PromptsAhead,
    offer_of,
)
from kvstore.engine.load_costs import LoadCosts, TierPart
from kvstore.engine.options import Loads
from kvstore.engine.pace import Pace

PAGE_TOKENS = 64
PAGE_BYTES = 1_000_000
FAST, SLOW = 0.001, 0.5
"""Seconds a page."""


def paced(seconds_per_token: float = 1e-3) -> Pace:
    pace = Pace()
    pace.seconds_per_token = seconds_per_token
    pace.step_tokens = 1e6
    return pace


def measured(costs: LoadCosts, tier: str, seconds: float, times: int = 4) -> None:
    """Loads of a tier that took ``seconds`` a page, one after the other."""
    part = TierPart(tier, 8, PAGE_BYTES, 0.0)
    for number in range(times):
        for pages in (1, 8):
            costs.began(-number, {part: pages}, 0.0)
            costs.ended(-number, seconds * pages, whole=True)


def hit_of(host: int, ssd: int = 0, guess_s: float = 0.0) -> Hit:
    tiers = {"host": host} | ({"ssd": ssd} if ssd else {})
    return Hit(host + ssd, tiers=tiers, load_seconds=guess_s)


def asked(hit: Hit, computed: int = 0, backlog: int = 0) -> HitOffer:
    return offer_of(hit, computed, PAGE_TOKENS, PAGE_BYTES, (backlog, 0))


def undivided(hit: Hit) -> HitOffer:
    return offer_of(hit, 0, PAGE_TOKENS, PAGE_BYTES, divisible=False)


# ---- what is chosen -----------------------------------------------------------------------------


def test_until_computing_was_measured_everything_is_loaded():
    choice = LoadChooser(Pace()).choose(asked(hit_of(4, guess_s=100.0)), 0.0)

    assert (choice.kind, choice.reason, choice.pages) == ("load", "unmeasured", 4)


def test_until_loads_were_measured_the_nodes_guess_counts():
    chooser = LoadChooser(paced())

    assert chooser.choose(asked(hit_of(4, guess_s=0.2)), 0.0)[:3] == ("load", "unmeasured", 4)
    assert chooser.choose(asked(hit_of(4, guess_s=0.3)), 0.0)[:3] == ("compute", "faster", 0)


def test_where_only_the_last_pages_are_needed_no_part_is_loaded_that_may_end_without_any():
    chooser = LoadChooser(paced())
    measured(chooser.costs, "host", FAST)
    measured(chooser.costs, "ssd", SLOW, times=8)
    hit = hit_of(6, 2)

    assert chooser.choose(asked(hit), 0.0)[:3] == ("part", "faster", 6)
    assert chooser.choose(undivided(hit), 0.0)[:3] == ("compute", "faster", 0)
    assert undivided(hit).ends == (8,)
    remote = Hit(8, tiers={"host": 8}, remote=4)
    assert undivided(remote).ends == (8, 12), "a lookup says of both that they are hits"


def test_what_was_measured_counts_more_than_the_guess():
    chooser = LoadChooser(paced())
    measured(chooser.costs, "host", FAST)

    assert chooser.choose(asked(hit_of(4, guess_s=9.0)), 0.0)[:3] == ("load", "faster", 4)
    measured(chooser.costs, "host", SLOW, times=8)
    assert chooser.choose(asked(hit_of(4, guess_s=0.0)), 0.0)[:3] == ("compute", "faster", 0)


def test_what_loads_from_memory_took_says_nothing_of_pages_on_disk():
    chooser = LoadChooser(paced())
    measured(chooser.costs, "host", FAST)

    choice = chooser.choose(asked(hit_of(2, ssd=2, guess_s=1.0)), 0.0)
    assert choice[:3] == ("part", "faster", 2), "those in memory"
    choice = chooser.choose(asked(hit_of(2, ssd=2, guess_s=0.01)), 0.0)
    assert choice[:3] == ("load", "unmeasured", 4)


def test_an_engine_that_loads_everything_measures_computing_with_a_page_and_then_more():
    pace = Pace()
    chooser, question = LoadChooser(pace), asked(hit_of(16))
    measured(chooser.costs, "host", 0.02)  # a page
    left = []
    for _ in range(80):
        choice = chooser.choose(question, 0.0)
        chooser.took(question, choice)
        computed = question.tokens - question.gained(choice.pages)
        if choice.reason == "stretch":
            left.append(computed // PAGE_TOKENS)
        pace.note_step(computed, 0.01 + 1e-3 * computed)

    assert left == [1, 2, 4, 8, 16]


def test_what_another_engine_has_just_computed_is_not_computed_again_to_measure_that():
    chooser = LoadChooser(Pace())
    question = offer_of(hit_of(16), 0, PAGE_TOKENS, PAGE_BYTES, promised=True)
    measured(chooser.costs, "host", 0.02)
    for _ in range(80):
        choice = chooser.choose(question, 0.0)
        assert (choice.kind, choice.pages) == ("load", 16)
        chooser.took(question, choice)


def test_computing_is_not_measured_better_where_that_would_change_nothing():
    pace = Pace()
    chooser, question = LoadChooser(pace), asked(hit_of(16))
    measured(chooser.costs, "host", FAST)
    pace.note_step(64, 0.3)
    for _ in range(80):
        assert chooser.choose(question, 0.0).kind == "load"
        chooser.took(question, chooser.choose(question, 0.0))


def test_the_options_decide_alone_where_they_say_so():
    for rule, pages in ((Loads.ALWAYS, 4), (Loads.NEVER, 0)):
        choice = LoadChooser(paced(), rule).choose(asked(hit_of(4, guess_s=0.256)), 0.0)
        assert (choice.reason, choice.pages) == ("always", pages)


def test_what_the_engine_computes_before_a_request_is_time_to_load():
    chooser = LoadChooser(paced())
    measured(chooser.costs, "host", 0.1)  # a page is computed in 0.064 s

    assert not chooser.choose(asked(hit_of(8)), 0.0).pages
    assert chooser.choose(asked(hit_of(8), backlog=1000), 0.0).pages == 8
    choice = chooser.choose(asked(hit_of(8), backlog=400), 0.0)
    assert choice.kind == "part"
    assert choice.pages == 4, "what can be loaded meanwhile"


def test_loads_in_flight_make_the_next_one_slower():
    chooser = LoadChooser(paced())
    measured(chooser.costs, "host", 0.02)
    question = asked(hit_of(8))
    assert chooser.choose(question, 0.0).pages == 8
    part = question.parts[0]
    for job in range(4):
        chooser.costs.began(job, {part: 8}, 0.0)

    assert not chooser.choose(question, 0.0).pages
    assert chooser.choose(question, 1.0).pages == 8, "they have nearly ended by then"


def test_a_tier_that_serves_many_at_once_is_found_out():
    costs, part = LoadCosts(), TierPart("ssd", 8, PAGE_BYTES, 0.0)
    for first in range(0, 60, 5):
        for job in range(first, first + 5):
            costs.began(job, {part: 1 + job % 8}, float(first))
        for job in range(first, first + 5):
            costs.ended(job, 0.02 * (1 + job % 8), whole=True)

    alone = costs.seconds(part, 8, 0.0)
    assert costs.seconds(part, 8, 40.0 * PAGE_BYTES) == pytest.approx(alone, rel=0.5)
    assert alone == pytest.approx(0.16, rel=0.3)


@st.composite
def questions(draw: st.DrawFn) -> HitOffer:
    """Hits of up to three tiers, some pages of which are computed."""
    host, ssd, remote = (draw(st.integers(0, 20)) for _ in range(3))
    tiers = {"host": host, "ssd": ssd} if ssd else {}
    hit = Hit(host + ssd, tiers=tiers, remote=remote, remote_seconds=remote * 0.03)
    pages = host + ssd + remote
    computed = draw(st.integers(0, max(0, pages * PAGE_TOKENS - 1)))
    backlog = draw(st.sampled_from([0, 100, 5000]))
    return offer_of(hit, computed, PAGE_TOKENS, PAGE_BYTES, (backlog, 0))


@given(questions(), st.lists(st.sampled_from([1e-4, 0.01, 0.06, 0.3]), min_size=2, max_size=2),
       st.integers(0, 3))  # fmt: skip
def test_no_number_of_pages_is_much_faster_than_the_one_chosen(question, speeds, crowd):
    if not question.tokens:
        return
    chooser = LoadChooser(paced())
    for tier, seconds in zip(("host", "ssd"), speeds, strict=True):
        measured(chooser.costs, tier, seconds)
    for job in range(crowd):
        chooser.costs.began(job, dict.fromkeys(question.parts, 2), 0.0)
    choice = chooser.choose(question, 0.0)

    def taken_s(pages: int) -> float:
        """As the module says, term by term."""
        load_s, left = 0.0, pages
        for part in question.parts:
            count = min(left, part.pages)
            ahead = chooser.costs.ahead(part.tier, 0.0)
            load_s += chooser.costs.seconds(part, count, ahead)
            left -= count
        gained = question.tokens - (question.pages - pages) * PAGE_TOKENS
        gained = max(0, gained) if pages else 0
        return max(load_s, question.backlog * 1e-3) + (question.tokens - gained) * 1e-3

    best = min(taken_s(pages) for pages in range(question.pages + 1))
    # Parts are tried in eighths: up to an eighth of a tier more may be loaded or computed.
    eighth = max((taken_s(0) - question.backlog * 1e-3) / 8, PAGE_TOKENS * 1e-3)
    assert taken_s(choice.pages) <= PREFER * best + eighth
    assert choice.kind == {0: "compute", question.pages: "load"}.get(choice.pages, "part")


# ---- what is learned ----------------------------------------------------------------------------


def serve(chooser: LoadChooser, question: HitOffer, seconds_per_page: float) -> int:
    """One request after the other: returns how many pages it loaded."""
    choice = chooser.choose(question, 0.0)
    chooser.took(question, choice)
    if choice.pages:
        chooser.costs.began(1, question.split(choice.pages), 0.0)
        chooser.costs.ended(1, seconds_per_page * choice.pages, whole=True)
    return choice.pages


def test_a_disk_that_was_slow_once_is_used_again_when_it_is_fast():
    chooser, question = LoadChooser(paced()), asked(hit_of(0, ssd=16))
    slow = [serve(chooser, question, SLOW) for _ in range(200)]
    fast = [serve(chooser, question, FAST) for _ in range(200)]

    assert sum(slow[20:]) <= 180 / PROBE_AFTER * 16 * PROBE_SHARE, "a bounded share"
    assert fast[-20:] == [16] * 20


def test_a_single_strange_measurement_does_not_end_loads():
    chooser, question = LoadChooser(paced()), asked(hit_of(16))
    for _ in range(20):
        serve(chooser, question, FAST)
    serve(chooser, question, 100 * SLOW)

    assert [serve(chooser, question, FAST) for _ in range(20)] == [16] * 20


def test_hits_that_are_tried_again_load_a_few_pages_only():
    chooser, question = LoadChooser(paced()), asked(hit_of(0, ssd=16))
    measured(chooser.costs, "ssd", 0.08)
    found = []
    for _ in range(PROBE_AFTER + 1):
        found.append(chooser.choose(question, 0.0))
        chooser.took(question, found[-1])

    assert [choice.pages for choice in found[:-1]] == [0] * PROBE_AFTER
    assert found[-1].kind == "part"
    assert found[-1].reason == "probe"
    assert found[-1].load_s <= PROBE_SHARE * 16 * PAGE_TOKENS * 1e-3


def test_a_choice_that_is_not_carried_out_changes_nothing():
    chooser, question = LoadChooser(paced()), asked(hit_of(0, ssd=16))
    measured(chooser.costs, "ssd", SLOW)

    assert {chooser.choose(question, 0.0).kind for _ in range(100)} == {"compute"}


def test_a_load_that_nobody_waits_for_any_more_was_at_least_so_slow():
    chooser, question = LoadChooser(paced()), asked(hit_of(16))
    measured(chooser.costs, "host", FAST)
    for job in range(5):
        chooser.costs.began(job, question.split(16), 0.0)
        chooser.costs.late(job, 2.0)
        assert chooser.costs.ended(job, 9.0, whole=False) is None

    assert not chooser.choose(question, 10.0).pages


def test_loads_that_are_always_given_up_when_computing_would_have_ended_are_left():
    chooser, question = LoadChooser(paced()), asked(hit_of(16))
    measured(chooser.costs, "host", FAST)
    for job in range(20):
        choice = chooser.choose(question, 0.0)
        chooser.took(question, choice)
        if choice.pages:
            chooser.costs.began(job, question.split(choice.pages), 0.0)
            chooser.costs.late(job, choice.compute_s)
            chooser.costs.ended(job, 0.0, whole=False)

    assert not chooser.choose(question, 0.0).pages


def test_failed_loads_and_unknown_ones_say_nothing():
    costs, part = LoadCosts(), TierPart("host", 8, PAGE_BYTES, 0.0)
    for job in range(5):
        costs.began(job, {part: 8}, 0.0)
        assert costs.ended(job, 1.0, whole=False) is None
        assert costs.ended(job, 1.0, whole=True) is None, "it has ended"
    costs.late(99, 1.0)

    assert not costs.is_known("host")
    assert not costs.in_flight


def test_what_is_known_stays_small_whatever_happens():
    chooser, question = LoadChooser(paced()), asked(hit_of(8, ssd=8))
    for number in range(500):
        serve(chooser, question, FAST if number % 3 else SLOW)

    assert not chooser.costs.in_flight
    assert len(chooser._skipped) <= 3


@given(st.lists(st.tuples(st.floats(1e-6, 1e3), st.floats(0, 1e9)), min_size=1, max_size=60))
def test_a_fit_stays_finite_and_never_negative_whatever_it_sees(samples):
    fit = OnlineFit((0.0, 1.0, 1.0))
    for seconds, work in samples:
        fit.note((1.0, work, work / 2), seconds)
        assert 0.0 <= fit.seconds((1.0, work, 0.0)) < 1e15
    some = [fit.seconds((1.0, work, 0.0)) for work in (0.0, 1.0, 1e6)]
    assert all(less <= more for less, more in pairwise(some))


# ---- room and backlog ---------------------------------------------------------------------------


def test_there_is_room_for_so_many_loads_and_for_the_next_one_after_an_end():
    chooser = LoadChooser(paced())
    for job in range(LOADS_MAX):
        assert chooser.has_room(["host"])
        chooser.costs.began(job, {}, 0.0)
    assert not chooser.has_room(["host"])
    chooser.costs.ended(3, 0.0, whole=False)
    assert chooser.has_room(["host"])


def test_a_request_is_not_before_itself():
    backlog = PromptsAhead()
    backlog.joins("a", 100, 50)
    backlog.joins("a", 100, 50)
    backlog.joins("b", 300, 10)
    backlog.joins("decodes", 1, 4000)

    assert backlog.beside("a") == (300, 10)
    assert backlog.beside("b") == (100, 50)
    assert backlog.beside("c") == (400, 20)
