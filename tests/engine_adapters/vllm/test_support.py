"""Goal: whatever the connector cannot store is refused by name, with what to do as the last words.

Models and KV groups have the names and attributes of vLLM's; ``tests/vllm`` starts real ones.
"""

from types import SimpleNamespace as Values

import pytest
from msgspec import structs

from engine_adapters.vllm.support import (
    REMEDY,
    TESTED_VERSIONS,
    backends_of,
    check_groups,
    check_model,
    check_revision,
    commit_of,
    drop_wrong_parameters,
    heads_of,
    may_load,
    packing_settings,
    takes_whole,
)
from kvstore.engine.identity import Group
from kvstore.protocol.errors import ConfigError


@pytest.mark.parametrize("revision", ["", None, "main", "v1.0", "ab" * 19, "AB" * 20])
def test_what_no_commit_identifies_has_no_revision_and_is_refused(revision):
    assert commit_of(revision) == ""
    with pytest.raises(ConfigError, match="set `revision` in kv_connector_extra_config"):
        check_revision(commit_of(revision), "some/model")


def test_a_commit_identifies_weights():
    commit = "0a" * 20
    assert check_revision(commit_of(commit), "some/model") == commit


def model_of(architecture, **changes):
    """A model's configuration; changes are its properties."""
    plain = {
        "is_hybrid": False, "is_attention_free": False, "is_encoder_decoder": False,
        "use_mla": False, "runner_type": "generate", "is_prefix_caching_supported": True,
        "hf_config": Values(to_dict=dict),
    }  # fmt: skip
    return Values(architecture=architecture, model="/models/m", **{**plain, **changes})


def config_of(model, method=None, *, caching=True, ranks=1, device="cpu", chunked=True):
    return Values(
        device_config=Values(device_type=device),
        scheduler_config=Values(enable_chunked_prefill=chunked),
        model_config=model, speculative_config=Values(method=method) if method else None,
        cache_config=Values(enable_prefix_caching=caching),
        parallel_config=Values(tensor_parallel_size=ranks),
    )  # fmt: skip


def group_of(kind, layers=("model.layers.0.attn",), eagle=False, **spec):
    """A KV group whose specification is of the class ``kind``."""
    return Values(
        kv_cache_spec=type(kind, (), spec)(), layer_names=list(layers), is_eagle_group=eagle
    )


def states_of(kind="GDN_ATTN", mode="align", drafts=0):
    """A group of states."""
    return group_of(
        "MambaSpec", ["model.layers.0.mixer"], mamba_type=Values(name=kind), mamba_cache_mode=mode,
        num_speculative_blocks=drafts, num_prefill_checkpoint_blocks=0,
    )  # fmt: skip


FULL = group_of("FullAttentionSpec")
STATES = model_of("Qwen3NextForCausalLM", is_hybrid=True)


@pytest.mark.parametrize("method", [None, "ngram", "ngram_gpu", "suffix", "medusa"])
def test_models_with_kv_for_each_token_and_drafts_without_kv_are_taken(method):
    check_model(config_of(model_of("LlamaForCausalLM"), method))
    check_model(config_of(None))


def test_models_that_pool_over_all_tokens_are_refused():
    """vLLM raises in the worker if the first tokens of such a prompt are not computed."""
    pooling = {"runner_type": "pooling"}
    check_model(config_of(model_of("Qwen3ForCausalLM", **pooling)))
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM pools over all tokens") as raised:
        check_model(
            config_of(model_of("Qwen3ForCausalLM", is_prefix_caching_supported=False, **pooling))
        )
    assert str(raised.value).endswith(REMEDY)


def test_whole_prompts_are_loaded_with_full_attention_in_versions_that_were_tested():
    full = Group(index=0, layers=4, block_tokens=32, block_bytes=128, kv_heads=2)
    windows = structs.replace(full, index=1, window_tokens=256)
    states = structs.replace(full, index=1, state=True)
    (tested,) = TESTED_VERSIONS

    assert takes_whole([full], tested)
    assert takes_whole([full, full], tested)
    assert not takes_whole([full, windows], tested)
    assert not takes_whole([full, states], tested)
    assert not takes_whole([full], "0.33.0"), "its scheduler was not read"


@pytest.mark.parametrize("skips", [True, False])
def test_requests_for_the_logprobs_of_their_prompts_load_nothing(skips):
    """Whatever the user says about the prefix cache: vLLM fails in its own output otherwise."""
    plain = Values(prompt_logprobs=None, prompt_logprob_token_ids=None)
    asked = [
        Values(prompt_logprobs=0, prompt_logprob_token_ids=None),
        Values(prompt_logprobs=None, prompt_logprob_token_ids=[1]),
    ]
    for sampling in (plain, None, Values()):
        request = Values(sampling_params=sampling, skip_reading_prefix_cache=skips)
        assert may_load(request) is not skips
    for sampling in asked:
        assert not may_load(Values(sampling_params=sampling, skip_reading_prefix_cache=skips))


def test_mla_is_refused_where_vllm_ignores_what_was_loaded():
    model = model_of("DeepseekV3ForCausalLM", use_mla=True)
    check_model(config_of(model))
    check_model(config_of(model, device="cuda", chunked=False))
    check_model(config_of(model_of("LlamaForCausalLM"), chunked=False))

    with pytest.raises(ConfigError) as raised:
        check_model(config_of(model, chunked=False))

    assert "DeepseekV3ForCausalLM uses MLA" in str(raised.value)
    assert str(raised.value).endswith(REMEDY)


@pytest.mark.parametrize(
    ("model", "method", "named"),
    [
        (model_of("JambaForCausalLM", is_hybrid=True), None, "JambaForCausalLM has layers with a"),
        (model_of("Mamba2", is_attention_free=True), None, "Mamba2 has layers with a state"),
        (model_of("Whisper", is_encoder_decoder=True), None, "Whisper has an encoder"),
        (model_of("Llama4ForConditionalGeneration"), None, "and its KV depend on --max-model-len"),
        *((model_of("L"), method, f"method {method}: its draft layers have KV of their own")
          for method in ("dflash", "dspark", "draft_model", "extract_hidden_states",
                         "custom_class", "a_method_of_tomorrow")),
    ],
)  # fmt: skip
def test_a_model_or_a_way_of_speculation_that_is_not_supported_is_named(model, method, named):
    with pytest.raises(ConfigError) as raised:
        check_model(config_of(model, method))
    assert named in str(raised.value)
    assert str(raised.value).endswith(REMEDY)


def test_the_states_of_a_known_model_are_taken_on_one_rank_with_a_prefix_cache_and_no_drafts():
    check_model(config_of(STATES))
    for config, named in (
        (config_of(STATES, caching=False), "enable_prefix_caching: without it vLLM keeps no state"),
        (config_of(STATES, ranks=2), "tensor_parallel_size: 2 with Qwen3NextForCausalLM"),
        (config_of(STATES, "ngram"), "speculative_config: not with Qwen3NextForCausalLM"),
    ):
        with pytest.raises(ConfigError) as raised:
            check_model(config)
        assert named in str(raised.value)
        assert str(raised.value).endswith(REMEDY)


def test_groups_of_whole_and_windowed_attention_and_latents_are_taken():
    groups = [FULL, group_of("SlidingWindowSpec"), group_of("MLAAttentionSpec"), states_of()]
    check_groups(groups, (0, 1, 2, 3))
    check_groups([group_of("FullAttentionSpec", kv_quant_mode=Values(name="FP8_PER_TENSOR"))], [0])


@pytest.mark.parametrize(
    ("group", "named"),
    [
        (states_of("MAMBA2"), "group 1 (model.layers.0.mixer) is MambaSpec: a state of the kind"),
        (states_of(mode="all"), "has states in the mode all, not align"),
        (states_of(drafts=1), "has states of drafts or checkpoints among its blocks"),
        (group_of("ChunkedLocalAttentionSpec"), "is ChunkedLocalAttentionSpec: not supported"),
        (group_of("CrossAttentionSpec"), "is CrossAttentionSpec: not supported"),
        (group_of("UniformTypeKVCacheSpecs"), "is UniformTypeKVCacheSpecs: not supported"),
        (group_of("SlidingWindowMLASpec"), "is SlidingWindowMLASpec: not supported"),
        (group_of("ASpecOfTomorrow", ()), "group 1 (no layer) is ASpecOfTomorrow"),
        (group_of("FullAttentionSpec", eagle=True), "has draft layers"),
        (group_of("MLAAttentionSpec", non_causal_multi_token_decode=True), "has draft layers"),
        (group_of("FullAttentionSpec", non_causal=True), "is not causal"),
        (group_of("FullAttentionSpec", kv_quant_mode=Values(name="NVFP4")), "quantised as NVFP4"),
        (group_of("SlidingWindowSpec", extra_retained_tokens=2), "keeps tokens before its window"),
        (group_of("FullAttentionSpec", attention_chunk_size=8192), "has chunked local attention"),
    ],
)  # fmt: skip
def test_a_group_that_is_not_supported_is_named_with_its_first_layer(group, named):
    with pytest.raises(ConfigError) as raised:
        check_groups([FULL, group], (0, 1))
    assert named in str(raised.value)
    assert str(raised.value).endswith(REMEDY)


def test_states_alone_are_refused_because_nothing_tells_the_type_of_the_kv():
    with pytest.raises(ConfigError, match="no group has KV"):
        check_groups([states_of()], (0,))


def test_a_group_that_vllm_does_not_let_connectors_move_is_refused_and_not_left_out():
    with pytest.raises(ConfigError, match=r"group 1 .*HiSparse"):
        check_groups([FULL, FULL], (0,))


def heads_on(ranks, model_heads, rank_heads, architecture, kind="FullAttentionSpec"):
    model = model_of(architecture, get_total_num_kv_heads=lambda: model_heads)
    return heads_of(config_of(model, ranks=ranks), type(kind, (), {"num_kv_heads": rank_heads})())


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MiMoV2FlashForCausalLM"])
def test_the_heads_of_a_group_are_known_where_every_rank_has_heads_of_its_own(name):
    assert heads_on(1, 4, 8, name) == 8  # one rank has all heads of the layer, whatever the model
    assert heads_on(4, 8, 2, name) == 8
    assert heads_on(4, 4, 1, name) == 4
    assert heads_on(4, 4, 2, name) == 0  # a layer with twice as many
    assert heads_on(3, 8, 2, name) == 0
    assert heads_on(8, 1, 1, name, "MLAAttentionSpec") == 1


def test_ranks_of_one_head_are_taken_for_copies_only_of_models_whose_layers_are_equal():
    """MiMo-V2 has 4 KV heads in a layer with full attention, 8 in one with a window.

    On 8 ranks a rank has one head of either. In the windows no two ranks hold the same one: if they
    took turns as copies, each would read the other's head as its own.
    """
    assert heads_on(8, 4, 1, "LlamaForCausalLM") == 4
    assert heads_on(8, 4, 1, "MiMoV2FlashForCausalLM") == 0
    assert heads_on(8, 4, 1, "DeciLMForCausalLM") == 0


@pytest.mark.parametrize("wrong", ["text", ["a", 1], 5, 0.5, None])
def test_parameters_that_are_no_mapping_are_removed_before_vllm_reads_them(wrong):
    request, right = Values(kv_transfer_params=wrong), {"do_remote_decode": True}
    drop_wrong_parameters(request)
    assert request.kv_transfer_params is None

    request.kv_transfer_params = right
    drop_wrong_parameters(request)
    assert request.kv_transfer_params is right


def test_blocks_that_a_backend_packs_otherwise_have_other_names():
    def spec(**packing):
        return group_of("FullAttentionSpec", head_size=64, head_size_v=64, **packing).kv_cache_spec

    dense = spec(num_head_slots=None, state_content_bytes=None)
    planes = spec(num_head_slots=2, state_content_bytes=1024)
    found = [packing_settings(specs) for specs in ([dense, planes], [planes, dense], [planes] * 2)]

    assert packing_settings([dense] * 2) == packing_settings([spec()]) == {}, "named as ever"
    assert len({settings["packing"] for settings in found}) == 3


def test_backends_are_named_for_each_kind_of_layer():
    def named(backend, **kinds):
        one = {kind: Values(name=name) for kind, name in kinds.items()}
        return backends_of(Values(attention_config=Values(backend=backend, backend_per_kind=one)))

    assert named(None) == backends_of(Values(attention_config=Values())) == "auto"
    assert named(Values(name="B12X")) == "B12X"
    assert named(None, full_attention="B12X") == "auto+full_attention=B12X"
    assert named(None, b="X", a="Y") == named(None, a="Y", b="X")
