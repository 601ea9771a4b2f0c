"""Goal: adapters and tensor parallelism on the real engine: right and hit."""

import pytest
import torch

from tests.vllm.conftest import Make, Start, flip_stored_bytes, prompt
from tests.vllm.engines import EngineError
from tests.vllm.test_tokens import HIT_TOKENS, HITS, PROMPTS


def test_a_model_and_its_adapters_share_no_page(node, start: Start, make: Make):
    adapters = [None, str(make("adapter", 1)), str(make("adapter", 2))]
    prompt = PROMPTS[0]
    engine = start(node.address, enable_prefix_caching=False, enable_lora=True, max_lora_rank=8)

    def ask(adapter: str | None) -> tuple[list[int], float]:
        before = engine.metric(HITS)
        (answer,) = engine.generate([{"tokens": prompt, "adapter": adapter}])
        engine.ask("settle")
        return answer["tokens"], engine.metric(HITS) - before

    computed = [ask(adapter) for adapter in adapters]
    loaded = [ask(adapter) for adapter in adapters]

    assert [hits for _, hits in computed] == [0, 0, 0]
    assert len({tuple(tokens) for tokens, _ in computed}) == 3, "the adapters do something"
    assert [hits for _, hits in loaded] == [256, 256, 256]
    assert [tokens for tokens, _ in loaded] == [tokens for tokens, _ in computed]


def test_one_rank_and_two_ranks_read_what_the_other_has_stored(node, start: Start):
    """From one rank to two, and back; without caches of their own, so nothing hits but pages.

    In float32: in bfloat16 two ranks, which round otherwise, answer otherwise without a store too.
    """
    other = [prompt(length, 100 + seed) for seed, length in enumerate((300, 500))]
    changes = {"enable_prefix_caching": False, "dtype": "float32"}
    one = start(node.address, **changes)
    expected = one.tokens(PROMPTS)
    salted = one.generate([{"tokens": tokens, "salt": "not to be found"} for tokens in other])
    expected_other = [answer["tokens"] for answer in salted]
    assert one.metric(HITS) == 0
    one.ask("settle")
    two = start(node.address, hooks=("two ranks",), tensor_parallel_size=2, **changes)
    assert two.tokens(PROMPTS) == expected
    assert two.metric(HITS) == HIT_TOKENS
    assert two.metric("kvstore:lookups") == 4, "for each prompt of a page, one for all ranks"
    assert two.tokens(other) == expected_other
    two.ask("settle")
    assert two.tokens(other) == expected_other
    assert two.metric(HITS) == HIT_TOKENS + 256 + 448
    two.close()

    assert one.tokens(other) == expected_other
    assert one.metric(HITS) == 256 + 448


def test_a_window_of_which_a_page_is_missing_is_computed_from_the_start(
    node, start: Start, make: Make
):
    """All layers have a window: vLLM has no block for what lies before it, so no page helps alone.

    Without a prefix cache nothing hits but pages, and the first answers are those without a store.
    """
    prompts = [prompt(600, 300), prompt(530, 301)]
    engine = start(
        node.address, model=make("all-windows"), dtype="float32", enable_prefix_caching=False,
        hooks=("failing loads",),
    )  # fmt: skip

    def ask(asked: list[list[int]]) -> tuple[list[list[int]], float, float]:
        """Tokens; how many tokens were loaded, and how many were to be and failed."""
        names = ("kvstore:loaded_tokens", "kvstore:load_failed_tokens")
        before = [engine.metric(name) for name in names]
        tokens = engine.tokens(asked)
        engine.ask("settle")
        loaded, failed = (
            engine.metric(name) - was for name, was in zip(names, before, strict=True)
        )
        return tokens, loaded, failed

    expected, *loads = ask(prompts)
    assert loads == [0, 0]

    tokens, loaded, failed = ask(prompts)  # every second load lacks the second half of its pages
    assert tokens == expected
    assert loaded > 0
    assert failed > 0
    assert flip_stored_bytes(node) > 1000
    assert ask(prompts) == (expected, 0, loaded + failed)
    for _ in range(3):  # each load finds one corrupt page of its window, and there are two
        tokens, loaded, _ = ask(prompts[::-1])
        assert tokens == expected[::-1], "and what was computed then and stored is right, too"
    assert loaded > 0


def test_latents_are_refused_where_vllm_would_ignore_what_was_loaded(
    node, start: Start, make: Make
):
    """Without AMX, vLLM's backend answers wrongly after every load, with whatever connector."""
    if torch.cpu._is_amx_tile_supported():
        pytest.skip("on a CPU with AMX vLLM has another backend")
    with pytest.raises(EngineError) as raised:
        start(node.address, model=make("latents"), block_size=16)

    assert "DeepseekV2ForCausalLM uses MLA" in str(raised.value)


def test_latents_are_held_once_for_two_ranks_and_read_by_one(node, start: Start, make: Make):
    """Ranks have the same latents: a page is one rank's to write, and all read it."""
    if not torch.cpu._is_amx_tile_supported():
        pytest.skip("this CPU has no AMX: there the connector refuses MLA")
    given = {"model": make("latents"), "block_size": 16, "enable_prefix_caching": False}
    two = start(node.address, hooks=("two ranks",), tensor_parallel_size=2, **given)
    expected = two.tokens(PROMPTS)
    two.ask("settle")
    assert two.tokens(PROMPTS) == expected
    assert two.metric(HITS) == HIT_TOKENS
    stored = two.metric("kvstore:stored_pages_total")
    two.close()

    one = start(node.address, **given)
    one.generate([{"tokens": tokens, "salt": "not to be found"} for tokens in PROMPTS])
    one.ask("settle")
    assert one.metric("kvstore:stored_pages_total") == stored, "no page twice, whatever the ranks"
    one.tokens(PROMPTS)
    assert one.metric(HITS) == HIT_TOKENS
