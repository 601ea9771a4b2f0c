"""What users set of the connector and of the tier, under vLLM's names."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvstore.engine.identity import Group
from kvstore.engine.options import LoadOrder, Options, TieringOptions, read_section
from kvstore.errors import ConfigError

_WHERE: Final = "kv_connector_extra_config"
_WHERE_TIER: Final = "secondary_tiers"


def read_options(values: Mapping[str, Any]) -> Options:
    """Check what the user gave the connector.

    Raises:
        ConfigError: an unknown key, or a value that does not fit; names the key.
    """
    return read_section(values, Options, _WHERE)


def read_tier_options(values: Mapping[str, Any]) -> TieringOptions:
    """Check what the user gave the tier.

    Raises:
        ConfigError: an unknown key, one that is missing, or a value that does not fit; names it.
    """
    return read_section(values, TieringOptions, _WHERE_TIER)


def page_tokens_of(options: Options, groups: Sequence[Group]) -> int:
    """Tokens in a page of an engine with these KV groups.

    Raises:
        ConfigError: the page size is no multiple of each group's block, or loads are to be
            layer-wise for several groups: vLLM takes no report of a load that failed for a request
            that is running there.
    """
    if options.load is LoadOrder.LAYERWISE and len(groups) > 1:
        raise ConfigError(
            f"{_WHERE}: load: layerwise: the engine has {len(groups)} KV groups, and cannot compute"
            " again there what did not come; use async"
        )
    blocks = [group.block_tokens for group in groups]
    try:
        page_tokens = options.page_tokens_for(max(blocks))
        for block in blocks:
            options.page_tokens_for(block)
    except ConfigError as error:
        raise ConfigError(f"{_WHERE}: {error}") from error
    return page_tokens
