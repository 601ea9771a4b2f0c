"""Goal: draws depend on (seed, position) alone; streamed text is the text."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_adapters.reference.sampler import Sampling, sample, uniform
from engine_adapters.reference.tokenizer import TextStream, encode

LOGITS = torch.tensor([0.0, 2.0, 1.0, -torch.inf, 2.0])


def test_greedy_takes_the_first_of_the_largest() -> None:
    assert sample(LOGITS, Sampling(temperature=0.0, seed=7), 3) == 1


def test_draws_depend_on_seed_and_position_only() -> None:
    sampling = Sampling(temperature=1.0, seed=5)
    forwards = [sample(LOGITS, sampling, i) for i in range(50)]
    backwards = [sample(LOGITS, sampling, i) for i in reversed(range(50))]
    assert forwards == backwards[::-1]
    assert forwards != [sample(LOGITS, Sampling(temperature=1.0, seed=6), i) for i in range(50)]


def test_draws_follow_the_distribution() -> None:
    sampling = Sampling(temperature=2.0, seed=1)
    counts = np.bincount([sample(LOGITS, sampling, i) for i in range(4000)], minlength=5)
    expected = torch.softmax(LOGITS / 2.0, 0).numpy() * 4000
    assert counts[3] == 0
    assert np.abs(counts - expected).max() < 4 * np.sqrt(4000) / 2


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    # Probabilities 0.40, 0.40, 0.15, 0.05: 0.79 is reached by the first two.
    drawn = {sample(LOGITS, Sampling(temperature=1.0, top_p=0.79, seed=2), i) for i in range(300)}
    assert drawn == {1, 4}
    drawn = {sample(LOGITS, Sampling(temperature=1.0, top_p=1e-9, seed=2), i) for i in range(50)}
    assert drawn == {1}


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**31))
def test_random_numbers_lie_in_the_half_open_unit_interval(seed: int, position: int) -> None:
    assert 0.0 <= uniform(seed, position) < 1.0


@given(st.text(max_size=40))
def test_tokens_of_a_text_are_its_bytes(text: str) -> None:
    assert bytes(encode(text)).decode() == text


@given(st.binary(max_size=40))
def test_streamed_text_equals_the_text_of_the_whole(raw: bytes) -> None:
    stream = TextStream()
    text = "".join(stream.feed(token) for token in raw) + stream.flush()
    assert text == raw.decode(errors="replace")


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_a_stop_string_ends_the_text_and_is_never_given_out(text: str, stops: list[str]) -> None:
    stream, given_out = TextStream(stops), ""
    for token in encode(text):
        given_out += stream.feed(token)
        if stream.stopped:
            break
    given_out += stream.flush()
    ends = [text.find(stop) for stop in stops if stop in text]
    first_complete = min((text.find(s) + len(s) for s in stops if s in text), default=None)
    assert stream.stopped == bool(ends)
    if first_complete is None:
        assert given_out == text
    else:
        whole = text[:first_complete]
        assert given_out == whole[: min(whole.find(s) for s in stops if s in whole)]
