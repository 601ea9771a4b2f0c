"""Engines on a GPU: KV that comes from the store computes what KV of the engine's own cache does.

Answers are compared with their log-probabilities, to the last bit: a token alone may hide a wrong
byte. One request at a time, so that kernels see the same shapes, and every prompt has as many
tokens in whole pages as in whole blocks. Needs vLLM for CUDA in ``VLLM_PYTHON``.
"""

from typing import Any

import pytest

from tests.vllm.conftest import Make, Node, Start, flip_stored_bytes, prompt
from tests.vllm.engines import ENGINE, Engine

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

PAGE_TOKENS = 2 * ENGINE["block_size"]
SHARED = prompt(5 * PAGE_TOKENS, 1000)
PROMPTS = [prompt(at * PAGE_TOKENS + 1 + 7 * at % 32, at) for at in (0, 1, 3, 7, 14)]
PROMPTS += [SHARED + prompt(PAGE_TOKENS * at + 9 + at, 2000 + at) for at in range(3)]
ANSWER_TOKENS = 16
GIVEN: dict[str, Any] = {
    "max_num_seqs": 1, "gpu_memory_utilization": 0.08, "kv_cache_memory_bytes": 512 << 20,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "tiny": {}, "windows": {}, "wide-latents": {"block_size": 64},
    "fp8": {"kv_cache_dtype": "fp8"},
}  # fmt: skip
"""Kind of model → what vLLM needs for it."""


def answers(engine: Engine) -> list[tuple[list[int], list[list[float]]]]:
    """Tokens and log-probabilities of all answers, one request after the other."""
    found = []
    for one in PROMPTS:
        (answer,) = engine.generate([one], ANSWER_TOKENS, logprobs=5)
        found.append((answer["tokens"], answer["logprobs"]))
    return found


@pytest.mark.parametrize("load", ["async", "layerwise"])
@pytest.mark.parametrize("kind", KINDS)
def test_kv_from_the_store_computes_what_the_engines_own_kv_does(
    kind: str, load: str, node: Node, start: Start, make: Make
):
    if load == "layerwise" and kind == "windows":
        pytest.skip("refused: several KV groups")
    given = {**GIVEN, "model": make("tiny" if kind == "fp8" else kind), **KINDS[kind]}
    if load == "layerwise":  # refused with what vLLM does by default on a GPU
        given |= {"hooks": ("V1 runner",), "async_scheduling": False}
    alone = start(None, enable_prefix_caching=True, **given)
    cold = answers(alone)
    warm = answers(alone)
    alone.close()
    assert len({tuple(tokens) for tokens, _ in cold}) > 0.75 * len(cold), "a wrong answer shows"

    first = start(node.address, enable_prefix_caching=True, **given)
    assert answers(first) == cold
    first.ask("settle")
    first.ask("stop")
    second = start(
        node.address, transfer={"extra": {"load": load}}, enable_prefix_caching=True, **given
    )
    assert answers(second) == warm
    second.ask("settle")
    loaded = second.metric("kvstore:loaded_tokens")
    assert loaded > 0
    assert loaded == second.metric("vllm:external_prefix_cache_hits")
    assert second.metric("kvstore:device_failures") == 0
    assert second.metric("kvstore:load_failed_tokens") == 0
    blocks = second.ask("free_blocks")
    assert blocks["free"] == blocks["all"] - 1, "all but the null block are free again"
    second.ask("stop")
    assert flip_stored_bytes(node)
    last = start(node.address, enable_prefix_caching=True, **given)
    assert answers(last) == cold, "damaged pages do not reach the GPU"
    assert last.metric("kvstore:corrupt_pages") > 0
    assert last.metric("kvstore:loaded_tokens") == 0
