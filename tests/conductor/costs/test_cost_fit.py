"""Costs that are learned: from what was measured, kept over restarts, never from nonsense."""

import asyncio
import hashlib
import os
import random
import stat

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.costs.bias import LastingBias
from conductor.costs.book import CostBook, EngineCosts, Machine, UnusableCostsError, machine_of
from conductor.costs.fit import RobustFit
from conductor.front.kept_costs import KeptCosts

MACHINE = Machine("llama3-70b", "h800", 8)
PROMPT = (8192, 16_384)


def taught(factors: list[float], *, outliers: float = 0.0, count: int = 200) -> EngineCosts:
    """An engine whose terms are off by factors, after so many measurements."""
    chance = random.Random(str((factors, outliers)))
    costs = EngineCosts(MACHINE)
    for _ in range(count):
        tokens = int(2 ** chance.uniform(4, 17)), int(2 ** chance.uniform(0, 17))
        terms = costs.prior.prefill.terms(*tokens)
        seconds = sum(f * t for f, t in zip(factors, terms, strict=True))
        noise = 20.0 if chance.random() < outliers else chance.uniform(0.95, 1.05)
        costs.computed(*tokens, seconds * noise)
    return costs


def seconds_of(costs: EngineCosts, new: int, prefix: int) -> float:
    return costs.prefill_fit.seconds(costs.prior.prefill.terms(new, prefix))


def test_without_measurements_the_estimate_is_the_prior() -> None:
    costs = EngineCosts(MACHINE)

    assert seconds_of(costs, *PROMPT) == pytest.approx(costs.prior.prefill_seconds(*PROMPT))
    assert costs.step_seconds(8, 9000) == pytest.approx(costs.prior.decode_step_seconds(8, 9000))
    assert costs.prefill_fit.error(0.5) is None


@given(st.lists(st.floats(0.4, 2.5), min_size=3, max_size=3), st.sampled_from([0.0, 0.1]))
def test_an_engine_that_is_faster_or_slower_is_learned_despite_outliers(
    factors: list[float], outliers: float
) -> None:
    costs = taught(factors, outliers=outliers)

    for new, prefix in (PROMPT, (512, 0), (65_536, 0), (256, 65_536)):
        terms = costs.prior.prefill.terms(new, prefix)
        truth = sum(f * t for f, t in zip(factors, terms, strict=True))
        assert seconds_of(costs, new, prefix) == pytest.approx(truth, rel=0.35)
    error = costs.prefill_fit.error(0.5)
    assert error is not None
    assert outliers or error < 0.2


def test_a_term_that_is_never_measured_keeps_its_prior() -> None:
    fit = RobustFit(3)
    for _ in range(2000):
        fit.observe((0.0, 1.0, 0.0), 3.0)

    assert fit.factors.tolist() == pytest.approx([1.0, 3.0, 1.0], rel=0.05)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_what_cannot_be_a_duration_teaches_nothing(seconds: float) -> None:
    fit = RobustFit(3)
    fit.observe((1.0, 1.0, 1.0), seconds)

    assert fit.count == 0
    assert fit.factors.tolist() == [1.0, 1.0, 1.0]


@given(st.lists(st.tuples(*[st.floats(0, 1e6)] * 3, st.floats(0, 1e9)), max_size=60))
def test_factors_stay_finite_whatever_is_measured(seen: list[tuple[float, ...]]) -> None:
    fit = RobustFit(3)
    for *terms, seconds in seen:
        fit.observe(terms, seconds)
    again = RobustFit(3)

    assert all(0.02 <= factor <= 50 for factor in fit.factors.tolist())
    assert again.restore(fit.state())
    assert again.factors.tolist() == fit.factors.tolist()


@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e9)), max_size=60))
def test_a_bias_is_bounded_whatever_is_measured(seen: list[tuple[float, float]]) -> None:
    bias = LastingBias()
    for thought_s, seconds in seen:
        bias.observe(thought_s, seconds)
        assert 1 / 3 <= bias.factor <= 3.0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_what_cannot_be_a_duration_is_no_bias(seconds: float) -> None:
    bias = LastingBias()
    bias.observe(1.0, seconds)
    bias.observe(seconds, 1.0)
    assert bias.factor == 1.0


def test_outliers_that_the_fit_leaves_out_are_a_bias() -> None:
    """A third of all prompts takes three times as long; the fit follows the others."""
    costs = EngineCosts(MACHINE)
    usual_s = costs.prior.prefill_seconds(*PROMPT)
    thought, took = 0.0, 0.0
    for at in range(600):
        seconds = usual_s * (1.6 if at % 3 == 0 else 1.0)
        if at >= 300:
            took += seconds
            thought += sum(costs.prefill_line.terms(*PROMPT))
        costs.computed(*PROMPT, seconds)

    assert thought == pytest.approx(took, rel=0.05)


def test_one_pause_is_no_bias() -> None:
    costs = EngineCosts(MACHINE)
    costs.stepped(8, 9000, 100.0)
    assert costs.step_bias.factor <= 1.05


def test_a_file_of_an_older_version_has_no_fits_of_transfers_and_no_bias() -> None:
    saved = msgspec.json.decode(filled().dump(), type=dict)
    for one in saved["engines"].values():
        for name in ("fetch", "handoff", "bias"):
            one.pop(name, None)
    engines = msgspec.json.encode(saved["engines"])
    digest = hashlib.blake2b(engines, digest_size=16).hexdigest()
    older = msgspec.json.encode(
        {"version": 1, "digest": digest, "engines": msgspec.Raw(engines)}
    )  # fmt: skip

    book = CostBook()
    book.load(older)
    one = book.of("a", MACHINE)
    assert one.prefill_fit.count == 1
    assert one.handoff_fit.count == one.fetch_fit.count == 0
    assert one.prefill_bias.factor == 1.0


def filled() -> CostBook:
    book = CostBook()
    book.of("a", MACHINE).computed(*PROMPT, 2.0)
    book.of("b", MACHINE).stepped(8, 9000, 0.05)
    book.of("b", MACHINE).handed_over(0.2, 0.9)
    book.of("c", MACHINE).fetched(1e9, 2e9, 3e9, 0.9)
    book.of("never measured", MACHINE)
    return book


def test_a_book_goes_on_where_another_left_off() -> None:
    before, after = filled(), CostBook()
    after.load(before.dump())

    for name in ("a", "b", "c"):
        old, new = before.of(name, MACHINE), after.of(name, MACHINE)
        assert new.fetch_line == old.fetch_line
        assert new.handoff_line == old.handoff_line
        assert seconds_of(new, *PROMPT) == seconds_of(old, *PROMPT)
        assert new.step_seconds(8, 9000) == old.step_seconds(8, 9000)
    assert after.dump() == before.dump()


def test_another_machine_under_the_same_name_begins_with_its_prior() -> None:
    other = filled().of("a", MACHINE._replace(accelerators=4))

    assert seconds_of(other, *PROMPT) == pytest.approx(other.prior.prefill_seconds(*PROMPT))


@given(st.integers(0), st.integers(1, 255))
def test_a_changed_byte_is_refused_and_nothing_is_taken(at: int, change: int) -> None:
    data = bytearray(filled().dump())
    data[at % len(data)] ^= change
    book = CostBook()
    try:
        book.load(bytes(data))
    except UnusableCostsError:
        assert book.dump() == CostBook().dump()
    else:  # a byte of white space, or of the same number written in another way
        assert msgspec.json.decode(book.dump()) == msgspec.json.decode(filled().dump())


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"version":2,"digest":"","engines":{}}'])
def test_another_version_or_no_book_at_all_is_refused(data: bytes) -> None:
    with pytest.raises(UnusableCostsError):
        CostBook().load(data)


def test_a_file_is_kept_over_restarts_and_one_that_cannot_be_used_is_counted(tmp_path) -> None:
    path = tmp_path / "costs.json"
    none = KeptCosts(str(path), CostBook())
    none.read()
    assert none.faults == 0, "there is none at the first start"

    KeptCosts(str(path), filled()).write()
    book = CostBook()
    KeptCosts(str(path), book).read()
    assert book.dump() == filled().dump()
    assert [one.name for one in tmp_path.iterdir()] == ["costs.json"]

    path.write_bytes(path.read_bytes()[:-9])
    cut, empty = KeptCosts(str(path), book := CostBook()), CostBook().dump()
    cut.read()
    assert (cut.faults, book.dump()) == (1, empty)
    path.write_bytes(b'{"version":1,"digest":"","engines":' + b"[" * 100_000)
    cut.read()
    assert (cut.faults, book.dump()) == (2, empty)
    nowhere = KeptCosts(str(tmp_path / "no" / "folder"), filled())
    nowhere.write()
    assert nowhere.faults == 1


@pytest.mark.parametrize("kind", ["folder", "pipe", "a link to a pipe"])
def test_what_is_no_file_is_neither_read_nor_replaced(tmp_path, kind) -> None:
    path = there = tmp_path / "costs"
    if kind == "folder":
        there.mkdir()
    else:
        there = tmp_path / "pipe" if kind != "pipe" else path
        os.mkfifo(there)  # to open it would wait for its other end; to replace it, lose it
    if there is not path:
        path.symlink_to(there)
    kept = KeptCosts(str(path), CostBook())
    kept.read()
    kept.write()
    assert kept.faults == 2
    assert stat.S_ISFIFO(path.stat().st_mode) or path.is_dir()
    assert sorted(tmp_path.iterdir()) == sorted({path, there})


def test_a_full_book_forgets_the_engine_that_was_not_asked_for_longest(monkeypatch) -> None:
    monkeypatch.setattr("conductor.costs.book._ENGINES_MAX", 2)
    book = CostBook()
    first = book.of("first", MACHINE)
    second = book.of("second", MACHINE)
    assert book.of("first", MACHINE) is first
    book.of("third", MACHINE)
    assert book.of("first", MACHINE) is first
    assert book.of("second", MACHINE) is not second


def test_costs_are_kept_again_when_a_thread_could_not_be_started(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("conductor.front.kept_costs.PERIOD_S", 0.0)
    path = tmp_path / "costs"
    kept, started = KeptCosts(str(path), filled()), asyncio.to_thread

    async def refused(*_: object) -> None:
        monkeypatch.setattr(asyncio, "to_thread", started)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(asyncio, "to_thread", refused)

    async def run() -> None:
        running = asyncio.create_task(kept.run())
        async with asyncio.timeout(30):
            while not path.exists():
                assert not running.done()
                await asyncio.sleep(0)
        running.cancel()

    asyncio.run(run())
    assert kept.faults == 1


def test_machines_are_named_and_unknown_names_are_refused_with_those_known() -> None:
    assert machine_of("llama3-70b", "8xh800") == MACHINE
    assert machine_of("", "cpu") == Machine("llama3-8b", "cpu", 0)
    assert machine_of("", "") == Machine()
    for shape, hardware in (("gpt", ""), ("", "h1"), ("", "0xh100"), ("", "8x h100")):
        with pytest.raises(ValueError, match=r"h100|llama3-8b"):
            machine_of(shape, hardware)
