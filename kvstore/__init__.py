"""A hierarchical, verified KV-cache store for LLM inference.

The public API consists of the names in ``__all__``; all other names may change between versions::

    from kvstore import CanonicalLayout, KVStore, ShardSpec, SpaceIdentity

Names are imported when they are first used, so that a daemon does not import the client.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvstore.client.jobs import RestoreJob, StoreJob
    from kvstore.client.results import Hit, PageViews, PutResult, RestoreResult
    from kvstore.client.space import Space
    from kvstore.client.store import KVStore
    from kvstore.config import DeviceSlabConfig
    from kvstore.mover.kvpool import KVPool
    from kvstore.protocol.errors import (
        CapacityError,
        ConfigError,
        DeviceUnavailable,
        DurabilityUnavailable,
        EngineNameTaken,
        InvalidArgument,
        KVStoreError,
        LayoutMismatch,
        NotFound,
        PageCorrupt,
        PeerUnreachable,
        ProtocolError,
        TierUnavailable,
        TooFewCopies,
        TransferError,
        TransferTimeout,
    )
    from kvstore.protocol.page import (
        CanonicalLayout,
        EngineLabel,
        OpaqueLayout,
        PrefixKeys,
        ShardSpec,
        SpaceIdentity,
        page_keys,
    )

_ERRORS: Final = (
    "CapacityError", "ConfigError", "DeviceUnavailable", "DurabilityUnavailable",
    "EngineNameTaken", "InvalidArgument",
    "KVStoreError", "LayoutMismatch", "NotFound", "PageCorrupt", "PeerUnreachable", "ProtocolError",
    "TierUnavailable", "TooFewCopies", "TransferError", "TransferTimeout",
)  # fmt: skip
_PAGES: Final = (
    "CanonicalLayout", "OpaqueLayout", "PrefixKeys", "ShardSpec", "SpaceIdentity", "page_keys",
)  # fmt: skip
_RESULTS: Final = ("Hit", "PageViews", "PutResult", "RestoreResult")
_MODULES: Final = {
    "DeviceSlabConfig": "kvstore.config",
    "EngineLabel": "kvstore.protocol.page",
    "KVPool": "kvstore.mover.kvpool",
    "KVStore": "kvstore.client.store",
    "RestoreJob": "kvstore.client.jobs",
    "Space": "kvstore.client.space",
    "StoreJob": "kvstore.client.jobs",
    **dict.fromkeys(_RESULTS, "kvstore.client.results"),
    **dict.fromkeys(_ERRORS, "kvstore.protocol.errors"),
    **dict.fromkeys(_PAGES, "kvstore.protocol.page"),
}
"""Public name → the module that defines it."""

__all__ = [
    "CanonicalLayout", "CapacityError", "ConfigError", "DeviceSlabConfig", "DeviceUnavailable",
    "DurabilityUnavailable", "EngineLabel", "EngineNameTaken", "Hit", "InvalidArgument", "KVPool",
    "KVStore", "KVStoreError", "LayoutMismatch", "NotFound", "OpaqueLayout", "PageCorrupt",
    "PageViews", "PeerUnreachable", "PrefixKeys", "ProtocolError", "PutResult", "RestoreJob",
    "RestoreResult", "ShardSpec", "Space", "SpaceIdentity", "StoreJob", "TierUnavailable",
    "TooFewCopies", "TransferError", "TransferTimeout", "__version__", "page_keys",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("kvstore.config.machine").version_of()
    if name not in _MODULES:
        raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
