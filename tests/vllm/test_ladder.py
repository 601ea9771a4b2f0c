"""Goal: whatever the store has kept, every answer is that of an engine without a store.

For each kind of model 40 prompts, greedy and seeded: cold, warm, and after a restart of the engine,
of the node, and of both.
"""

from typing import Any

import pytest

from tests.conftest import WaitUntil
from tests.vllm.conftest import Make, Node, Start, prompt
from tests.vllm.engines import Engine

HITS = "vllm:external_prefix_cache_hits"
PAGE_TOKENS = 64
SHARED = prompt(320, 1000)
PROMPTS = [prompt(40 + 47 * (number % 10), number) for number in range(32)]
PROMPTS += [SHARED + prompt(20 + 15 * number, 2000 + number) for number in range(8)]
Samplings = dict[str, dict[str, float]]
SAMPLINGS: Samplings = {"greedy": {}, "seeded": {"temperature": 0.8, "seed": 7}}
SAMPLINGS_OF_STATES: Samplings = {"greedy": {}}
"""vLLM computes prompts of models with states in parts, which vLLM for CPUs cannot do for a request
with a seed (``CPU Generator does not use offset``)."""
KINDS: dict[str, dict[str, Any]] = {
    "dense": {}, "windows": {}, "latents": {"block_size": 16},
    "states": {"enable_prefix_caching": True},
}  # fmt: skip
"""Kind of model → what vLLM needs for it. It keeps states only for its own prefix cache; the others
have none, so that whatever was computed before comes from the store."""


@pytest.fixture
def lasting(spawn, tmp_path) -> Node:
    """A node with a disk, so that pages outlast it."""
    folder = tmp_path / "ssd"
    folder.mkdir()
    return Node(
        spawn, tmp_path / "kv.sock", **{
            "ssd.directories": folder, "ssd.capacity_bytes": 512 << 20,
            "ssd.segment_bytes": 16 << 20, "ssd.sync": "none", "ssd.write": "through",
            "ssd.admission": "all",
        }
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_is_that_of_an_engine_without_a_store(
    kind: str, lasting: Node, start: Start, make: Make, model, request, wait_until: WaitUntil
):
    folder = model if kind == "dense" else make(kind)
    given: dict[str, Any] = {
        "model": folder, "enable_prefix_caching": False, "max_num_batched_tokens": 8192,
        "num_gpu_blocks_override": 2560,  # stores hold a quarter: none is put off
        **KINDS[kind],
    }  # fmt: skip
    own_cache = given["enable_prefix_caching"]
    samplings = SAMPLINGS_OF_STATES if own_cache else SAMPLINGS
    if kind == "dense":
        expected = answers(request.getfixturevalue("plain"), samplings)
    else:
        alone = start(None, **given)
        expected = answers(alone, samplings)
        alone.close()
    assert len({tuple(tokens) for tokens in expected}) > 30 * len(samplings), "they differ"

    engine = start(lasting.address, **given)
    assert answers(engine, samplings) == expected, "cold"
    assert engine.metric("kvstore:stored_pages") > 0
    if own_cache:
        assert answers(engine, samplings) == expected, "warm"
    else:
        check(engine, samplings, expected, "warm", exact=True)
    engine.close()
    engine = start(lasting.address, **given)
    check(engine, samplings, expected, "after a restart of the engine", exact=not own_cache)
    assert engine.metric("vllm:prompt_tokens_cached_by_source host") == engine.metric(HITS)
    assert engine.ask("policy") == {"policy": "recompute", "recomputes": True}
    blocks = engine.ask("free_blocks")
    assert blocks["free"] == blocks["all"] - 1, "all but the null block are free again"
    lasting.restart()
    if own_cache:
        assert answers(engine, samplings) == expected, "after a restart of the node"
    else:
        wait_until(lambda: reached(engine), 30.0, "the engine uses the node again")
        check(engine, samplings, expected, "after a restart of the node", exact=False)
    engine.close()
    lasting.restart()
    engine = start(lasting.address, **given)
    check(engine, samplings, expected, "after a restart of both", exact=False)
    assert engine.metric("kvstore:disk_hit_tokens") + engine.metric("kvstore:slower_tokens") > 0
    assert engine.metric("kvstore:corrupt_pages") == 0
    assert engine.metric("kvstore:load_failed_tokens") == 0


def answers(engine: Engine, samplings: Samplings) -> list[list[int]]:
    """The tokens of all answers; the samplings share no page, so that both are cold at first."""
    found: list[list[int]] = []
    for name, sampling in samplings.items():
        asked = [{"tokens": tokens, "salt": name} for tokens in PROMPTS]
        found += [answer["tokens"] for answer in engine.generate(asked, 8, **sampling)]
    engine.ask("settle")
    return found


def check(
    engine: Engine, samplings: Samplings, expected: list[list[int]], rung: str, *, exact: bool
) -> None:
    """All answers are right, and the store had every whole page, or if not exact, some of them."""
    before = found_tokens(engine)
    assert answers(engine, samplings) == expected, rung
    found = found_tokens(engine) - before
    pages = sum((len(tokens) - 1) // PAGE_TOKENS for tokens in PROMPTS)
    wanted = len(samplings) * pages * PAGE_TOKENS
    assert (found == wanted) if exact else (0 < found <= wanted), (rung, found, wanted)


def found_tokens(engine: Engine) -> float:
    """Tokens that the store had, whether they were loaded or computed faster."""
    return engine.metric(HITS) + engine.metric("kvstore:slower_tokens")


def reached(engine: Engine) -> bool:
    """Whether a lookup finds a node again."""
    before = found_tokens(engine)
    engine.generate([{"tokens": SHARED, "salt": "greedy"}], max_tokens=1)
    return found_tokens(engine) > before
