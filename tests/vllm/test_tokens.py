"""Tokens with the connector are those without it, whatever comes from the store."""

from tests.vllm.conftest import flip_stored_bytes, prompt

HITS = "vllm:external_prefix_cache_hits"
PROMPTS = [prompt(length, seed) for seed, length in enumerate((300, 64, 65, 40, 500))]
HIT_TOKENS = 256 + 64 + 64 + 448
"""Whole pages of 64 tokens. Of the prompt of one page vLLM computes the last token anew."""
LAYERWISE_HIT_TOKENS = HIT_TOKENS - 64
"""There at least one token of each prompt is left to compute."""


def filled(node, start, prompts=PROMPTS, **changes):
    """An engine that has computed and stored, and has been shut down."""
    engine = start(node.address, **changes)
    engine.generate(prompts)
    engine.ask("settle")
    engine.ask("stop")


def test_prefill_in_chunks_on_one_engine_goes_on_at_another(node, start, plain):
    expected = plain.tokens(PROMPTS)
    producer = start(
        node.address, transfer={"kv_role": "kv_producer"}, max_num_batched_tokens=96,
        enable_chunked_prefill=True,
    )  # fmt: skip
    asked = [{"tokens": p, "transfer": {"do_remote_decode": True}} for p in PROMPTS]
    prefilled = producer.generate(asked, max_tokens=1)

    assert [answer["tokens"] for answer in prefilled] == [tokens[:1] for tokens in expected]
    told = prefilled[0]["transfer"]
    assert (told["do_remote_prefill"], told["kvstore_pages"], told["prompt_tokens"]) == (
        True,
        4,
        300,
    )
    consumer = start(
        node.address, transfer={"kv_role": "kv_consumer"}, max_num_batched_tokens=96,
        enable_chunked_prefill=True,
    )  # fmt: skip
    asked = [
        {"tokens": p, "transfer": answer["transfer"]}
        for p, answer in zip(PROMPTS, prefilled, strict=True)
    ]
    answers = consumer.generate(asked)

    assert [answer["tokens"] for answer in answers] == expected
    assert consumer.metric(HITS) == HIT_TOKENS
    consumer.ask("settle")
    assert consumer.metric("kvstore:stores") == 0, "a consumer does not store"
    assert producer.metric("kvstore:lookups") == 0, "a producer does not look up"


def test_preempted_requests_come_back_from_the_store(node, start):
    prompts = [prompt(200, seed) for seed in range(8)]
    # In bfloat16 vLLM itself gives other tokens when it preempts: what decode steps computed is
    # then computed by prefill. In float32 it makes no difference.
    alone = start(None, dtype="float32", enable_prefix_caching=False)
    expected = alone.tokens(prompts, max_tokens=100)
    alone.close()
    engine = start(node.address, dtype="float32", num_gpu_blocks_override=41)

    assert engine.tokens(prompts, max_tokens=100) == expected
    assert engine.metric("vllm:num_preemptions") > 0
    assert engine.tokens(prompts, max_tokens=100) == expected
    assert engine.metric(HITS) > 0
    engine.ask("settle")
    assert engine.metric("kvstore:corrupt_pages") == 0
    blocks = engine.ask("free_blocks")
    assert blocks["free"] == blocks["all"] - 1


def test_requests_with_one_prefix_at_once_share_it_and_salts_do_not(node, start, plain):
    common = prompt(320, 100)
    prompts = [common + prompt(50, 200 + n) for n in range(8)]
    expected = plain.tokens(prompts)
    (salted,) = plain.tokens([PROMPTS[0]])
    filled(node, start, [prompts[0], {"tokens": PROMPTS[0], "salt": "alice"}])
    engine = start(node.address, enable_prefix_caching=False)

    assert engine.tokens(prompts) == expected
    assert engine.metric(HITS) == 8 * 320
    for salt, hit in (("bob", 0), (None, 0), ("alice", 256)):
        before = engine.metric(HITS)
        (answer,) = engine.generate([{"tokens": PROMPTS[0], "salt": salt}])

        assert answer["tokens"] == salted
        assert engine.metric(HITS) - before == hit, salt


def test_pages_that_come_only_in_part_or_never_are_computed(node, start, plain):
    expected = plain.tokens(PROMPTS)
    filled(node, start)
    for load, hit in (("layerwise", LAYERWISE_HIT_TOKENS), ("async", HIT_TOKENS)):
        engine = start(node.address, transfer={"extra": {"load": load}}, hooks=("failing loads",))

        assert engine.tokens(PROMPTS) == expected
        assert engine.metric(HITS) == hit
        engine.ask("settle")
        failed = engine.metric("kvstore:load_failed_tokens")
        assert failed > 0
        assert engine.metric("kvstore:loaded_tokens") == hit - failed > 0
        engine.ask("stop")
    limits = {"extra": {"load_timeout_ms": 50, "load_timeout_ms_min": 50}}
    engine = start(node.address, transfer=limits, hooks=("stuck loads",))

    assert engine.tokens(PROMPTS) == expected, "nobody waits longer than a load may take"
    assert engine.metric("kvstore:load_timeouts") > 0
    blocks = engine.ask("free_blocks")
    assert blocks["free"] < blocks["all"] - 1, "the jobs are still at it, and hold their blocks"
    engine.ask("let_go")
    engine.ask("settle")
    blocks = engine.ask("free_blocks")
    assert blocks["free"] == blocks["all"] - 1
    assert engine.tokens(PROMPTS) == expected, "late bytes have harmed nobody"


def test_layers_that_come_too_late_are_computed_and_nothing_made_of_them_is_kept(
    node, start, plain
):
    prompts = [PROMPTS[0], PROMPTS[4]]
    expected = plain.tokens(prompts)
    filled(node, start, [tokens[:130] for tokens in prompts])
    soon = {"load": "layerwise", "load_timeout_ms": 20, "load_timeout_ms_min": 20}
    engine = start(node.address, transfer={"extra": soon}, hooks=("overtaken loads",))

    assert engine.tokens(prompts) == expected
    assert engine.metric(HITS) == 2 * 128
    engine.ask("settle")
    assert engine.metric("kvstore:load_failed_tokens") == 2 * 128
    assert engine.metric("kvstore:load_timeouts") >= 2, "late, and not failed in another way"
    assert engine.metric("kvstore:stored_pages") == 2 * (2 + 5), "once they were right"
    assert engine.tokens(prompts) == expected, "from its own cache, or too late again"
    engine.ask("settle")
    blocks = engine.ask("free_blocks")
    assert blocks["free"] == blocks["all"] - 1
    engine.ask("stop")
    other = start(node.address)
    assert other.tokens(prompts) == expected
    assert other.metric(HITS) == 256 + 448


def test_corrupt_pages_are_counted_computed_and_stored_anew(node, start, plain):
    expected = plain.tokens(PROMPTS)
    filled(node, start)
    assert flip_stored_bytes(node) > 1000
    trusting = start(node.address, hooks=("no verification",))
    answers = trusting.generate(PROMPTS)
    assert [answer["cached"] for answer in answers] == [256, 64, 64, 0, 448]
    for number, answer in enumerate(answers):
        same = answer["tokens"] == expected[number]
        assert same == (number == 3), "without verification only what was computed is right"
    trusting.ask("settle")
    trusting.ask("stop")
    engine = start(node.address, enable_prefix_caching=False)

    assert engine.tokens(PROMPTS) == expected
    engine.ask("settle")
    assert engine.metric("kvstore:corrupt_pages") > 0
    assert engine.metric("kvstore:loaded_tokens") == 0
    assert engine.tokens(PROMPTS) == expected
    engine.ask("settle")
    assert engine.metric("kvstore:loaded_tokens") == HIT_TOKENS
