"""Goal: log-probabilities are those of the model, whoever has sampled a token."""

import math

import numpy as np
import torch

from engine_adapters.reference.request import Push
from engine_adapters.reference.sampler import logprobs_of
from tests.engine_adapters.reference.conftest import Answer, Ask, MakeEngine
from tests.engine_adapters.reference.pushed import ROOMS, SEEDED, TEXT, pair_of, report
from tests.engine_adapters.reference.test_http import scenario, service


def told(answer: Answer) -> list[dict[int, float]]:
    found: list[dict[int, float]] = []
    while answer.finish_reason is None:
        found += answer.next().logprobs
    return found


def test_they_are_of_the_whole_vocabulary_with_the_chosen_token_first() -> None:
    logits = torch.tensor([1.0, -math.inf, 3.0, 2.0, 2.0])
    weights = np.exp([1.0, -math.inf, 3.0, 2.0, 2.0])
    found = logprobs_of(logits, 0, 5)
    assert list(found) == [0, 2, 3, 4], "an excluded token is no alternative"
    assert np.allclose(np.exp(list(found.values())), (weights / weights.sum())[list(found)])
    assert list(logprobs_of(logits, 2, 2)) == [2, 3]
    assert list(logprobs_of(logits, 4, 0)) == [4]


def test_an_answer_has_them_in_openais_format_if_asked() -> None:
    async def run() -> None:
        async with service() as s:
            plain = await s.complete(temperature=0.9, seed=5)
            assert "logprobs" not in plain["choices"][0]
            answer = await s.complete(temperature=0.9, seed=5, logprobs=2)
            choice = answer["choices"][0]
            assert choice["token_ids"] == plain["choices"][0]["token_ids"]
            found = choice["logprobs"]
            assert found["tokens"] == [chr(token) for token in choice["token_ids"]]
            for name, own, best in zip(*found.values(), strict=True):
                assert best[name] == own <= 0.0
                assert 2 <= len(best) <= 3
                assert sum(map(math.exp, best.values())) <= 1.0 + 1e-9
            none = await s.complete(logprobs=0)
            assert none["choices"][0]["logprobs"]["top_logprobs"] == [None] * 8
            for wrong in (6, -1):
                status, refused = await s.post(
                    "/v1/completions", {"prompt": "a", "logprobs": wrong}
                )
                assert (status, "logprobs" in refused["error"]["message"]) == (400, True)

    scenario(run)


def test_decode_tells_those_of_the_token_that_prefill_sampled(
    make_engine: MakeEngine, ask: Ask
) -> None:
    expected = told(ask(make_engine(), TEXT[:90], 6, SEEDED, logprobs=3))
    pair = pair_of(make_engine, ask)
    here = ask(
        pair.prefill,
        TEXT[:90],
        1,
        SEEDED,
        to_handoff=True,
        push=(push := Push(next(ROOMS))),
        logprobs=3,
    )
    there = pair.ask_decode(TEXT[:90], push.room, 6, SEEDED, logprobs=3)

    found = told(there)
    assert report(there) == ("success", None)
    assert len(found) == 6
    assert found == expected
    assert told(here) == expected[:1]
    second = ask(
        pair.prefill, TEXT[:90], 1, SEEDED, to_handoff=True, push=(push := Push(next(ROOMS)))
    )
    again = pair.ask_decode(TEXT[:90], push.room, 6, SEEDED, logprobs=3)
    assert told(again) == [{}, *expected[1:]], "prefill was not asked"
    second.wait()
    assert second.request.timings.cached_tokens > 0
    cached = second.request.timings.cached_tokens
    assert again.request.timings.prefill_cached_tokens == cached
