"""Every error kvstore raises, as one tree.

::

    KVStoreError                     code, retryable
    ├─ ConfigError                   a key or value of the configuration; names both
    ├─ CapacityError       (retry)   no slot is free or evictable, or a quota is reached
    ├─ InvalidArgument               a caller's mistake; names the field
    │  ├─ LayoutMismatch             the caller's bytes are not this space's; names the field
    │  └─ NotFound                   what the caller names does not exist here
    ├─ TransferError
    │  ├─ TransferTimeout  (retry)   a deadline passed
    │  └─ PeerUnreachable  (retry)   nobody listens there, or the connection broke
    ├─ TierUnavailable               the memory or device behind a tier cannot be had
    │  └─ DurabilityUnavailable      a durable put of what is never synced
    ├─ PageCorrupt                   bytes are not those of the page that was asked for
    └─ ProtocolError                 a message or version that is not understood

A miss is a value, never an error. ``code`` is stable: the socket, REST and metrics use it.
"""

from typing import ClassVar


class KVStoreError(Exception):
    """Root of all errors of this project.

    Attributes:
        code: stable identifier, ``snake_case``; never changes once released.
        retryable: the same call may succeed later without anything being changed by the caller.
    """

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False


class ConfigError(KVStoreError):
    """A configuration key is unknown or its value does not fit."""

    code = "config"


class CapacityError(KVStoreError):
    """There is no room now, or a budget or quota is used up; ``field`` says which, if one is."""

    code = "capacity"
    retryable = True

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class InvalidArgument(KVStoreError):
    """The call cannot be right; ``field`` says which argument is wrong."""

    code = "invalid_argument"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class LayoutMismatch(InvalidArgument):
    """The caller's page layout is not the one this space holds; ``field`` differs."""

    code = "layout_mismatch"


class NotFound(InvalidArgument):
    """What ``field`` names does not exist here."""

    code = "not_found"


class TransferError(KVStoreError):
    """Bytes or a message did not arrive."""

    code = "transfer"


class TransferTimeout(TransferError):
    """A deadline passed before the answer came."""

    code = "transfer_timeout"
    retryable = True


class PeerUnreachable(TransferError):
    """Nobody answers at that address, or the connection broke."""

    code = "peer_unreachable"
    retryable = True


class TierUnavailable(KVStoreError):
    """The memory or device behind a tier cannot be had."""

    code = "tier_unavailable"


class DurabilityUnavailable(TierUnavailable):
    """A durable put of what is never synced: by this node, or of a page kept off the SSD tier."""

    code = "durability_unavailable"


class PageCorrupt(KVStoreError):
    """The bytes are not those of the page that was asked for; it is quarantined and a miss."""

    code = "page_corrupt"


class ProtocolError(KVStoreError):
    """A message or a protocol version is not understood."""

    code = "protocol"


def reason(error: BaseException) -> str:
    """What an exception says, without the number and the path of a system's error."""
    said = error.strerror if isinstance(error, OSError) else None
    return said or str(error) or type(error).__name__


def error_from_code(code: str, message: str, field: str = "") -> KVStoreError:
    """Rebuild the error that the other side of a connection reported."""
    kind = _BY_CODE.get(code, KVStoreError)
    if issubclass(kind, InvalidArgument):
        return kind(field or "request", message.removeprefix(f"{field}: "))
    return kind(message)


_BY_CODE: dict[str, type[KVStoreError]] = {
    kind.code: kind
    for kind in (
        ConfigError,
        CapacityError,
        InvalidArgument,
        LayoutMismatch,
        NotFound,
        TransferError,
        TransferTimeout,
        PeerUnreachable,
        TierUnavailable,
        DurabilityUnavailable,
        PageCorrupt,
        ProtocolError,
    )
}
