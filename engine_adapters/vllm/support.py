"""Which models, speculation methods and KV groups of vLLM the connector supports.

What is not named here is refused: KV that another request must not read would be shared silently.
:func:`check_model` needs vLLM's configuration only, and runs before weights are loaded;
:func:`check_groups` needs vLLM's KV groups, which it makes afterwards.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from engine_adapters.vllm.drafts import has_draft_layers, wrong_draft
from kvstore.engine.identity import Group
from kvstore.protocol.errors import ConfigError

REMEDY: Final = "start vLLM without KVStoreConnector"
_COMMIT: Final = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
TESTED_VERSIONS: Final = ("0.32.0",)

_GROUPS: Final = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec")
_QUANTISED: Final = ("NONE", "FP8_PER_TENSOR")
"""Those whose scales, if any, are in the model."""
_DRAFTS: Final = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""Ways of speculation whose drafts have no KV of their own."""
_STATES: Final = ("MambaSpec",)
_STATE_KINDS: Final = ("GDN_ATTN",)
"""Those that ran: vLLM's others do not run with its prefix cache on CPUs."""
_STATE_MODELS: Final = ("Qwen3NextForCausalLM",)
_EQUAL_LAYERS: Final = (
    "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Glm4ForCausalLM", "Glm4MoeForCausalLM",
    "GraniteForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM",
    "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)  # fmt: skip
"""Models all of whose layers have as many KV heads as vLLM says of the model, in its source."""


def commit_of(revision: str | None) -> str:
    """The commit that a revision at a hub is; empty for a branch or tag, which can move."""
    return revision if revision and _COMMIT.fullmatch(revision) else ""


def check_revision(revision: str, model: str) -> str:
    """The revision of a model's weights.

    Raises:
        ConfigError: nothing identifies them: after another download their KV would be found, too.
    """
    if not revision:
        raise ConfigError(
            f"kvstore cannot identify the weights of {model}: set `revision` in"
            " kv_connector_extra_config, and change it with them"
        )
    return revision


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
    _check_flags(config)
    if model.is_hybrid or model.is_attention_free:
        _check_states(config)
    if _architecture(model).startswith("Llama4"):
        raise ConfigError(
            f"model: {_architecture(model)} has chunked local attention, and its KV depend on"
            f" --max-model-len: not supported; {REMEDY}"
        )
    if model.is_encoder_decoder:
        raise ConfigError(
            f"model: {_architecture(model)} has an encoder, whose KV are not those of the prompt's"
            f" tokens: not supported; {REMEDY}"
        )
    if model.runner_type == "pooling" and not model.is_prefix_caching_supported:
        raise ConfigError(
            f"model: {_architecture(model)} pools over all tokens of a prompt, which vLLM must"
            f" compute in one step: not supported; {REMEDY}"
        )
    if _computes_whole_prompts_only(config):
        raise ConfigError(
            f"model: {_architecture(model)} uses MLA, and vLLM's backend of it for CPUs without AMX"
            f" computes prompts from their first token only: after a load its answers would be"
            f" wrong: not supported; {REMEDY}"
        )
    wrong = ""
    if has_draft_layers(config):
        wrong = wrong_draft(config)
    elif speculative is not None and speculative.method not in _DRAFTS:
        wrong = "its draft layers have KV of their own: not supported"
    if wrong:
        raise ConfigError(
            f"speculative_config: method {speculative.method}: {wrong}; use one of"
            f" {', '.join(_DRAFTS)}, or {REMEDY}"
        )


def takes_whole(groups: Sequence[Group], version: str) -> bool:
    """Whether vLLM computes the last token of a prompt again, if all of its tokens were loaded.

    Not with windows or states, which vLLM forgets as if the next token came. In a version that was
    not tested, its scheduler might end in an assertion.

    Args:
        groups: the engine's KV groups.
        version: of vLLM.
    """
    return version in TESTED_VERSIONS and not any(one.state or one.window_tokens for one in groups)


def may_load(request: Any) -> bool:
    """Whether the first tokens of a request need not be computed.

    Else vLLM sets ``skip_reading_prefix_cache``, unless the user says otherwise: then it returns
    prompt logprobs of tokens that were not computed, and fails where it reads them.
    """
    sampling = request.sampling_params
    wanted = ("prompt_logprobs", "prompt_logprob_token_ids")
    every = sampling is not None and any(getattr(sampling, one, None) is not None for one in wanted)
    return not (request.skip_reading_prefix_cache or every)


def drop_wrong_parameters(request: Any) -> None:
    """Remove ``kv_transfer_params`` of a request that are no mapping.

    A client can send any value in ``vllm_xargs``. Without a connector vLLM ignores it; with one its
    scheduler ends in an AttributeError, and the engine with it.
    """
    if not isinstance(request.kv_transfer_params, dict):
        request.kv_transfer_params = None


def own_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Those ``kv_transfer_params`` of an answer that no other connector has.

    vLLM's ``MultiConnector`` raises an exception, which ends the engine, if two of its connectors
    answer with one key.
    """
    return {key: value for key, value in parameters.items() if key.startswith("kvstore_")}


def is_state(spec: Any) -> bool:
    """Whether a group with this ``KVCacheSpec`` has states instead of KV for each token."""
    return type(spec).__name__ in _STATES


def heads_of(config: Any, spec: Any) -> int:
    """KV heads of a group on all ranks together; 0 = that cannot be known.

    vLLM divides the heads among the ranks, or gives each of several ranks the same one; layers of
    some models have other numbers of heads than the model says. With more ranks than heads a rank
    has one head of either number, so nothing shows which ranks hold the same one: there only models
    are believed that are known.

    Args:
        config: ``VllmConfig``.
        spec: the group's ``KVCacheSpec``.
    """
    ranks = config.parallel_config.tensor_parallel_size
    if type(spec).__name__ == "MLAAttentionSpec":
        return 1 if spec.num_kv_heads == 1 else 0
    if ranks == 1:
        return int(spec.num_kv_heads)
    model = config.model_config
    heads = int(model.get_total_num_kv_heads())
    if heads < 1 or (heads % ranks and ranks % heads):
        return 0
    if spec.num_kv_heads != max(1, heads // ranks):
        return 0
    return heads if ranks <= heads or _architecture(model) in _EQUAL_LAYERS else 0


def packing_settings(specs: Iterable[Any]) -> dict[str, str]:
    """The setting of blocks that vLLM's backend packs in a way of its own; none for others.

    Such blocks have as many bytes as others, and may have the same name of a layout, but K and V
    lie elsewhere in them.

    Args:
        specs: the ``KVCacheSpec`` of each group with KV.
    """
    found = [
        f"{slots} slots of {content} bytes for heads of {spec.head_size} and {spec.head_size_v}"
        if (slots, content) != (None, None)
        else ""
        for spec in specs
        for slots in [getattr(spec, "num_head_slots", None)]
        for content in [getattr(spec, "state_content_bytes", None)]
    ]
    return {"packing": "; ".join(found)} if any(found) else {}


def backends_of(config: Any) -> str:
    """The attention backends that the user has chosen, for all KV groups and for single kinds.

    Args:
        config: ``VllmConfig``.
    """
    chosen = config.attention_config
    every = getattr(getattr(chosen, "backend", None), "name", "auto")
    kinds = getattr(chosen, "backend_per_kind", None) or {}
    return "+".join([every, *sorted(f"{kind}={one.name}" for kind, one in kinds.items())])


def _check_flags(config: Any) -> None:
    """Refuse flags whose KV blocks a page cannot hold."""
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(config.parallel_config, name, 1) != 1:
            count = getattr(config.parallel_config, name)
            raise ConfigError(f"{name}: {count} is not supported; leave it out, or {REMEDY}")
    if getattr(config.parallel_config, "enable_fault_tolerance", False):
        raise ConfigError(
            "enable_fault_tolerance: vLLM goes on after a step that failed, whose KV must not be"
            f" stored: not supported; leave it out, or {REMEDY}"
        )
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales: scales that are not in the model are not supported; leave it out,"
            f" or {REMEDY}"
        )


def _computes_whole_prompts_only(config: Any) -> bool:
    """Whether vLLM's backend ignores KV that was there before a prompt's first step.

    vLLM 0.32's reference backend of MLA for CPUs does: vLLM switches its own prefix cache and
    chunked prefill off for it, but asks connectors all the same.
    """
    on_cpu = config.device_config.device_type == "cpu"
    return bool(config.model_config.use_mla and on_cpu) and not (
        config.scheduler_config.enable_chunked_prefill
    )


def _check_states(config: Any) -> None:
    """Refuse models with states, except those that are known to be right, where they are."""
    name = _architecture(config.model_config)
    if name not in _STATE_MODELS:
        raise ConfigError(
            f"model: {name} has layers with a state (Mamba, linear attention or short convolution)"
            f" instead of KV for each token: only {', '.join(_STATE_MODELS)} is supported; {REMEDY}"
        )
    if not config.cache_config.enable_prefix_caching:
        raise ConfigError(
            f"enable_prefix_caching: without it vLLM keeps no state of {name} at the end of a"
            f" block; add --enable-prefix-caching, or {REMEDY}"
        )
    ranks = config.parallel_config.tensor_parallel_size
    if ranks > 1:
        raise ConfigError(
            f"tensor_parallel_size: {ranks} with {name}: states of several ranks are not"
            f" supported; {REMEDY}"
        )
    if config.speculative_config is not None:
        raise ConfigError(
            f"speculative_config: not with {name}, whose states would have those of drafts among"
            f" them; leave it out, or {REMEDY}"
        )


def check_groups(
    groups: Sequence[Any], transferred: Sequence[int], *, drafts: bool = False
) -> None:
    """Refuse KV groups that cannot be stored block by block.

    Args:
        groups: ``KVCacheConfig.kv_cache_groups``.
        transferred: indices of the groups that vLLM lets a connector transfer.
        drafts: the model has a draft layer that :func:`check_model` has taken.

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
            wrong = _wrong_state(spec)
            if not wrong:
                continue
        elif kind not in _GROUPS:
            wrong = f"is {kind}"
        elif getattr(spec, "non_causal_multi_token_decode", False) or (
            group.is_eagle_group and not drafts
        ):
            wrong = "has draft layers (EAGLE or multi-token prediction)"
        elif getattr(spec, "non_causal", False):
            wrong = "is not causal: its KV depend on later tokens"
        elif quantised not in _QUANTISED:
            wrong = f"is quantised as {quantised}"
        elif getattr(spec, "attention_chunk_size", None):
            wrong = "has chunked local attention"
        elif getattr(spec, "extra_retained_tokens", 0):
            wrong = "keeps tokens before its window for draft layers"
        else:
            continue
        name = group.layer_names[0] if group.layer_names else "no layer"
        raise ConfigError(f"KV cache: group {index} ({name}) {wrong}: not supported; {REMEDY}")
    if all(is_state(group.kv_cache_spec) for group in groups):
        raise ConfigError(f"KV cache: no group has KV: not supported; {REMEDY}")


def _wrong_state(spec: Any) -> str:
    """What is wrong with a group of states; empty = nothing."""
    if spec.mamba_type.name not in _STATE_KINDS:
        return f"is MambaSpec: a state of the kind {spec.mamba_type.name}"
    if spec.mamba_cache_mode != "align":
        return f"has states in the mode {spec.mamba_cache_mode}, not align"
    if spec.num_speculative_blocks or spec.num_prefill_checkpoint_blocks:
        return "has states of drafts or checkpoints among its blocks"
    return ""


def _architecture(model: Any) -> str:
    return str(getattr(model, "architecture", "") or model.model)
