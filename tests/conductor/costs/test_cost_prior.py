"""Estimates before anything was measured: sane, and near what was published."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.costs import results
from conductor.costs.hardware import ACCELERATORS
from conductor.costs.prior import CostPrior, Link, transfer_seconds
from conductor.costs.shapes import SHAPES

TOKENS = st.integers(1, 131_072)
PRIORS = st.builds(
    CostPrior,
    st.sampled_from(list(SHAPES.values())),
    st.sampled_from(list(ACCELERATORS.values())),
    st.integers(0, 16),
)


@pytest.mark.parametrize(
    "result", [one for one in results() if one.bound], ids=lambda result: result.case
)
def test_an_estimate_is_within_a_quarter_of_what_was_published(result):
    assert 0.75 < result.ratio < 1.25


@given(PRIORS, TOKENS, TOKENS)
def test_a_longer_prompt_never_takes_less_time_and_a_longer_prefix_of_it_never_more(
    prior, tokens, more
):
    whole = prior.prefill_seconds(tokens + more)

    assert whole >= prior.prefill_seconds(tokens)
    assert prior.prefill_seconds(tokens, more) <= whole * (1 + 1e-9)
    assert prior.prefill_seconds(tokens, more) >= prior.prefill_seconds(tokens)
    assert prior.prefill_seconds(0, more) <= prior.prefill_seconds(1, more)


@given(PRIORS, TOKENS, TOKENS)
def test_a_prompt_in_two_pieces_computes_as_much_as_in_one(prior, first, second):
    constant = prior.prefill_seconds(0)
    pieces = prior.prefill_seconds(first) + prior.prefill_seconds(second, first) - 2 * constant
    whole = prior.prefill_seconds(first + second) - constant

    assert pieces >= whole * (1 - 1e-9), "the weights may be read twice, nothing is saved"
    assert pieces <= 2 * whole * (1 + 1e-9)


@given(PRIORS, st.integers(1, 512), st.integers(0, 10_000_000), st.integers(0, 1_000_000))
def test_a_decode_step_never_gets_faster_with_more_requests_or_context(prior, batch, tokens, more):
    step = prior.decode_step_seconds(batch, tokens)

    assert 0 < step <= prior.decode_step_seconds(batch + 1, tokens + more)
    assert prior.decode_step_seconds(0, 0) == 0


def test_a_step_reads_only_the_experts_that_its_tokens_choose():
    shape = SHAPES["deepseek-v3"]

    assert shape.weights_read(1) == pytest.approx(37.5e9, rel=0.02), "activated, as published"
    assert shape.weights_read(64) < shape.weights_read(256) < shape.parameters


@pytest.mark.parametrize(
    ("name", "kv_bytes"), [("llama3-8b", 131_072), ("llama3-70b", 327_680), ("deepseek-v3", 70_272)]
)
def test_a_token_has_as_many_bytes_as_its_model_says(name, kv_bytes):
    prior = CostPrior(SHAPES[name], ACCELERATORS["h200"])

    assert prior.kv_bytes(3) == 3 * kv_bytes
    room = 0.9 * 8 * 141e9 - SHAPES[name].parameters * SHAPES[name].weight_bytes
    assert prior.kv_tokens_max == int(room / kv_bytes)


def test_no_kv_fits_beside_weights_that_are_too_large():
    assert CostPrior(SHAPES["llama3-70b"], ACCELERATORS["h100"], 1).kv_tokens_max == 0


@given(st.floats(0, 1e12), st.floats(0, 1e12), st.floats(1e6, 1e12), st.floats(0, 1))
def test_bytes_wait_for_those_in_flight(size, before, speed, latency):
    link = Link(speed, latency)
    alone = transfer_seconds(size, link)

    assert transfer_seconds(size, link, before) >= alone
    assert alone == (pytest.approx(latency + size / speed) if size else 0.0)
