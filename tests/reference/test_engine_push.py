"""Goal: what is pushed from prefill to decode gives the tokens of one engine, byte for byte."""

import pytest

from engine_adapters.reference.sampler import Sampling
from engine_adapters.reference.scheduler import Limits
from tests.reference.conftest import Ask, MakeEngine
from tests.reference.pushed import kept_hashes, pair_of, report

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 5
SEEDED = Sampling(temperature=0.9, top_p=0.95, seed=1234)


@pytest.mark.parametrize("sampling", [Sampling(), SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("length", [1, 15, 16, 63, 64, 65, 128, 200])
def test_pushed_tokens_and_kv_are_those_of_one_engine(
    make_engine: MakeEngine, ask: Ask, length: int, sampling: Sampling
) -> None:
    prompt = TEXT[:length]
    mono = make_engine()
    expected = ask(mono, prompt, 20, sampling).wait()
    pair = pair_of(make_engine, ask)
    here, there = pair.ask(prompt, 20, sampling)

    assert there.wait().tokens == expected.tokens
    assert there.text == expected.text
    assert here.wait().tokens == expected.tokens[:1]
    assert report(here) == report(there) == ("success", None)
    assert there.request.timings.pushed_tokens == length
    assert kept_hashes(pair) == [mono.kv_hashes("request")] * 2


def test_prompts_of_many_chunks_that_share_prefixes_are_pushed_whole(
    make_engine: MakeEngine, ask: Ask
) -> None:
    mono = make_engine(prefix_cache=False)
    small = {"limits": Limits(token_budget=24)}
    pair = pair_of(make_engine, ask, prefill=small, decode=small)
    prompts = [TEXT[: 70 + 37 * number] + f" and {number}" * 9 for number in range(7)]
    both = [pair.ask(one, 12, SEEDED, name=f"r{at}") for at, one in enumerate(prompts)]
    for at, (one, (here, there)) in enumerate(zip(prompts, both, strict=True)):
        expected = ask(mono, one, 12, SEEDED, id=f"r{at}").wait()
        assert there.wait().tokens == expected.tokens
        assert report(here.wait()) == report(there) == ("success", None)
        assert kept_hashes(pair, f"r{at}") == [mono.kv_hashes(f"r{at}")] * 2


def test_what_decode_has_of_a_prompt_is_not_pushed(make_engine: MakeEngine, ask: Ask) -> None:
    pair = pair_of(make_engine, ask)
    ask(pair.decode, TEXT[:150], 2).wait()
    _, there = pair.ask(TEXT[:300])
    expected = ask(make_engine(), TEXT[:300], 16).wait()

    assert there.wait().tokens == expected.tokens
    timings = there.request.timings
    assert (timings.cached_tokens, timings.pushed_tokens) == (128, 300 - 128)
