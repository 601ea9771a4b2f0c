"""Draft layers with KV of their own: EAGLE heads and layers for multi-token prediction.

Which of them are supported, how their KV are identified, and in which steps they are computed. Of
vLLM 0.32's runner of models for CPUs, all of whose drafts were read: that for GPUs has others.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Final

from engine_adapters.vllm.names import ENGINE
from kvstore.protocol.errors import ConfigError

LAYERED_METHODS: Final = ("eagle", "eagle3", "mtp")
_HEADS: Final = ("EagleLlamaForCausalLM", "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3")
"""Those that ran, and whose KV were compared."""


_OPTIONS: Final = (
    "parallel_drafting", "disable_padded_drafter_batch", "num_speculative_tokens_per_batch_size",
)  # fmt: skip
"""Those that change when or how the draft is computed, and have not run."""


def has_draft_layers(config: Any) -> bool:
    """Whether a ``VllmConfig`` has a draft whose layers have KV of their own."""
    speculative = config.speculative_config
    return speculative is not None and speculative.method in LAYERED_METHODS


def wrong_draft(config: Any) -> str:
    """What is wrong with such a draft; empty = nothing.

    With several layers the KV of all but the first depend on all KV of the draft before, and some
    of those are wrong in vLLM.
    """
    speculative = config.speculative_config
    draft = speculative.draft_model_config.hf_config
    name = (getattr(draft, "architectures", None) or ["unknown"])[0]
    ranks = config.parallel_config
    if config.device_config.device_type != "cpu" or getattr(config, "use_v2_model_runner", False):
        return "its draft layers are supported on CPUs only"
    if name not in _HEADS:
        return f"its draft {name} has not run with kvstore: only {', '.join(_HEADS)} is supported"
    if (layers := draft_layers(speculative)) != 1:
        return f"its draft has {layers} layers: only one is supported"
    for option in _OPTIONS:
        if getattr(speculative, option, None):
            return f"{option} is not supported with draft layers"
    if (ranks.tensor_parallel_size, ranks.pipeline_parallel_size) != (1, 1):
        return "its draft layers are supported on one rank only"
    return ""


def draft_layers(speculative: Any) -> int:
    """Number of layers of a draft that have KV."""
    draft = speculative.draft_model_config.hf_config
    if speculative.method == "mtp":
        return int(getattr(draft, "num_nextn_predict_layers", 0) or 0)
    return int(draft.num_hidden_layers)


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
    if type(groups[0].kv_cache_spec).__name__ not in ("FullAttentionSpec", "MLAAttentionSpec"):
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
    hf = draft.hf_config.to_dict()
    hf.pop("transformers_version", None)
    encoded = json.dumps(hf, default=str, sort_keys=True).encode()
    return {
        "drafts": f"{ENGINE} keys shifted by one token",
        "draft_weights": revision,
        "draft_config": hashlib.sha256(encoded).hexdigest(),
        "draft_dtype": f"{draft.dtype} {draft.quantization} {speculative.quantization}",
    }


class DraftSteps:
    """In which steps vLLM computes the KV of the draft layer.

    Attributes:
        limit_tokens: a step with a longer request, drafts included, leaves the draft out for all
            its requests (``GPUModelRunner._input_fits_in_drafter``).
    """

    def __init__(self, config: Any) -> None:
        """Read the limits from a ``VllmConfig``."""
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
