"""Several prompts that are priced at once have the same times as each alone, to the last bit."""

import numpy as np
import pytest

from conductor.routing.columns import Column, CostInputs
from conductor.routing.computing import Computing, Prompt, computing, prompt_columns
from conductor.routing.policy import Fetches, never_fetches, sooner

ENGINES = 9


def _prompt(random: np.random.Generator, *, at_node: bool, peer: bool) -> Prompt:
    tokens = int(random.integers(1, 40_000))
    usable = random.integers(0, tokens + 1, ENGINES).astype(np.float64)
    parts = None
    if at_node:
        parts = np.floor(usable / 3) * random.random((2, ENGINES)).round()
    more = (random.integers(0, 9_000, ENGINES) * float(peer)).astype(np.float64)
    return Prompt(tokens, usable, more, usable, parts, np.zeros(0, dtype=np.uint64), 100.0)


def _alone(found: Computing, at: int) -> list[bytes]:
    return [one.tobytes() for one in found.of(at)]


@pytest.mark.parametrize("fetches", [sooner, never_fetches])
def test_prompts_together_are_priced_as_alone(fetches: Fetches) -> None:
    random = np.random.default_rng(5)
    costs: CostInputs[Column] = CostInputs._make(
        random.random((len(CostInputs._fields), ENGINES)) * 1e-4
    )
    rows = np.array([7, 2, 3, 5], dtype=np.intp)
    costs = CostInputs._make([one.take(rows) for one in costs])
    coming = random.random(len(rows)) * 1e3
    prompts = [
        _prompt(random, at_node=bool(at & 1), peer=bool(at & 2)) for at in range(16)
    ]  # of all kinds
    together = computing(prompt_columns(prompts), rows, costs, coming, fetches, {})
    for at, prompt in enumerate(prompts):
        alone = computing(prompt_columns([prompt]), rows, costs, coming, fetches, {})
        assert _alone(together, at) == _alone(alone, 0)
    assert together.prefix.any()
    assert together.fetched.any(axis=(1, 2)).tolist() == [True, True, fetches is sooner]


def test_only_the_engine_that_will_have_more_expects_it() -> None:
    random = np.random.default_rng(6)
    costs: CostInputs[Column] = CostInputs._make(np.full((len(CostInputs._fields), ENGINES), 1e-4))
    rows = np.arange(ENGINES, dtype=np.intp)
    prompt = _prompt(random, at_node=False, peer=False)._replace(tokens=50_000)
    of = (prompt_columns([prompt]), rows, costs, np.zeros(ENGINES), never_fetches)
    before, after = computing(*of, {}), computing(*of, {4: 45_000.0})
    assert np.flatnonzero(before.prefix != after.prefix).tolist() == [4]
    assert after.prefix[0, 4] == 45_000.0
    assert after.prefill_s[0, 4] < before.prefill_s[0, 4]
