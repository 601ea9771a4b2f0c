"""A router's hints about the KV of a request: the KV Hint Protocol, version 0.1. Pure.

An engine carries them with a request as ``kv_hints``. Where its HTTP server has no field for them,
a router may send the same envelope in ``kv_transfer_params`` under ``kv_hints``. One of its actions
is supported, ``kv.fetch`` 1.0: pages of the prompt are at another node. A hint is not an order: the
engine still computes pages if that is faster than loading them, and verifies what it loads.
"""

from typing import Any, Final, Literal, NamedTuple

import msgspec

from kvstore.engine.counts import AdapterCounts
from kvstore.engine.requests import Request
from kvstore.protocol.page import KEY_BYTES, PrefixKeys

PROTOCOL_MAJOR: Final = "0"
ENDPOINT_SCHEME: Final = "kvstore://"
"""Prefix of ``source_control_endpoint``; the name of the node follows."""
ACTIONS_MAX: Final = 16
HASHES_MAX: Final = 1 << 16
_HASH_BYTES: Final = 8


class FetchPayload(msgspec.Struct, frozen=True):
    """The payload of ``kv.fetch``.

    Attributes:
        source_control_endpoint: ``kvstore://`` and the name of a node.
        block_hashes: hashes of the prompt's leading pages that the node has: the first 8 bytes of
            their keys, little-endian, as numbers.
        mode: ``copy``: the node keeps its pages.
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
        node: name of the node; empty = no hint.
        hashes: hashes of the leading pages.
    """

    node: str = ""
    hashes: tuple[int, ...] = ()

    def pages(self, keys: PrefixKeys) -> int:
        """Number of leading ``keys`` that the hint names; other hashes belong to other prompts."""
        packed = keys.packed
        for at, value in enumerate(self.hashes[: len(keys)]):
            start = at * KEY_BYTES
            if int.from_bytes(packed[start : start + _HASH_BYTES], "little") != value:
                return at
        return min(len(self.hashes), len(keys))


def read_hints(request: Request, counts: AdapterCounts) -> FetchHint:
    """The hint of a request, the last one if there are several; an invalid hint is ignored.

    Args:
        request: has an envelope, as ``kv_hints`` or in its ``kv_transfer_params``.
        counts: counts of the adapter; counts requests with a hint, and ignored hints.
    """
    found = getattr(request, "kv_hints", None)
    parameters: object = request.kv_transfer_params
    if found is None and isinstance(parameters, dict):  # a client may send anything
        found = parameters.get("kv_hints")
    hint, ignored = _read(found) if found is not None else (FetchHint(), 0)
    counts.add("fetch_hints", bool(hint.node))
    counts.add("hints_ignored", ignored)
    return hint


def _read(found: object) -> tuple[FetchHint, int]:
    """The hint of an envelope, and how many actions are unknown, of another version, or wrong."""
    try:
        envelope = msgspec.convert(found, _Envelope, from_attributes=True)
    except (msgspec.ValidationError, ValueError, RecursionError):  # ValueError: lone surrogates
        return FetchHint(), 1
    if envelope.protocol_version.partition(".")[0] != PROTOCOL_MAJOR:
        return FetchHint(), max(1, len(envelope.actions))
    hint, ignored = FetchHint(), max(0, len(envelope.actions) - ACTIONS_MAX)
    for action in envelope.actions[:ACTIONS_MAX]:
        one = _fetch_hint(action)
        ignored += one is None
        hint = one or hint
    return hint, ignored


def _fetch_hint(action: _Action) -> FetchHint | None:
    """The hint of an action; None if it is unknown, of another version, or wrong."""
    if (action.action_type, action.action_version) != ("kv.fetch", "1.0"):
        return None
    try:
        payload = msgspec.convert(action.payload, FetchPayload)
    except (msgspec.ValidationError, ValueError, RecursionError):  # ValueError: lone surrogates
        return None
    endpoint, hashes = payload.source_control_endpoint, payload.block_hashes
    if not endpoint.startswith(ENDPOINT_SCHEME) or len(hashes) > HASHES_MAX:
        return None
    return FetchHint(endpoint.removeprefix(ENDPOINT_SCHEME), tuple(hashes))
