"""A whole engine whose KV memory is copied as a device's: gathered, through the ring, and back.

Host memory plays the device; everything but CUDA's streams is as it is there.
"""

import pytest

from tests.vllm.conftest import flip_stored_bytes, prompt

PROMPTS = [prompt(length, seed) for seed, length in enumerate((300, 64, 65, 40, 500))]
HIT_TOKENS = 256 + 64 + 448


@pytest.mark.parametrize("load", ["async", "layerwise"])
def test_a_restarted_engine_loads_to_the_device_what_the_first_one_stored(node, start, plain, load):
    expected = plain.tokens(PROMPTS)
    transfer = {"extra": {"load": load}}
    first = start(node.address, hooks=("on a device",), transfer=transfer)
    assert first.tokens(PROMPTS) == expected
    first.ask("settle")
    first.ask("stop")
    second = start(node.address, hooks=("on a device",), transfer=transfer)
    assert second.tokens(PROMPTS) == expected
    second.ask("settle")
    assert second.metric("kvstore:loaded_tokens") == HIT_TOKENS
    assert second.metric("kvstore:device_failures") == 0
    assert second.metric("kvstore:load_failed_tokens") == 0
    blocks = second.ask("free_blocks")
    assert blocks["free"] == blocks["all"] - 1, "all but the null block are free again"
    second.ask("stop")
    if load == "async":
        plain_memory = start(node.address)
        assert plain_memory.tokens(PROMPTS) == expected, "both kinds of memory share pages"
        plain_memory.ask("settle")
        assert plain_memory.metric("kvstore:loaded_tokens") == HIT_TOKENS


def test_damaged_pages_do_not_reach_the_device(node, start, plain):
    expected = plain.tokens(PROMPTS)
    first = start(node.address, hooks=("on a device",))
    first.tokens(PROMPTS)
    first.ask("settle")
    first.ask("stop")
    assert flip_stored_bytes(node)
    second = start(node.address, hooks=("on a device",))
    assert second.tokens(PROMPTS) == expected
    second.ask("settle")
    assert second.metric("kvstore:corrupt_pages") > 0
    assert second.metric("kvstore:loaded_tokens") == 0
