"""Options of adapters: typed sections without unknown keys."""

import difflib
import enum
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar

import msgspec

from kvstore.config import DeviceSlabConfig
from kvstore.protocol.errors import ConfigError
from kvstore.protocol.page import PAGE_TOKENS_MIN_DEFAULT

Milliseconds = Annotated[float, msgspec.Meta(gt=0, le=60_000)]
SLAB_BYTES_MIN: Final = 1 << 20
EngineName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^([A-Za-z0-9._-]{1,64})?$(?!\n)", description="1 to 64 of A-Z a-z 0-9 . _ -"
    ),
]
Tenant = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
ADDRESS: Final = "unix:///run/kvstore/kvstore.sock"
_Section = TypeVar("_Section", bound=msgspec.Struct)


class LoadOrder(enum.StrEnum):
    """When a hit is loaded into the engine's blocks."""

    ASYNC = "async"
    LAYERWISE = "layerwise"


class Loads(enum.StrEnum):
    """Which hits are loaded."""

    FASTER = "faster"
    ALWAYS = "always"
    NEVER = "never"


class Retain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """For how long the pages of a conversation are kept after each of its requests.

    Attributes:
        seconds: 0 = only as long as the eviction policy does.
        bytes: maximum bytes that one conversation may take on the node, on all ranks together; 0 =
            no limit of its own.
    """

    seconds: Annotated[float, msgspec.Meta(ge=0, le=366 * 86_400)] = 0.0
    bytes: Annotated[int, msgspec.Meta(ge=0)] = 0


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of an adapter; every key has a default.

    Attributes:
        address: the node's socket.
        engine: name of this engine, the same as its id at the Conductor; empty = ``host:port`` of
            its HTTP server, where that is known. Two live engines of a node cannot have one name.
        page_tokens: tokens per page, a multiple of the engine's block; 0 = the smallest multiple
            that is at least 64, or what the adapter says for its engine.
        tenant: isolation domain; memory of one tenant is never mapped by engines of another.
        revision: identifies the weights, instead of the model's files.
        lookup_timeout_ms: maximum time that the engine's scheduler waits for an answer; after a
            timeout all lookups are misses until the node answers again.
        load_timeout_ms: maximum time that a request waits for its pages; less if computing them
            would take less.
        load_timeout_ms_min: lower limit of the time that a request waits for its pages.
        room_wait_ms: maximum time that a request waits to start its load while too many are in
            progress; then it is computed.
        loads: ``faster``: load or compute, whichever is measured to be faster; ``always``: load all
            pages of a hit, to spare the engine; ``never``: only store.
        load: ``async``: requests wait outside of the engine's step; ``layerwise``: the step waits
            before each layer for that layer's KV.
        store_output: also store pages with output tokens.
        retain: keeps the pages of requests with a session id (a conversation) for a time.
        device_slab_bytes: bytes of each worker's memory for copies of pages it has loaded, so that
            the next load of these pages does not use the node; 0 = none.
    """

    address: str = ADDRESS
    engine: EngineName = ""
    page_tokens: Annotated[int, msgspec.Meta(ge=0, le=65_536)] = 0
    tenant: Tenant = "default"
    revision: str = ""
    lookup_timeout_ms: Milliseconds = 5.0
    load_timeout_ms: Milliseconds = 2000.0
    load_timeout_ms_min: Milliseconds = 20.0
    room_wait_ms: Milliseconds = 200.0
    loads: Loads = Loads.FASTER
    load: LoadOrder = LoadOrder.ASYNC
    store_output: bool = True
    retain: Retain = Retain()
    device_slab_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0

    def __post_init__(self) -> None:
        """Refuse an invalid address, and a slab that is too small."""
        check_address(self.address)
        if 0 < self.device_slab_bytes < SLAB_BYTES_MIN:
            raise ValueError(
                f"device_slab_bytes: {self.device_slab_bytes} is less than {SLAB_BYTES_MIN}"
            )

    @property
    def device_slab(self) -> DeviceSlabConfig | None:
        """The configuration of a worker's slab, in host memory like its KV tensors."""
        if not self.device_slab_bytes:
            return None
        return DeviceSlabConfig(device="cpu", capacity_bytes=self.device_slab_bytes)

    def page_tokens_for(self, block_tokens: int, least: int = PAGE_TOKENS_MIN_DEFAULT) -> int:
        """Tokens per page for an engine with blocks of ``block_tokens``.

        Args:
            block_tokens: tokens of a block, at least 1.
            least: unless a size is configured, pages have the smallest multiple of the block that
                is at least this.

        Raises:
            ConfigError: the configured page size is not a multiple of the block.
        """
        if not self.page_tokens:
            return -(-least // block_tokens) * block_tokens
        if self.page_tokens % block_tokens:
            raise ConfigError(
                f"page_tokens: {self.page_tokens} is not a multiple of the engine's block of"
                f" {block_tokens} tokens"
            )
        return self.page_tokens


class TieringOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of an adapter for an engine that has its own tier in host memory.

    Attributes:
        revision: identifies the weights, their quantisation and everything else that the engine
            does not pass to a tier.
        address: the node's socket.
        tenant: isolation domain; memory of one tenant is never mapped by engines of another.
        lookup_timeout_ms: maximum time for which the engine is told to ask again about a chunk;
            after it the chunk is a miss.
    """

    revision: Annotated[str, msgspec.Meta(min_length=1)]
    address: str = ADDRESS
    tenant: Tenant = "default"
    lookup_timeout_ms: Milliseconds = 1000.0

    def __post_init__(self) -> None:
        """Refuse an invalid address."""
        check_address(self.address)


def read_section(values: Mapping[str, Any], section: type[_Section], where: str) -> _Section:
    """Convert and check the options of an adapter.

    Args:
        values: keys and values.
        section: type of the section.
        where: name of the section, for messages.

    Raises:
        ConfigError: a key is unknown or missing, or a value is not allowed; the message names the
            key.
    """
    known = section.__struct_fields__
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {key}{hint}")
    try:
        return msgspec.convert(dict(values), section, strict=False)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        key = path.rstrip("`").lstrip(".")
        raise ConfigError(f"{where}: {key + ': ' if key else ''}{what}") from error


def check_address(address: str) -> None:
    """Refuse an address that is not a node's socket.

    Raises:
        ValueError: the type of error that ``__post_init__`` of a section must raise.
    """
    scheme, _, path = address.partition("://")
    if scheme != "unix" or not path.startswith("/"):
        raise ValueError(f"address: {address!r} is not unix:///absolute/path")
