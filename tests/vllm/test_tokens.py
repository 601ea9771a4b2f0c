"""Tokens with the connector are those without it, whatever comes from the store."""

from tests.vllm.conftest import prompt

HITS = "vllm:external_prefix_cache_hits"


def test_a_restarted_engine_hits_what_the_first_one_stored(node, start, plain):
    prompts = [prompt(length, seed) for seed, length in enumerate((300, 64, 65, 40, 500))]
    expected = plain.tokens(prompts)
    first = start(node.address)

    assert first.tokens(prompts) == expected
    assert first.metric(HITS) == 0
    first.ask("settle")
    first.ask("stop")
    second = start(node.address)
    answers = second.generate(prompts)

    assert [answer["tokens"] for answer in answers] == expected
    # Whole pages of 64 tokens, and at least one token is left to compute.
    assert [answer["cached"] for answer in answers] == [256, 0, 64, 0, 448]
    assert second.metric(HITS) == 256 + 64 + 448
    assert second.metric("vllm:prompt_tokens_cached_by_source host") == 256 + 64 + 448
    second.ask("settle")
    assert second.metric("kvstore:loaded_tokens") == 256 + 64 + 448
    assert second.metric("kvstore:stored_pages") == 0
