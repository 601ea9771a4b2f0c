"""Goal: draft layers with KV are supported where they ran, and else refused by what is wrong."""

from types import SimpleNamespace as Values
from typing import Any

import pytest

from engine_adapters.vllm.drafts import (
    DraftSteps,
    check_draft_group,
    check_draft_version,
    draft_settings,
    has_draft_layers,
)
from engine_adapters.vllm.support import REMEDY, check_groups, check_model
from kvstore.protocol.errors import ConfigError
from tests.engine_adapters.vllm.test_support import config_of, group_of, model_of

LAYERS = [f"model.layers.{number}.attn" for number in range(5)]


def drafting(
    method: str = "eagle", architecture: str = "EagleLlamaForCausalLM", layers: int = 1,
    **changes: Any,
) -> Values:  # fmt: skip
    """An engine's configuration; changes are those of ``--speculative-config``."""
    hf: dict[str, Any] = {
        "architectures": [architecture], "num_hidden_layers": layers, "size": 5,
    }  # fmt: skip
    model = model_of("LlamaForCausalLM", get_total_num_hidden_layers=lambda: 4, max_model_len=100)
    config = config_of(model, method)
    config.parallel_config.pipeline_parallel_size = 1
    config.parallel_config.data_parallel_size = 1
    config.kv_transfer_config = Values(kv_connector_extra_config={})
    config.speculative_config = Values(**{
        "method": method, "parallel_drafting": False, "num_speculative_tokens": 3,
        "quantization": None,
        "draft_model_config": Values(
            hf_config=Values(**hf, to_dict=lambda: dict(hf)), max_model_len=80, dtype="bfloat16",
            quantization=None,
        ), **changes,
    })  # fmt: skip
    return config


def predicting(architecture: str, layers: int | None, of_the_model: int = 0) -> Values:
    """With a layer for multi-token prediction."""
    config = drafting("mtp", architecture, of_the_model)
    config.speculative_config.draft_model_config.hf_config.n_predict = layers
    return config


@pytest.mark.parametrize(
    "config",
    [
        drafting("eagle"), drafting("eagle3", "Eagle3LlamaForCausalLM"),
        # vLLM says of some that they have no layer, of others that they have the model's.
        predicting("MiMoMTPModel", 1, 0), predicting("Glm4MoeMTPModel", 1, 4),
        predicting("ErnieMTPModel", 1, 4),
    ],
)  # fmt: skip
def test_drafts_that_ran_are_taken(config):
    check_model(config)
    assert has_draft_layers(config)
    groups = [group_of("FullAttentionSpec", LAYERS, eagle=True)]
    check_groups(groups, (0,), drafts=True)
    check_draft_group(config, groups)


def changed(change: str) -> Values:
    config = drafting()
    if change == "gpu":
        config.device_config.device_type = "cuda"
    elif change == "runner":
        config.use_v2_model_runner = True
    elif change == "ranks":
        config.parallel_config.tensor_parallel_size = 2
    elif change == "servers":
        config.parallel_config.data_parallel_size = 2
    elif change == "layerwise":
        config.kv_transfer_config.kv_connector_extra_config = {"load": "layerwise"}
    else:
        config.parallel_config.pipeline_parallel_size = 2
    return config


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (predicting("DeepSeekMTPModel", 1), "method mtp: its draft DeepSeekMTPModel has not run"),
        (predicting("MiMoMTPModel", 2, 1), "method mtp: its draft has 2 layers: only one is"),
        (predicting("ErnieMTPModel", None, 1), "method mtp: its draft has 0 layers: only one is"),
        (drafting("eagle", "EagleOfTomorrow"), "method eagle: its draft EagleOfTomorrow has not"),
        (drafting(layers=2), "its draft has 2 layers: only one is supported"),
        *((drafting(**{option: True}), f"{option} is not supported with draft layers")
          for option in ("parallel_drafting", "disable_padded_drafter_batch",
                         "num_speculative_tokens_per_batch_size", "use_heterogeneous_vocab",
                         "kv_cache_dtype", "attention_backend", "draft_load_config")),
        (changed("gpu"), "its draft layers are supported on CPUs only"),
        (changed("runner"), "its draft layers are supported on CPUs only"),
        (changed("ranks"), "its draft layers are supported on one rank only"),
        (changed("stages"), "its draft layers are supported on one rank only"),
        (changed("servers"), "its draft layers are supported on one rank only"),
        (changed("layerwise"), "its draft layers are supported with load: async only"),
    ],
)  # fmt: skip
def test_what_has_not_run_is_refused_by_what_is_wrong(config, named):
    with pytest.raises(ConfigError) as raised:
        check_model(config)
    assert named in str(raised.value)
    assert str(raised.value).endswith(REMEDY)


@pytest.mark.parametrize(
    ("groups", "named"),
    [
        ([group_of("FullAttentionSpec", LAYERS[:4]), group_of("FullAttentionSpec", LAYERS[4:])],
         "2 groups with method eagle"),
        ([group_of("SlidingWindowSpec", LAYERS)], "SlidingWindowSpec with method eagle"),
        ([group_of("MLAAttentionSpec", LAYERS)], "MLAAttentionSpec with method eagle"),
        ([group_of("FullAttentionSpec", LAYERS[:4])], "4 layers with method eagle, not the"),
    ],
)  # fmt: skip
def test_a_draft_layer_that_does_not_share_the_blocks_of_all_others_is_refused(groups, named):
    with pytest.raises(ConfigError, match=named):
        check_draft_group(drafting(), groups)


def test_a_version_of_vllm_whose_drafts_were_not_read_is_refused():
    check_draft_version("0.32.0", ["0.32.0"])
    with pytest.raises(ConfigError, match=r"with vLLM 0\.32\.0 only, not 0\.33\.0"):
        check_draft_version("0.33.0", ["0.32.0"])


def test_a_worker_that_has_loaded_the_draft_names_its_pages_as_the_scheduler_does():
    """vLLM's heads change their configuration, in the process of the worker only."""
    before = draft_settings(drafting(), "weights")
    loaded = drafting()
    hf = loaded.speculative_config.draft_model_config.hf_config.to_dict()
    more = {"draft_vocab_size": 5, "target_layer_count": 4}
    loaded.speculative_config.draft_model_config.hf_config.to_dict = lambda: hf | more
    assert draft_settings(loaded, "weights") == before


def test_a_draft_whose_rotation_depends_on_the_longest_request_names_its_length():
    def settings(tokens: int) -> dict[str, str]:
        config = drafting()
        config.model_config.max_model_len = tokens
        rope = {"rope_scaling": {"type": "longrope"}}
        config.speculative_config.draft_model_config.hf_config.to_dict = lambda: rope
        return draft_settings(config, "weights")

    assert settings(100) != settings(200)


def test_another_draft_has_other_pages_and_no_engine_without_one_has_the_same():
    one = draft_settings(drafting(), "weights")
    other = drafting()
    other.speculative_config.draft_model_config.hf_config.to_dict = lambda: {"size": 6}
    found = [one, draft_settings(drafting(), "others"), draft_settings(other, "weights")]
    assert len({tuple(sorted(each.items())) for each in found}) == 3
    assert all("shifted" in each["drafts"] for each in found)


def test_the_draft_is_left_out_of_steps_near_the_shorter_of_the_two_lengths():
    steps = DraftSteps(drafting())
    assert [steps.drafted(ends) for ends in ([], [10, 77], [10, 78])] == [True, True, False]
    config = drafting()
    config.speculative_config.draft_model_config.max_model_len = None
    assert [DraftSteps(config).drafted([end]) for end in (97, 98)] == [True, False]
    assert DraftSteps(config_of(model_of("L", max_model_len=100), "ngram")).drafted([100])
