"""A whole engine whose KV memory is copied as a device's: gathered, through the ring, and back.

Host memory plays the device; everything but CUDA's streams is as it is there.
"""

from tests.vllm.conftest import flip_stored_bytes, prompt

PROMPTS = [prompt(length, seed) for seed, length in enumerate((300, 64, 65, 40, 500))]
HIT_TOKENS = 256 + 64 + 64 + 448


def test_restarted_engines_load_to_the_device_what_the_first_one_stored(node, start, plain):
    expected = plain.tokens(PROMPTS)
    first = start(node.address, hooks=("on a device",))
    assert first.tokens(PROMPTS) == expected
    first.ask("settle")
    first.ask("stop")
    for load, hit in (("async", HIT_TOKENS), ("layerwise", HIT_TOKENS - 64)):
        engine = start(node.address, hooks=("on a device",), transfer={"extra": {"load": load}})
        assert engine.tokens(PROMPTS) == expected, load
        engine.ask("settle")
        assert engine.metric("kvstore:loaded_tokens") == hit
        assert engine.metric("kvstore:device_failures") == 0
        assert engine.metric("kvstore:load_failed_tokens") == 0
        blocks = engine.ask("free_blocks")
        assert blocks["free"] == blocks["all"] - 1, "all but the null block are free again"
        engine.ask("stop")
    plain_memory = start(node.address, enable_prefix_caching=False)
    assert plain_memory.tokens(PROMPTS) == expected, "both kinds of memory share pages"
    plain_memory.ask("settle")
    assert plain_memory.metric("kvstore:loaded_tokens") == HIT_TOKENS
    plain_memory.ask("stop")
    assert flip_stored_bytes(node)
    last = start(node.address, hooks=("on a device",))
    assert last.tokens(PROMPTS) == expected, "damaged pages do not reach the device"
    last.ask("settle")
    assert last.metric("kvstore:corrupt_pages") > 0
    assert last.metric("kvstore:loaded_tokens") == 0
