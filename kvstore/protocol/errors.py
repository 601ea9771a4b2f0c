"""All errors that kvstore raises, as one tree.

::

    KVStoreError                     code, retryable
    ├─ ConfigError                   a key or value of the configuration; names key and value
    ├─ EngineNameTaken     (retry)   another live engine of this node has the same name
    ├─ CapacityError       (retry)   no slot is free and none may be evicted, or a quota is reached
    ├─ TooFewCopies        (retry)   stored, but fewer nodes have the pages than were asked for
    ├─ InvalidArgument               an argument is wrong; names the field
    │  ├─ LayoutMismatch             the caller's layout is not that of this space; names the field
    │  └─ NotFound                   the named object does not exist on this node
    ├─ TransferError
    │  ├─ TransferTimeout  (retry)   a deadline passed
    │  └─ PeerUnreachable  (retry)   nobody listens there, or the connection broke
    ├─ TierUnavailable               the memory or device of a tier is not available
    │  ├─ DeviceUnavailable          an engine's device cannot copy pages now
    │  └─ DurabilityUnavailable      a durable put on a node that never syncs
    ├─ PageCorrupt                   bytes do not match the digest of the requested page
    └─ ProtocolError                 an invalid message, or an unknown protocol version

A miss is a value, never an error. ``code`` is stable: the socket, REST and metrics use it.
"""

from typing import ClassVar, Final, Literal

FOREIGN_TEXT_MAX: Final = 500
"""Most characters of text that others sent in a log line or an error."""


class KVStoreError(Exception):
    """Base class of all errors of kvstore.

    Attributes:
        code: stable identifier in ``snake_case``, the same on the socket, over HTTP and in metrics.
        retryable: True if the same call may succeed later.
    """

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False


class ConfigError(KVStoreError):
    """A configuration key is unknown, or its value is not allowed; the message names both."""

    code = "config"


class EngineNameTaken(KVStoreError):
    """Another engine with the same name is connected; the name is free when that engine ends."""

    code = "engine_name_taken"
    retryable = True


class CapacityError(KVStoreError):
    """There is no free space at the moment, or a budget or quota is exhausted.

    Attributes:
        field: name of the budget or quota; empty if there is no free space.
    """

    code = "capacity"
    retryable = True

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class TooFewCopies(KVStoreError):
    """The pages are stored on this node, but on fewer nodes than requested.

    Attributes:
        copies: number of nodes that are known to have all pages, this node included; at least 1.
    """

    code = "too_few_copies"
    retryable = True

    def __init__(self, message: str, copies: int) -> None:
        super().__init__(message)
        self.copies = copies


class InvalidArgument(KVStoreError):
    """An argument is wrong; the same call can never succeed.

    Attributes:
        field: the name of the wrong argument.
    """

    code = "invalid_argument"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class LayoutMismatch(InvalidArgument):
    """The caller's page layout is not the layout of this space; ``field`` names the difference."""

    code = "layout_mismatch"


class NotFound(InvalidArgument):
    """The object that ``field`` names does not exist on this node."""

    code = "not_found"


class TransferError(KVStoreError):
    """A message or the bytes of a page did not arrive."""

    code = "transfer"


class TransferTimeout(TransferError):
    """A deadline passed before the answer arrived."""

    code = "transfer_timeout"
    retryable = True


class PeerUnreachable(TransferError):
    """No node answers at that address, or the connection broke."""

    code = "peer_unreachable"
    retryable = True


class TierUnavailable(KVStoreError):
    """The memory or the device of a tier is not available."""

    code = "tier_unavailable"


DeviceCause = Literal["memory", "memlock", "copy", "deadline", "other"]
"""Why a device cannot copy: no memory of the device, no memory of the host that may be locked, an
operation failed, one did not end in time, anything else (no torch, no such device)."""


class DeviceUnavailable(TierUnavailable):
    """An engine's device cannot copy pages now: no memory, a failed or unfinished copy.

    Attributes:
        cause: why.
    """

    code = "device_unavailable"

    def __init__(self, message: str, cause: DeviceCause = "other") -> None:
        super().__init__(message)
        self.cause: DeviceCause = cause


class DurabilityUnavailable(TierUnavailable):
    """Pages cannot be made durable: the node never syncs, or a page must not go to an SSD."""

    code = "durability_unavailable"


class PageCorrupt(KVStoreError):
    """A page failed its digest; it is quarantined, and lookups of it are misses."""

    code = "page_corrupt"


class ProtocolError(KVStoreError):
    """The peer does not understand a message or the protocol version."""

    code = "protocol"


def printable(text: str) -> str:
    """Text that others sent as one line, shortened; what cannot be printed becomes ``?``."""
    return "".join(c if c.isprintable() else "?" for c in text[:FOREIGN_TEXT_MAX])


def reason(error: BaseException) -> str:
    """The message of an exception, for an OSError without errno and path."""
    said = error.strerror if isinstance(error, OSError) else None
    return said or str(error) or type(error).__name__


def error_from_code(code: str, message: str, field: str = "") -> KVStoreError:
    """Rebuild an error that the peer reported."""
    kind = _BY_CODE.get(code, KVStoreError)
    if issubclass(kind, InvalidArgument):
        return kind(field or "request", message.removeprefix(f"{field}: "))
    return kind(message)


_BY_CODE: dict[str, type[KVStoreError]] = {
    kind.code: kind
    for kind in (
        ConfigError,
        EngineNameTaken,
        CapacityError,
        InvalidArgument,
        LayoutMismatch,
        NotFound,
        TransferError,
        TransferTimeout,
        PeerUnreachable,
        TierUnavailable,
        DeviceUnavailable,
        DurabilityUnavailable,
        PageCorrupt,
        ProtocolError,
    )
}
