"""Reads the facts about an engine's KV from vLLM's configuration."""

import hashlib
import logging
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import vllm
from huggingface_hub import try_to_load_from_cache
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from engine_adapters.vllm.drafts import (
    check_draft_group,
    check_draft_version,
    draft_settings,
    has_draft_layers,
)
from engine_adapters.vllm.names import (
    ENGINE,
    adapter_settings,
    config_digest,
    length_settings,
    media_settings,
    reads_model_files,
    weights_settings,
)
from engine_adapters.vllm.support import (
    TESTED_VERSIONS,
    backends_of,
    check_groups,
    check_model,
    check_revision,
    commit_of,
    heads_of,
    is_state,
    packing_settings,
)
from kvstore.engine.identity import EngineFacts, Group
from kvstore.engine.requests import files_fingerprint
from kvstore.protocol.errors import ConfigError

log = logging.getLogger("vllm.kvstore")


def check_version() -> None:
    """Warn of an untested version of vLLM; its connector interface changes often."""
    if vllm.__version__ not in TESTED_VERSIONS:
        log.warning(
            "vLLM %s has not been tested with kvstore (tested: %s); compare tokens with and"
            " without it before you rely on it",
            vllm.__version__, ", ".join(TESTED_VERSIONS),
        )  # fmt: skip


def read_facts(config: Any, kv: Any, revision: str) -> EngineFacts:
    """An engine's facts.

    Args:
        config: ``VllmConfig``.
        kv: ``KVCacheConfig``.
        revision: the user's revision of the weights; empty = derive it from the files.

    Raises:
        ConfigError: the connector does not support the engine's KV; the message says why.
    """
    parallel, model = config.parallel_config, config.model_config
    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        raise ConfigError(
            f"platform: {current_platform.device_name}: only cpu and cuda are supported"
        )
    check_model(config)
    drafts = has_draft_layers(config)
    check_groups(kv.kv_cache_groups, kv.transfer_group_ids, drafts=drafts)
    if drafts:
        check_draft_version(vllm.__version__, TESTED_VERSIONS)
        check_draft_group(config, kv.kv_cache_groups)
    specs = list(enumerate(kv.kv_cache_groups))
    stages = _stages(config, len(specs))
    groups = tuple(_group(config, index, group, stages) for index, group in specs)
    with_kv = [group.kv_cache_spec for _, group in specs if not is_state(group.kv_cache_spec)]
    dtypes = {str(spec.dtype).removeprefix("torch.") for spec in with_kv}
    if len(dtypes) != 1:
        raise ConfigError(f"KV cache: groups of different dtypes ({', '.join(sorted(dtypes))})")
    return EngineFacts(
        engine=ENGINE,
        model=model.model,
        revision=check_revision(
            revision or weights_revision(model, config.load_config), model.model
        ),
        kv_dtype=dtypes.pop(),
        settings=_settings(config, (name for _, group in specs for name in group.layer_names))
        | _alone(config, with_kv)
        | packing_settings(with_kv)
        | _state_settings(group.kv_cache_spec for _, group in specs)
        | (draft_settings(config, _draft_revision(config, revision)) if drafts else {}),
        version=".".join(vllm.__version__.split(".")[:2]),
        isa=_isa(config, with_kv[0]),
        ranks=parallel.tensor_parallel_size,
        groups=groups,
        # On a device a block is copied as a whole: with a shard for each head group it would be as
        # many copies.
        whole_ranks=not current_platform.is_cpu(),
        stages=stages,
    )


def _stages(config: Any, groups: int) -> tuple[tuple[int, int], ...]:
    """The layers of each pipeline stage; empty = there is one stage."""
    count = config.parallel_config.pipeline_parallel_size
    if count == 1:
        return ()
    if groups != 1:
        raise ConfigError(
            f"pipeline_parallel_size: {count} is not supported with {groups} KV groups"
        )
    layers = config.model_config.get_total_num_hidden_layers()
    return tuple(get_pp_indices(layers, stage, count) for stage in range(count))


def _alone(config: Any, specs: Iterable[Any]) -> dict[str, str]:
    """A setting that differs between numbers of ranks where it is unknown which heads they hold."""
    known = all(heads_of(config, spec) for spec in specs)
    if known and config.speculative_config is None:  # a draft model may be divided otherwise
        return {}
    return {"ranks": str(config.parallel_config.tensor_parallel_size)}


def _group(config: Any, index: int, group: Any, stages: Sequence[tuple[int, int]]) -> Group:
    spec = group.kv_cache_spec
    if is_state(spec):
        return Group(
            index=index,
            layers=len(group.layer_names),
            block_tokens=spec.block_size,
            block_bytes=spec.state_content_size_bytes,
            kv_heads=1,  # a state is one piece, of whatever heads
            state=True,
        )
    return Group(
        index=index,
        layers=stages[-1][1] if stages else len(group.layer_names),
        block_tokens=spec.block_size,
        block_bytes=spec.unpadded_page_size_bytes,
        kv_heads=heads_of(config, spec)
        or spec.num_kv_heads * config.parallel_config.tensor_parallel_size,
        window_tokens=spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0,
    )


def heads_apart(facts: EngineFacts, group: Group) -> int:
    """Heads that must lie one behind the other in a rank's blocks; 0 = it does not matter how."""
    return 0 if facts.whole_ranks or group.kv_heads == 1 else facts.split(group).rank_heads


def check_stage(facts: EngineFacts, stage: int, layers: Sequence[str]) -> None:
    """Refuse a pipeline stage that has other layers than its shards.

    Args:
        facts: of the engine.
        stage: of the pipeline.
        layers: names of its layers of the only KV group.

    Raises:
        ConfigError: says which layers it should have.
    """
    if not facts.stages:
        return
    first, stop = facts.stages[stage]
    numbers = [[int(part) for part in name.split(".") if part.isdigit()] for name in layers]
    found = sorted(number for each in numbers for number in each)
    if found != list(range(first, stop)):
        raise ConfigError(
            f"pipeline_parallel_size: stage {stage} has the KV of layers {found}, not of {first} to"
            f" {stop - 1}: not supported"
        )


def _settings(config: Any, layers: Iterable[str]) -> dict[str, str]:
    """Everything else that may change KV."""
    model = config.model_config
    speculative = config.speculative_config
    # A stage of a pipeline knows its own layers only; shards have their numbers.
    names = list(layers) if config.parallel_config.pipeline_parallel_size == 1 else ["pipeline"]
    settings = {
        "hf_config": config_digest(model),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": str(config.cache_config.cache_dtype),
        "load_format": str(config.load_config.load_format),
        "layers": hashlib.sha256(msgspec.msgpack.encode(names)).hexdigest(),
        "speculative": f"{speculative.method} {speculative.model}" if speculative else "",
        "pooling": str(model.runner_type),
    }
    if settings["load_format"].endswith("dummy"):
        settings["seed"] = str(model.seed)
    return (
        settings
        | length_settings(model.hf_config.to_dict(), model.max_model_len)
        | media_settings(model.multimodal_config)
        | adapter_settings(config.lora_config, model.dtype)
        | weights_settings(model, config.load_config)
    )


def _draft_revision(config: Any, given: str) -> str:
    """The revision of a draft's weights.

    Args:
        config: ``VllmConfig`` with a draft.
        given: the one that the user has set for the model; it is the draft's only if its weights
            are in the model's files.
    """
    draft, model = config.speculative_config.draft_model_config, config.model_config
    same = (draft.model, draft.revision) == (model.model, model.revision)
    revision = given if given and same else weights_revision(draft, config.load_config)
    if not revision:
        raise ConfigError(
            f"speculative_config: model: kvstore cannot identify the weights of {draft.model};"
            " use a folder, or set `revision` in it"
        )
    return revision


def _state_settings(specs: Iterable[Any]) -> dict[str, str]:
    """What a state's bytes mean, besides its size: others must not share it."""
    states = [
        f"{spec.shapes} {spec.dtypes} {spec.mamba_type.name} {spec.mamba_cache_mode}"
        for spec in specs
        if is_state(spec)
    ]
    if not states:
        return {}
    layout = "dim first" if is_conv_state_dim_first() else "dim last"
    kernels = str(sorted(torch.cpu.get_capabilities().items())) if current_platform.is_cpu() else ""
    return {"states": f"{'; '.join(states)}; {layout}; {kernels}"}


def _isa(config: Any, spec: Any) -> str:
    """For what blocks are laid out; others must not share them.

    On CPU that is the instruction set. On CUDA it is the order of a block's bytes in memory, and
    what may decide how vLLM's kernels use them.
    """
    if current_platform.is_cuda():
        capability = current_platform.get_device_capability()
        layout = config.cache_config.kv_cache_layout
        return f"cuda {capability}/{layout}/{backends_of(config)}"
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(
        config.model_config.dtype, spec.block_size, spec.head_size, config.cache_config.cache_dtype
    )
    return f"{platform.machine()}/{isa}"


def weights_revision(model: Any, load: Any) -> str:
    """The revision of a model's weights, which vLLM reads as ``load`` says.

    For a folder: a hash of its files' names, sizes and modification times, so that replaced weights
    get another revision; copies of a folder share pages only if the user sets the revision. For a
    model from the hub: its commit. Empty: they cannot be identified, as vLLM got them elsewhere.
    """
    if not reads_model_files(model, load):
        return ""
    folder = Path(model.model)
    if folder.is_dir():
        return files_fingerprint(folder)
    found = try_to_load_from_cache(model.model, "config.json", revision=model.revision or "main")
    return Path(found).parent.name if isinstance(found, str) else commit_of(model.revision)
