"""Options of the connector and the tier, with vLLM's names of the sections."""

from collections.abc import Mapping, Sequence
from math import lcm
from typing import Any, Final

from kvstore.engine.identity import Group
from kvstore.engine.options import LoadOrder, Options, TieringOptions, read_section
from kvstore.protocol.errors import ConfigError
from kvstore.protocol.page import PAGE_TOKENS_MIN_DEFAULT

CPU_PAGE_TOKENS_MIN: Final = 32
"""A CPU computes some hundred tokens a second: those behind the last whole page of a prompt cost it
more than the work of twice as many pages."""

_WHERE: Final = "kv_connector_extra_config"
_WHERE_TIER: Final = "secondary_tiers"


class ConnectorOptions(Options, frozen=True, kw_only=True):
    """The options of the connector.

    Attributes:
        in_multi_connector: it is one of several in vLLM's ``MultiConnector``; set by the plugin.
    """

    in_multi_connector: bool = False


def read_options(values: Mapping[str, Any]) -> ConnectorOptions:
    """Convert and check the options of the connector.

    Raises:
        ConfigError: a key is unknown, or a value is not allowed; names the key.
    """
    return read_section(values, ConnectorOptions, _WHERE)


def read_tier_options(values: Mapping[str, Any]) -> TieringOptions:
    """Convert and check the options of the tier.

    Raises:
        ConfigError: a key is unknown or missing, or a value is not allowed; names the key.
    """
    return read_section(values, TieringOptions, _WHERE_TIER)


def check_against(options: ConnectorOptions, config: Any) -> None:
    """Refuse options that do not fit vLLM's configuration, before it loads weights.

    What depends on the KV groups, :func:`page_tokens_of` refuses later: only vLLM's allocator knows
    them.

    Args:
        options: of the connector.
        config: ``VllmConfig``; one without a model is not checked.

    Raises:
        ConfigError: names the option.
    """
    if config.model_config is None:
        return
    on_cpu, cache = config.device_config.device_type == "cpu", config.cache_config
    if options.device_slab_bytes and not on_cpu:
        raise ConfigError(
            f"{_WHERE}: device_slab_bytes: not with KV memory on a GPU, where vLLM's own prefix"
            " cache does the same"
        )
    if options.load is LoadOrder.LAYERWISE:
        _check_layerwise(config)
    # Otherwise vLLM still chooses the block: for an attention backend, states, several dtypes, or
    # a model whose layers all have a window.
    chosen = on_cpu or getattr(cache, "user_specified_block_size", False)
    aligned = config.model_config.is_hybrid or getattr(cache, "kv_cache_dtype_skip_layers", None)
    if chosen and not aligned and not getattr(cache, "sliding_window", None):
        _page_tokens(options, cache.block_size)


def _check_layerwise(config: Any) -> None:
    """Refuse layer-wise loads where vLLM does not compute again what was not loaded.

    Raises:
        ConfigError: says which of vLLM's settings it is.
    """
    found = goes_on_behind_gaps(config)
    if not found:
        return
    switches = [switch for switch in found.values() if switch]
    remedy = f", or {' and '.join(switches)}" if len(switches) == len(found) else ""
    raise ConfigError(
        f"{_WHERE}: load: layerwise: with {' and '.join(found)} vLLM would answer from KV that were"
        f" not loaded, instead of computing them: use async{remedy}"
    )


def goes_on_behind_gaps(config: Any) -> dict[str, str]:
    """Why vLLM does not compute again what was not loaded for a request that runs.

    It sets the number of the request's computed tokens back. Its V2 runner takes that number from
    the device, where nobody sets it back, and goes on behind the gap. If vLLM begins further steps
    before it knows the end of one, those are computed on the gap, and their tokens are answered.

    Returns:
        What of it vLLM uses → the switch that turns it off; empty = there is none.
    """
    found: dict[str, str] = {}
    if getattr(config.parallel_config, "pipeline_parallel_size", 1) > 1:
        found["pipeline stages"] = ""
    if getattr(config, "use_v2_model_runner", False):
        found["the V2 model runner"] = "VLLM_USE_V2_MODEL_RUNNER=0"
    if getattr(config.scheduler_config, "async_scheduling", False):
        found["asynchronous scheduling"] = "--no-async-scheduling"
    return found


def layout_for(options: ConnectorOptions, config: Any, *, on_cuda: bool) -> str | None:
    """The layout of blocks to ask vLLM for; None = its own choice.

    On CUDA, blocks outermost: a block is copied as a whole, without an operation a layer. vLLM uses
    another layout, with a warning, if a backend does not have this one. In a ``MultiConnector``,
    which takes it for a condition, the layout is left to the others. With states, too: there vLLM
    makes blocks larger than its kernels', and does not start if it cannot split them.

    Args:
        options: of the connector.
        config: ``VllmConfig``.
        on_cuda: the engine computes on CUDA.
    """
    hybrid = config.model_config is not None and config.model_config.is_hybrid
    return "BLHNC" if on_cuda and not (options.in_multi_connector or hybrid) else None


def page_tokens_of(options: Options, groups: Sequence[Group], *, on_cpu: bool) -> int:
    """Tokens per page for an engine with these KV groups.

    Args:
        options: of the connector.
        groups: of the engine.
        on_cpu: it computes on CPUs.

    Raises:
        ConfigError: the page size is not a multiple of each group's block (with states: not the
            block), or layer-wise loads are configured for several groups or a window, where vLLM
            cannot handle failed loads of running requests.
    """
    if options.load is LoadOrder.LAYERWISE and len(groups) > 1:
        raise ConfigError(
            f"{_WHERE}: load: layerwise: the engine has {len(groups)} KV groups; cannot recompute"
            " KV that was not loaded; use async"
        )
    if options.load is LoadOrder.LAYERWISE and groups[0].window_tokens:
        raise ConfigError(
            f"{_WHERE}: load: layerwise: the engine's KV has a window of {groups[0].window_tokens}"
            " tokens; without what lies before it, KV that was not loaded cannot be recomputed; use"
            " async"
        )
    blocks = [group.block_tokens for group in groups]
    if any(group.state for group in groups):
        # A block has one state, and a page one block: vLLM makes the blocks of all groups equal.
        if len(set(blocks)) > 1 or options.page_tokens not in {0, blocks[0]}:
            raise ConfigError(
                f"{_WHERE}: page_tokens: {options.page_tokens}: of a model with states a page is"
                f" one block ({', '.join(map(str, sorted(set(blocks))))} tokens); leave it out"
            )
        return blocks[0]
    least = CPU_PAGE_TOKENS_MIN if on_cpu else PAGE_TOKENS_MIN_DEFAULT
    return _page_tokens(options, lcm(*blocks), least)


def _page_tokens(options: Options, block_tokens: int, least: int = 1) -> int:
    try:
        return options.page_tokens_for(block_tokens, least)
    except ConfigError as error:
        raise ConfigError(f"{_WHERE}: {error}") from error
