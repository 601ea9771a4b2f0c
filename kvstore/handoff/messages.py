"""The messages of a handoff, after the greeting (``greeting``). Pure.

Decode writes on one connection, prefill on the other; :class:`RangesHead` is followed by the bytes
of its ranges, in order.
"""

from typing import Final

import msgspec

from kvstore.handoff.rooms import ROOM_MAX
from kvstore.handoff.states import HandoffFailure
from kvstore.protocol.errors import ProtocolError

MESSAGE_BYTES_MAX: Final = 8 << 20
"""An announcement of 2**20 blocks has 4 MiB."""
RANGES_BYTES_MAX: Final = 1 << 20
"""Maximum bytes of the ranges of one head, for which an abort has to wait."""
RANGES_MAX: Final = 1_024
"""Ranges of one head."""
TEXT_MAX: Final = 200
UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The errors of msgspec's decoders for a peer's bytes; the last two are not documented."""


class HandoffPing(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Nothing but that the sender runs."""


class RenewRoom(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Both: this handoff is alive, although no data is sent now. The first message of a room."""

    room: int


class LandingPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where a transport other than TCP writes: decode's pool, as an engine has registered it.

    Attributes:
        transport: its name.
        endpoint: ``host:port`` of the engine.
        planes: for each plane that the link moves, an address in the engine's process, 8 bytes
            each: where block 0 of the pool is. If the link moves only some heads, where the heads
            of the first announced position belong; the next positions follow.
    """

    transport: str
    endpoint: str
    planes: bytes


class Announce(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Decode: where the KV of a request belongs.

    Attributes:
        room: of the request.
        token_count: tokens of the request; prefill must have the same number.
        first_token: KV of tokens before it is not needed.
        blocks: block of each position from the position of ``first_token`` on, 4 bytes each.
        aux_slot: slot of the aux data.
        place: where another transport may write the KV; None = all comes over this link.
        states: blocks in each state buffer, 4 bytes each; empty if the link moves no state data.
    """

    room: int
    token_count: int
    first_token: int
    blocks: bytes
    aux_slot: int
    place: LandingPlace | None = None
    states: list[bytes] = []


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Decode: stop, and answer Drained; repeated until the answer arrives."""

    room: int
    failure: HandoffFailure


class Done(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Decode: everything has arrived and was verified."""

    room: int


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Prefill: nothing more is submitted; Drained follows."""

    room: int
    failure: HandoffFailure


class Drained(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Prefill: nothing is submitted any more for this room, and all that was has ended.

    Attributes:
        room: of the request.
        doubtful: a write to memory of decode has not ended well, so its bytes may still arrive.
    """

    room: int
    doubtful: bool = False


class RangesHead(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Prefill: bytes of these ranges follow.

    Attributes:
        room: of the request.
        ranges: plane, first position and number of blocks of each, 3 x 4 bytes.
        digests: 16 bytes of each, seeded by room, heads and place.
    """

    room: int
    ranges: bytes
    digests: bytes


class RangesWritten(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Prefill: another transport has written these ranges; fields as of :class:`RangesHead`."""

    room: int
    ranges: bytes
    digests: bytes


FromDecode = HandoffPing | RenewRoom | Announce | Abort | Done
FromPrefill = HandoffPing | RenewRoom | Failed | Drained | RangesHead | RangesWritten

_encoder: Final = msgspec.msgpack.Encoder()
_from_decode: Final = msgspec.msgpack.Decoder(FromDecode)
_from_prefill: Final = msgspec.msgpack.Decoder(FromPrefill)


def encode_message(message: FromDecode | FromPrefill) -> bytes:
    """The body of a frame."""
    return _encoder.encode(message)


def read_from_decode(body: bytes) -> FromDecode:
    """A message of decode.

    Raises:
        ProtocolError: it is not one.
    """
    try:
        message: FromDecode = _from_decode.decode(body)
    except UNREADABLE as error:
        raise ProtocolError(f"not a message of decode: {error}") from error
    _check(message)
    return message


def read_from_prefill(body: bytes) -> FromPrefill:
    """A message of prefill.

    Raises:
        ProtocolError: it is not one.
    """
    try:
        message: FromPrefill = _from_prefill.decode(body)
    except UNREADABLE as error:
        raise ProtocolError(f"not a message of prefill: {error}") from error
    _check(message)
    return message


def _check(message: FromDecode | FromPrefill) -> None:
    """Refuse numbers that no field may have.

    Raises:
        ProtocolError: the room has not 63 bits, or the text of a failure is too long.
    """
    if not isinstance(message, HandoffPing) and not 0 <= message.room <= ROOM_MAX:
        raise ProtocolError(f"room {message.room} is not within 63 bits")
    if isinstance(message, Abort | Failed):
        failure = message.failure
        if len(failure.message) > TEXT_MAX or len(failure.code) > TEXT_MAX:
            raise ProtocolError("the text of a failure is too long")
