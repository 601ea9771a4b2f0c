"""Whether an answer of a node fits its request, beyond being a message of the protocol. Pure.

An engine uses the numbers of an answer as sizes of its own arrays. So an impossible answer, from a
faulty node or an unknown version, ends the connection like any other broken message.
"""

from typing import Final

from kvstore.protocol import wire
from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.page import DIGEST_BYTES, KEY_BYTES
from kvstore.state.tree.actions import PageStatus

_KINDS: Final[dict[type, type]] = {
    wire.Hello: wire.Welcome, wire.OpenSpace: wire.SpaceOpened, wire.Lookup: wire.Found,
    wire.Acquire: wire.Acquired, wire.BeginPut: wire.PutGranted, wire.CommitPut: wire.Committed,
    wire.StorePage: wire.Committed, wire.Persist: wire.Persisted, wire.Ping: wire.Pong,
    wire.Replicate: wire.Replicated, wire.Stats: wire.StatsReply,
}  # fmt: skip
_ADDRESS_BYTES: Final = wire.ADDRESS.itemsize
_STATUSES: Final = bytes(PageStatus)
_ENDS: Final = bytes(status for status in PageStatus if status is not PageStatus.GRANTED)
"""Statuses of pages whose put has ended."""


def check_answer(request: wire.Request, answer: wire.Answer) -> None:
    """Refuse an answer that does not match its request; a Failure always does.

    Raises:
        ProtocolError: the answer has another type, or numbers that do not match the request.
    """
    if type(answer) is wire.Failure:
        return
    if type(answer) is not _KINDS.get(type(request)) or not _fits(request, answer):
        what = f"{type(request).__name__} of this client"
        raise ProtocolError(
            f"{type(answer).__name__} of the node does not fit {what}: update the older of both"
        )


def _fits(request: wire.Request, answer: wire.Answer) -> bool:
    """Whether the numbers of an answer of the right kind can be."""
    match request, answer:
        case wire.Lookup(), wire.Found():
            further = max(answer.pending, answer.remote)
            return (answer.pages + further) * KEY_BYTES <= len(request.keys)
        case wire.Acquire(), wire.Acquired():
            pages, rest = divmod(len(answer.digests), DIGEST_BYTES)
            same = not rest and len(answer.addresses) == pages * _ADDRESS_BYTES
            return same and pages * KEY_BYTES <= len(request.keys) and answer.lasting >= 0
        case wire.BeginPut(), wire.PutGranted():
            granted = answer.statuses.count(PageStatus.GRANTED)
            same = len(answer.statuses) * KEY_BYTES == len(request.keys)
            same = same and not answer.statuses.translate(None, _STATUSES)
            return same and len(answer.addresses) == granted * _ADDRESS_BYTES
        case wire.CommitPut() | wire.StorePage(), wire.Committed():
            digests = request.digests if isinstance(request, wire.CommitPut) else request.digest
            reserved = len(answer.ahead) == _ADDRESS_BYTES and request.ahead
            same = len(answer.statuses) * DIGEST_BYTES == len(digests)
            same = same and not answer.statuses.translate(None, _ENDS)
            return same and bool(reserved or not answer.ahead)
        case wire.OpenSpace(), wire.SpaceOpened():
            return len(answer.shards) == len(request.shards)
        case _:
            return True
