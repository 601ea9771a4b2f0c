"""What a router knows about the KV of a request: hints of the KV Hint Protocol, version 0.1. Pure.

vLLM carries them as ``Request.kv_hints``; as its HTTP server has no field for them yet, a router
may send the same envelope in ``kv_transfer_params`` under ``kv_hints``. Of its actions one is
taken, ``kv.fetch`` 1.0: pages of the prompt are at another node. A hint is no order: the engine
still computes what it would load more slowly, and verifies what it loads.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

import msgspec

from kvstore.page import KEY_BYTES, PrefixKeys

PROTOCOL_MAJOR: Final = "0"
ENDPOINT_SCHEME: Final = "kvstore://"
"""What ``source_control_endpoint`` begins with; the name of the node follows."""
ACTIONS_MAX: Final = 16
HASHES_MAX: Final = 1 << 16
_HASH_BYTES: Final = 8


class FetchPayload(msgspec.Struct, frozen=True):
    """Of ``kv.fetch``.

    Attributes:
        source_control_endpoint: ``kvstore://`` and the name of a node.
        block_hashes: of leading pages of the prompt that it has: the first 8 bytes of their keys,
            little-endian, as numbers.
        mode: ``copy``: it keeps them.
    """

    source_control_endpoint: str
    block_hashes: list[int]
    mode: Literal["copy"] = "copy"


class _Action(msgspec.Struct, frozen=True):
    action_type: str
    action_version: str
    payload: Any = None


class _Envelope(msgspec.Struct, frozen=True):
    protocol_version: str
    actions: list[_Action]


class FetchHint(NamedTuple):
    """Pages of a prompt that another node has.

    Attributes:
        node: its name; empty = no hint.
        hashes: of the leading pages.
    """

    node: str = ""
    hashes: tuple[int, ...] = ()

    def pages(self, keys: PrefixKeys) -> int:
        """Number of leading ones of ``keys`` that the hint names; others are not this prompt's."""
        packed = keys.packed
        for at, value in enumerate(self.hashes[: len(keys)]):
            start = at * KEY_BYTES
            if int.from_bytes(packed[start : start + _HASH_BYTES], "little") != value:
                return at
        return min(len(self.hashes), len(keys))


class Hints(NamedTuple):
    """The hints of a request.

    Attributes:
        fetch: the last one; ``node`` is empty if there is none.
        ignored: actions that are not known, of another version, or wrong.
    """

    fetch: FetchHint = FetchHint()
    ignored: int = 0


def fetch_envelope(message_id: str, node: str, keys: PrefixKeys) -> dict[str, Any]:
    """The envelope that names ``node`` as the holder of the pages ``keys``, for a router to send.

    Returns:
        JSON-compatible values; what :func:`read_hints` reads.
    """
    packed = keys.packed
    starts = range(0, len(packed), KEY_BYTES)
    hashes = [int.from_bytes(packed[at : at + _HASH_BYTES], "little") for at in starts]
    payload = FetchPayload(ENDPOINT_SCHEME + node, hashes[:HASHES_MAX])
    action = {
        "action_id": "1", "action_type": "kv.fetch", "action_version": "1.0",
        "payload": msgspec.to_builtins(payload),
    }  # fmt: skip
    return {"protocol_version": "0.1", "message_id": message_id, "actions": [action]}


def read_hints(carried: object, parameters: Mapping[str, Any] | None) -> Hints:
    """Read the hints of a request; nothing of them can fail it.

    Args:
        carried: what the engine carries as ``kv_hints``: an envelope, or None.
        parameters: its ``kv_transfer_params``; read if the engine carries none.
    """
    found = carried if carried is not None else (parameters or {}).get("kv_hints")
    if found is None:
        return Hints()
    try:
        envelope = msgspec.convert(found, _Envelope, from_attributes=True)
    except (msgspec.ValidationError, RecursionError):
        return Hints(ignored=1)
    if envelope.protocol_version.partition(".")[0] != PROTOCOL_MAJOR:
        return Hints(ignored=max(1, len(envelope.actions)))
    fetch, ignored = FetchHint(), max(0, len(envelope.actions) - ACTIONS_MAX)
    for action in envelope.actions[:ACTIONS_MAX]:
        hint = _fetch_hint(action)
        ignored += hint is None
        fetch = hint or fetch
    return Hints(fetch, ignored)


def _fetch_hint(action: _Action) -> FetchHint | None:
    """The hint of an action; None if it is not known, of another version, or wrong."""
    if (action.action_type, action.action_version) != ("kv.fetch", "1.0"):
        return None
    try:
        payload = msgspec.convert(action.payload, FetchPayload)
    except (msgspec.ValidationError, RecursionError):
        return None
    endpoint, hashes = payload.source_control_endpoint, payload.block_hashes
    if not endpoint.startswith(ENDPOINT_SCHEME) or len(hashes) > HASHES_MAX:
        return None
    return FetchHint(endpoint.removeprefix(ENDPOINT_SCHEME), tuple(hashes))
