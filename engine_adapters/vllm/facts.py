"""What vLLM's configuration says about its KV: read once, into plain values."""

import hashlib
import json
import logging
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec
import vllm
from huggingface_hub import try_to_load_from_cache
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from engine_adapters.vllm.names import ENGINE, length_settings
from kvstore.engine.identity import EngineFacts, Group
from kvstore.engine.requests import files_fingerprint
from kvstore.errors import ConfigError

log = logging.getLogger("vllm.kvstore")

TESTED_VERSIONS: Final = ("0.32.0",)
_SUPPORTED: Final = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)


def check_version() -> None:
    """Warn of a vLLM that nobody has tested this with; its connector interface changes often."""
    if vllm.__version__ not in TESTED_VERSIONS:
        log.warning(
            "vLLM %s has not been tested with kvstore (tested: %s); look at the hits and compare"
            " tokens before you rely on it",
            vllm.__version__, ", ".join(TESTED_VERSIONS),
        )  # fmt: skip


def read_facts(config: Any, kv: Any, revision: str) -> EngineFacts:
    """An engine's facts.

    Args:
        config: ``VllmConfig``.
        kv: ``KVCacheConfig``.
        revision: the user's name for the weights; empty = look at the files.

    Raises:
        ConfigError: an engine whose KV this connector does not know how to share; says what.
    """
    parallel, model, cache = config.parallel_config, config.model_config, config.cache_config
    if not current_platform.is_cpu():
        raise ConfigError(f"platform: {current_platform.device_name}: only CPU is supported so far")
    for name in ("pipeline_parallel_size", "decode_context_parallel_size",
                 "prefill_context_parallel_size"):  # fmt: skip
        if getattr(parallel, name, 1) != 1:
            raise ConfigError(f"{name}: {getattr(parallel, name)} is not supported")
    if getattr(cache, "calculate_kv_scales", False):
        raise ConfigError("calculate_kv_scales: scales that are not in the model are not supported")
    specs = [(index, kv.kv_cache_groups[index]) for index in kv.transfer_group_ids]
    groups = tuple(_group(index, group) for index, group in specs)
    dtypes = {str(group.kv_cache_spec.dtype).removeprefix("torch.") for _, group in specs}
    if len(dtypes) != 1:
        raise ConfigError(f"KV cache: groups of different dtypes ({', '.join(sorted(dtypes))})")
    return EngineFacts(
        engine=ENGINE,
        model=model.model,
        revision=revision or weights_revision(model),
        kv_dtype=dtypes.pop(),
        settings=_settings(config, (name for _, group in specs for name in group.layer_names)),
        version=".".join(vllm.__version__.split(".")[:2]),
        isa=_isa(config, specs[0][1].kv_cache_spec),
        ranks=parallel.tensor_parallel_size,
        groups=groups,
    )


def _group(index: int, group: Any) -> Group:
    spec = group.kv_cache_spec
    if type(spec) not in _SUPPORTED:
        raise ConfigError(f"KV cache: group {index} is {type(spec).__name__}: not supported")
    if group.is_eagle_group or getattr(spec, "non_causal", False):
        raise ConfigError(f"KV cache: group {index} (EAGLE or not causal) is not supported")
    return Group(
        index=index,
        layers=len(group.layer_names),
        block_tokens=spec.block_size,
        block_bytes=spec.unpadded_page_size_bytes,
        kv_heads=spec.num_kv_heads,
        window_tokens=spec.sliding_window if type(spec) is SlidingWindowSpec else 0,
    )


def _settings(config: Any, layers: Iterable[str]) -> dict[str, str]:
    """Everything that may change KV and is no field of its own."""
    model = config.model_config
    hf = model.hf_config.to_dict()
    hf.pop("transformers_version", None)
    encoded = json.dumps(hf, default=str, sort_keys=True).encode()
    speculative = config.speculative_config
    settings = {
        "hf_config": hashlib.sha256(encoded).hexdigest(),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": str(config.cache_config.cache_dtype),
        "load_format": str(config.load_config.load_format),
        "layers": hashlib.sha256(msgspec.msgpack.encode(list(layers))).hexdigest(),
        "speculative": f"{speculative.method} {speculative.model}" if speculative else "",
        "pooling": str(model.runner_type),
    }
    if settings["load_format"].endswith("dummy"):
        settings["seed"] = str(model.seed)
    return settings | length_settings(hf, model.max_model_len)


def _isa(config: Any, spec: Any) -> str:
    """What vLLM's CPU kernels pack blocks for; machines that differ in it must not share."""
    isa = _get_attn_isa(
        config.model_config.dtype, spec.block_size, spec.head_size, config.cache_config.cache_dtype
    )
    return f"{platform.machine()}/{isa}"


def weights_revision(model: Any) -> str:
    """A name for the weights.

    Of a folder: its files' names, sizes and times, so that other weights in the same place are
    other weights; copies of one folder share only when the user names the revision. Of a model
    from the hub: the commit it was fetched at.
    """
    folder = Path(model.model)
    if folder.is_dir():
        return files_fingerprint(folder)
    found = try_to_load_from_cache(model.model, "config.json", revision=model.revision or "main")
    if isinstance(found, str):
        return Path(found).parent.name
    if not model.revision:
        log.warning("kvstore cannot tell which weights %s has: set `revision` in"
                    " kv_connector_extra_config to whatever names them", model.model)  # fmt: skip
    return model.revision or ""
