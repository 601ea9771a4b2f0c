"""Draft layers with KV of their own: EAGLE heads, and layers for multi-token prediction.

Which of them are supported, how their KV are identified, and in which steps they are computed. Of
vLLM 0.32's runner of models for CPUs, all of whose drafts were read: that for GPUs has others.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Final

from engine_adapters.vllm.names import ENGINE, length_settings
from engine_adapters.vllm.options import read_options
from kvstore.engine.options import LoadOrder
from kvstore.protocol.errors import ConfigError

_MTP: Final = "mtp"
LAYERED_METHODS: Final = ("eagle", "eagle3", _MTP)
_HEADS: Final = (
    "EagleLlamaForCausalLM", "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3",
    "MiMoMTPModel", "Glm4MoeMTPModel", "ErnieMTPModel",
)  # fmt: skip
"""Those that ran, and whose KV were compared."""
_OPTIONS: Final = (
    "parallel_drafting", "disable_padded_drafter_batch", "num_speculative_tokens_per_batch_size",
    "use_heterogeneous_vocab", "kv_cache_dtype", "attention_backend", "draft_load_config",
)  # fmt: skip
"""Those that change when or how the draft is computed, and have not run."""
_SET_BY_VLLM: Final = ("transformers_version", "draft_vocab_size", "target_layer_count")
"""Of a draft's configuration: vLLM's heads set the last two when a worker loads them, so the
scheduler, in another process, would never name the pages of the worker. No KV depend on them."""


def has_draft_layers(config: Any) -> bool:
    """Whether a ``VllmConfig`` has a draft whose layers have KV of their own."""
    speculative = config.speculative_config
    return speculative is not None and speculative.method in LAYERED_METHODS


def wrong_draft(config: Any) -> str:
    """What is wrong with such a draft; empty = nothing.

    With several layers the KV of all but the first depend on all KV of the draft before, and some
    of those are wrong in vLLM.
    """
    draft = config.speculative_config.draft_model_config.hf_config
    name = (getattr(draft, "architectures", None) or ["unknown"])[0]
    if config.device_config.device_type != "cpu" or getattr(config, "use_v2_model_runner", False):
        return "its draft layers are supported on CPUs only"
    if name not in _HEADS:
        return f"its draft {name} has not run with kvstore: only {', '.join(_HEADS)} is supported"
    # vLLM sets the draft's num_hidden_layers to 0, or leaves it that of the model.
    is_mtp = config.speculative_config.method == _MTP
    if (layers := int((draft.n_predict if is_mtp else draft.num_hidden_layers) or 0)) != 1:
        return f"its draft has {layers} layers: only one is supported"
    ranks = config.parallel_config
    sizes = [getattr(ranks, f"{kind}_parallel_size") for kind in ("tensor", "pipeline", "data")]
    if sizes != [1, 1, 1]:
        return "its draft layers are supported on one rank only"
    return _wrong_option(config)


def _wrong_option(config: Any) -> str:
    for option in _OPTIONS:
        if getattr(config.speculative_config, option, None):
            return f"{option} is not supported with draft layers"
    extra = config.kv_transfer_config.kv_connector_extra_config
    if read_options(extra).load is not LoadOrder.ASYNC:
        return "its draft layers are supported with load: async only"
    return ""


def check_draft_version(version: str, tested: Sequence[str]) -> None:
    """Refuse a version of vLLM whose drafts were not read.

    Raises:
        ConfigError: names the versions.
    """
    if version not in tested:
        raise ConfigError(
            f"speculative_config: draft layers are supported with vLLM {', '.join(tested)} only,"
            f" not {version}"
        )


def check_draft_group(config: Any, groups: Sequence[Any]) -> None:
    """Refuse a draft whose layer does not share the blocks of all others.

    Raises:
        ConfigError: says how many groups or layers there are.
    """
    if len(groups) != 1:
        raise ConfigError(
            f"KV cache: {len(groups)} groups with method {config.speculative_config.method}: a"
            " draft layer is supported in one group with all others only"
        )
    target = config.model_config.get_total_num_hidden_layers()
    found = len(groups[0].layer_names)
    if type(groups[0].kv_cache_spec).__name__ != "FullAttentionSpec":
        raise ConfigError(
            f"KV cache: {type(groups[0].kv_cache_spec).__name__} with method"
            f" {config.speculative_config.method}: not supported"
        )
    if found != target + 1:
        raise ConfigError(
            f"KV cache: {found} layers with method {config.speculative_config.method}, not the"
            f" model's {target} and one of the draft: not supported"
        )


def draft_settings(config: Any, revision: str) -> dict[str, str]:
    """What identifies the KV of a draft layer; others must not share it.

    Args:
        config: ``VllmConfig`` with such a draft.
        revision: of its weights.
    """
    speculative = config.speculative_config
    draft = speculative.draft_model_config
    hf = {key: one for key, one in draft.hf_config.to_dict().items() if key not in _SET_BY_VLLM}
    lengths = length_settings(hf, config.model_config.max_model_len)
    encoded = json.dumps(hf, default=str, sort_keys=True).encode()
    return {
        "drafts": f"{ENGINE} keys shifted by one token",
        "draft_weights": revision,
        "draft_config": hashlib.sha256(encoded).hexdigest(),
        "draft_dtype": f"{draft.dtype} {draft.quantization} {speculative.quantization}",
        **{f"draft_{name}": f"{length} {draft.max_model_len}" for name, length in lengths.items()},
    }


class DraftSteps:
    """In which steps vLLM computes the KV of the draft layer.

    Attributes:
        limit_tokens: a step with a longer request, drafts included, leaves the draft out for all
            its requests (``GPUModelRunner._input_fits_in_drafter``).
    """

    def __init__(self, config: Any) -> None:
        speculative, model = config.speculative_config, config.model_config
        self._on = has_draft_layers(config)
        self._drafts: int = speculative.num_speculative_tokens if self._on else 0
        self.limit_tokens: int = model.max_model_len
        if self._on and speculative.draft_model_config.max_model_len is not None:
            self.limit_tokens = min(self.limit_tokens, speculative.draft_model_config.max_model_len)

    def drafted(self, ends: Sequence[int]) -> bool:
        """Whether the draft layer runs in a step.

        Args:
            ends: of each of its requests, the end of the positions that it computes.
        """
        return max(ends, default=0) + self._drafts <= self.limit_tokens
