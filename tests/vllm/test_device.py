"""A whole engine whose KV memory is copied as a device's: gathered, through the ring, and back.

Host memory plays the device; everything but CUDA's streams is as it is there.
"""

from tests.vllm.conftest import flip_stored_bytes, prompt
from tests.vllm.engine_process import DEVICE_WORKS

PROMPTS = [prompt(length, seed) for seed, length in enumerate((300, 64, 65, 40, 500))]
HIT_TOKENS = 256 + 64 + 64 + 448
ROUNDS_MAX = 5


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


def test_copies_that_fail_or_never_end_cost_misses_and_the_engine_goes_on(
    node, start, plain, wait_until
):
    expected = plain.tokens(PROMPTS)
    engine = start(node.address, hooks=("on a late device",))

    def loaded():
        before = engine.metric("kvstore:loaded_tokens")
        engine.ask("forget")
        assert engine.tokens(PROMPTS) == expected
        engine.ask("settle")
        return engine.metric("kvstore:loaded_tokens") - before

    assert loaded() == 0
    assert loaded() == HIT_TOKENS
    assert engine.metric("kvstore:device_failures") == 0

    engine.ask("device", fails=2)
    failed = HIT_TOKENS - loaded()
    assert engine.ask("device")["failures_left"] == 0
    assert engine.metric("kvstore:device_failures") == 2
    assert engine.metric("kvstore:load_failed_tokens") == failed > 0
    assert loaded() == HIT_TOKENS, "the next loads work"

    engine.ask("device", stalled=True)
    engine.ask("forget")
    assert engine.tokens(PROMPTS) == expected, "nobody waits for a device that does not go on"
    for _ in range(20):  # steps that tell the scheduler which jobs have ended
        assert engine.tokens([PROMPTS[3]]) == [expected[3]]
        blocks = engine.ask("free_blocks")
        assert blocks["free"] < blocks["all"] - 1, "blocks that it may still write are held"
    assert engine.metric("kvstore:device_failures") > 2
    engine.ask("device")
    engine.ask("settle")
    blocks = engine.ask("free_blocks")
    assert blocks["free"] == blocks["all"] - 1
    assert loaded() == HIT_TOKENS

    engine.ask("forget")
    engine.ask("device", pause_s=0.02)
    engine.send("generate", prompts=[{"tokens": one} for one in PROMPTS], max_tokens=12)
    wait_until(lambda: DEVICE_WORKS in engine.log.read_text(), 30.0, "copies run")
    node.process.kill()
    assert [one["tokens"] for one in engine.answer()["answers"]] == expected
    engine.ask("device")
    engine.ask("settle")
    blocks = engine.ask("free_blocks")
    assert blocks["free"] == blocks["all"] - 1
    node.start()
    wait_until(lambda: loaded() == HIT_TOKENS, 30.0, "the engine uses the node started again")


def test_requests_preempted_while_the_device_copies_get_the_right_tokens(node, start):
    prompts = [prompt(200, seed) for seed in range(8)]
    # In bfloat16 vLLM itself gives other tokens when it preempts.
    alone = start(None, dtype="float32", enable_prefix_caching=False)
    expected = alone.tokens(prompts, max_tokens=100)
    alone.close()
    engine = start(
        node.address, dtype="float32", num_gpu_blocks_override=41, hooks=("on a late device",)
    )
    preempted = 0
    for round_ in range(ROUNDS_MAX):
        if preempted and round_ >= 2:  # the second one loads
            break
        engine.ask("device", pause_s=0.002 * 2**round_)  # slower, until one falls into a copy
        assert engine.tokens(prompts, max_tokens=100) == expected
        preempted = engine.ask("device")["preempted"]
    assert preempted > 0
    engine.ask("settle")
    assert engine.metric("kvstore:loaded_tokens") > 0
    assert engine.metric("kvstore:device_failures") == 0
    blocks = engine.ask("free_blocks")
    assert blocks["free"] == blocks["all"] - 1
