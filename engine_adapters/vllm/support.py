"""Which models, ways of speculation and KV groups of vLLM the connector can store.

What is not named here is refused: KV that another request must not read would be shared silently.
:func:`check_model` needs vLLM's configuration only, and runs before weights are loaded;
:func:`check_groups` needs vLLM's KV groups, which it makes afterwards.
"""

from collections.abc import Sequence
from typing import Any, Final

from kvstore.errors import ConfigError

REMEDY: Final = "start vLLM without KVStoreConnector"

_GROUPS: Final = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec")
_QUANTISED: Final = ("NONE", "FP8_PER_TENSOR")
"""Those whose scales, if any, are in the model."""
_DRAFTS: Final = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""Ways of speculation whose drafts have no KV of their own."""
_STATES: Final = ("MambaSpec",)


def check_model(config: Any) -> None:
    """Refuse what vLLM's configuration shows already.

    Args:
        config: ``VllmConfig``; one without a model is not checked.

    Raises:
        ConfigError: the model or its speculation is not supported; the last words say what to do.
    """
    model, speculative = config.model_config, config.speculative_config
    if model is None:
        return
    if model.is_hybrid or model.is_attention_free:
        raise ConfigError(
            f"model: {_architecture(model)} has layers with a state (Mamba, linear attention or"
            f" short convolution) instead of KV for each token: not supported; {REMEDY}"
        )
    if model.is_encoder_decoder:
        raise ConfigError(
            f"model: {_architecture(model)} has an encoder, whose KV are not those of the prompt's"
            f" tokens: not supported; {REMEDY}"
        )
    if speculative is not None and speculative.method not in _DRAFTS:
        raise ConfigError(
            f"speculative_config: method {speculative.method}: its draft layers have KV of their"
            f" own, which differ with the next token: not supported; use one of"
            f" {', '.join(_DRAFTS)}, or {REMEDY}"
        )


def check_groups(groups: Sequence[Any], transferred: Sequence[int]) -> None:
    """Refuse KV groups that cannot be stored block by block.

    Args:
        groups: ``KVCacheConfig.kv_cache_groups``.
        transferred: indices of those that vLLM lets a connector transfer.

    Raises:
        ConfigError: names the group, its first layer and its kind; the last words say what to do.
    """
    for index, group in enumerate(groups):
        spec = group.kv_cache_spec
        kind = type(spec).__name__
        quantised = getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE")
        if index not in transferred:
            wrong = "is kept out of transfers by vLLM (HiSparse)"
        elif kind in _STATES:
            wrong = f"is {kind}: a state, not KV for each token"
        elif kind not in _GROUPS:
            wrong = f"is {kind}"
        elif group.is_eagle_group or getattr(spec, "non_causal_multi_token_decode", False):
            wrong = "has draft layers (EAGLE or multi-token prediction)"
        elif getattr(spec, "non_causal", False):
            wrong = "is not causal: its KV depend on later tokens"
        elif quantised not in _QUANTISED:
            wrong = f"is quantised as {quantised}"
        elif getattr(spec, "extra_retained_tokens", 0):
            wrong = "keeps tokens before its window for draft layers"
        else:
            continue
        name = group.layer_names[0] if group.layer_names else "no layer"
        raise ConfigError(f"KV cache: group {index} ({name}) {wrong}: not supported; {REMEDY}")


def _architecture(model: Any) -> str:
    return str(getattr(model, "architecture", "") or model.model)
