"""Goal: whatever the connector cannot store is refused by name, with what to do as the last words.

Models and KV groups have the names and attributes of vLLM's; ``tests/vllm`` starts real ones.
"""

from types import SimpleNamespace as Values

import pytest

from engine_adapters.vllm.support import REMEDY, check_groups, check_model
from kvstore.errors import ConfigError


def model_of(architecture, **changes):
    """A model's configuration; changes are its properties."""
    plain = {"is_hybrid": False, "is_attention_free": False, "is_encoder_decoder": False}
    return Values(architecture=architecture, model="/models/m", **{**plain, **changes})


def config_of(model, method=None):
    speculative = Values(method=method) if method else None
    return Values(model_config=model, speculative_config=speculative)


def group_of(kind, layers=("model.layers.0.attn",), eagle=False, **spec):
    """A KV group whose specification is of the class ``kind``."""
    return Values(
        kv_cache_spec=type(kind, (), spec)(), layer_names=list(layers), is_eagle_group=eagle
    )


FULL = group_of("FullAttentionSpec")


@pytest.mark.parametrize("method", [None, "ngram", "ngram_gpu", "suffix", "medusa"])
def test_models_with_kv_for_each_token_and_drafts_without_kv_are_taken(method):
    check_model(config_of(model_of("LlamaForCausalLM"), method))
    check_model(config_of(None))


@pytest.mark.parametrize(
    ("model", "method", "named"),
    [
        (model_of("JambaForCausalLM", is_hybrid=True), None, "JambaForCausalLM has layers with a"),
        (model_of("Mamba2", is_attention_free=True), None, "Mamba2 has layers with a state"),
        (model_of("Whisper", is_encoder_decoder=True), None, "Whisper has an encoder"),
        *((model_of("L"), method, f"method {method}: its draft layers have KV of their own")
          for method in ("eagle", "eagle3", "mtp", "dflash", "dspark", "draft_model",
                         "extract_hidden_states", "custom_class", "a_method_of_tomorrow")),
    ],
)  # fmt: skip
def test_a_model_or_a_way_of_speculation_that_is_not_supported_is_named(model, method, named):
    with pytest.raises(ConfigError) as raised:
        check_model(config_of(model, method))
    assert named in str(raised.value)
    assert str(raised.value).endswith(REMEDY)


def test_groups_of_whole_and_windowed_attention_and_latents_are_taken():
    groups = [FULL, group_of("SlidingWindowSpec"), group_of("MLAAttentionSpec")]
    check_groups(groups, (0, 1, 2))
    check_groups([group_of("FullAttentionSpec", kv_quant_mode=Values(name="FP8_PER_TENSOR"))], [0])


@pytest.mark.parametrize(
    ("group", "named"),
    [
        (group_of("MambaSpec", ["model.layers.0.mixer"]), "group 1 (model.layers.0.mixer) is Mamb"),
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
    ],
)  # fmt: skip
def test_a_group_that_is_not_supported_is_named_with_its_first_layer(group, named):
    with pytest.raises(ConfigError) as raised:
        check_groups([FULL, group], (0, 1))
    assert named in str(raised.value)
    assert str(raised.value).endswith(REMEDY)


def test_a_group_that_vllm_does_not_let_connectors_move_is_refused_and_not_left_out():
    with pytest.raises(ConfigError, match=r"group 1 .*HiSparse"):
        check_groups([FULL, FULL], (0,))
