"""Options of the connector and the tier, with vLLM's names of the sections."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec

from kvstore.engine.identity import Group
from kvstore.engine.options import (
    ADDRESS,
    LoadOrder,
    Milliseconds,
    Options,
    Tenant,
    check_address,
    read_section,
)
from kvstore.errors import ConfigError

_WHERE: Final = "kv_connector_extra_config"
_WHERE_TIER: Final = "secondary_tiers"


class TierOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of the tier, an entry of ``secondary_tiers``.

    Attributes:
        revision: identifies the weights, their quantisation and everything else that vLLM does not
            pass to a tier.
        address: the node's socket.
        tenant: isolation domain; memory of one tenant is never mapped by engines of another.
        lookup_timeout_ms: maximum time for which vLLM repeats the lookup of a chunk; then the chunk
            is a miss.
    """

    revision: Annotated[str, msgspec.Meta(min_length=1)]
    address: str = ADDRESS
    tenant: Tenant = "default"
    lookup_timeout_ms: Milliseconds = 1000.0

    def __post_init__(self) -> None:
        """Refuse an invalid address."""
        check_address(self.address)


def read_options(values: Mapping[str, Any]) -> Options:
    """Convert and check the options of the connector.

    Raises:
        ConfigError: a key is unknown, or a value is not allowed; names the key.
    """
    return read_section(values, Options, _WHERE)


def read_tier_options(values: Mapping[str, Any]) -> TierOptions:
    """Convert and check the options of the tier.

    Raises:
        ConfigError: a key is unknown or missing, or a value is not allowed; names the key.
    """
    return read_section(values, TierOptions, _WHERE_TIER)


def page_tokens_of(options: Options, groups: Sequence[Group]) -> int:
    """Tokens per page for an engine with these KV groups.

    Raises:
        ConfigError: the page size is not a multiple of each group's block, or layer-wise loads are
            configured for several groups, for which vLLM cannot handle failed loads of running
            requests.
    """
    if options.load is LoadOrder.LAYERWISE and len(groups) > 1:
        raise ConfigError(
            f"{_WHERE}: load: layerwise: the engine has {len(groups)} KV groups; cannot recompute"
            " KV that was not loaded; use async"
        )
    blocks = [group.block_tokens for group in groups]
    try:
        page_tokens = options.page_tokens_for(max(blocks))
        for block in blocks:
            options.page_tokens_for(block)
    except ConfigError as error:
        raise ConfigError(f"{_WHERE}: {error}") from error
    return page_tokens
