"""Goal: whatever the store has kept, every answer is that of an engine without a store.

For each kind of model 40 prompts, greedy and seeded: cold, warm, and after a restart of the node,
of the engine, and of both.
"""

from typing import Any

import pytest
import torch

from tests.conftest import WaitUntil
from tests.vllm.conftest import Make, Node, Start, prompt
from tests.vllm.engines import Engine

SHARED = prompt(320, 1000)
PROMPTS = [prompt(40 + 47 * (number % 10), number) for number in range(32)]
PROMPTS += [SHARED + prompt(20 + 15 * number, 2000 + number) for number in range(8)]
SAMPLINGS: dict[str, dict[str, float]] = {"greedy": {}, "seeded": {"temperature": 0.8, "seed": 7}}
ANSWER_TOKENS = 8
DENSE_PAGE_TOKENS, STATES_PAGE_TOKENS = 64, 96
KINDS: dict[str, dict[str, Any]] = {
    "dense": {}, "windows": {}, "latents": {"block_size": 16},
    "states": {"enable_prefix_caching": True, "hooks": ("seeds in parts",)},
}  # fmt: skip
"""Kind of model → what vLLM needs for it. It keeps states only for its own prefix cache, which is
emptied before each rung; the others have none."""


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
    if kind == "latents" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this CPU has no AMX: there the connector refuses MLA (see test_models.py)")
    given: dict[str, Any] = {
        "model": model if kind == "dense" else make(kind), "enable_prefix_caching": False,
        "max_num_batched_tokens": 8192,
        "num_gpu_blocks_override": 2560,  # stores hold a quarter at most: none is put off
        **KINDS[kind],
    }  # fmt: skip
    page_tokens = STATES_PAGE_TOKENS if kind == "states" else DENSE_PAGE_TOKENS
    whole = len(SAMPLINGS) * sum((len(one) - 1) // page_tokens for one in PROMPTS) * page_tokens
    if kind == "dense":
        expected, _ = climb(request.getfixturevalue("plain"))
    else:
        alone = start(None, **given)
        expected, _ = climb(alone)
        alone.close()
    different = {tuple(tokens) for tokens in expected}
    assert len(different) > 0.75 * len(expected), "so that a wrong answer shows"

    engine = start(lasting.address, **given)
    assert climb(engine)[0] == expected, "cold"
    assert climb(engine) == (expected, whole), "warm"
    lasting.restart()
    wait_until(lambda: reached(engine), 30.0, "the engine uses the node again")
    assert climb(engine) == (expected, whole), "after a restart of the node"
    assert engine.metric("kvstore:disk_hit_tokens") > 0
    engine.close()

    engine = start(lasting.address, **given)
    assert engine.ask("policy") == {"policy": "recompute", "recomputes": True}
    assert climb(engine) == (expected, whole), "after a restart of the engine"
    from_store = engine.metric("vllm:external_prefix_cache_hits")
    assert engine.metric("vllm:prompt_tokens_cached_by_source host") == from_store
    assert engine.metric("kvstore:loaded_tokens") == from_store
    if kind != "states":
        assert from_store == whole
    blocks = engine.ask("free_blocks")
    assert blocks["free"] == blocks["all"] - 1, "all but the null block are free again"
    engine.close()

    lasting.restart()
    engine = start(lasting.address, **given)
    assert climb(engine) == (expected, whole), "after a restart of both"
    assert engine.metric("kvstore:disk_hit_tokens") > 0
    assert engine.metric("kvstore:corrupt_pages") == 0
    assert engine.metric("kvstore:load_failed_tokens") == 0


def climb(engine: Engine) -> tuple[list[list[int]], int]:
    """The tokens of all answers, and how many tokens of their prompts were not computed.

    The samplings share no page, so that both are cold at first.
    """
    tokens: list[list[int]] = []
    cached = 0
    for name, sampling in SAMPLINGS.items():
        engine.ask("forget")
        asked = [{"tokens": one, "salt": name} for one in PROMPTS]
        answers = engine.generate(asked, ANSWER_TOKENS, **sampling)
        tokens += [answer["tokens"] for answer in answers]
        cached += sum(answer["cached"] for answer in answers)
        engine.ask("settle")
    return tokens, cached


def reached(engine: Engine) -> bool:
    """Whether a lookup finds pages again."""
    engine.ask("forget")
    (answer,) = engine.generate([{"tokens": PROMPTS[-1], "salt": "greedy"}], max_tokens=1)
    return bool(answer["cached"])
