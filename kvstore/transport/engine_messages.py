"""Messages between a node and its Mooncake engine processes, over a socket pair.

A message is msgpack with a length of four bytes before it. The descriptor of a :class:`MapMemory`
comes with its bytes. The socket's end is the end of the process.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from kvstore.protocol.errors import ProtocolError
from kvstore.transport.base import PageTransfer

MESSAGE_BYTES_MAX: Final = 64 << 20
"""A read of 65,536 pages has 40 bytes a page."""
_LENGTH_BYTES: Final = 4


class StartEngine(msgspec.Struct, array_like=True, tag=1):
    """First message: ``host`` is reported to peers, ``protocol`` is ``rdma`` or ``tcp``."""

    host: str
    protocol: str


class MapMemory(msgspec.Struct, array_like=True, tag=2):
    """Map and register memory; its descriptor is attached; ``start``: its address at the node.

    ``serial``: of this registration, because addresses are reused.
    """

    start: int
    length: int
    serial: int


class UnmapMemory(msgspec.Struct, array_like=True, tag=3):
    """Unmap memory that no transfer uses any more; there is no answer.

    What is mapped there next waits for this, and has another serial.
    """

    start: int


class ReadPages(msgspec.Struct, array_like=True, tag=4):
    """Read pages from a peer; or ``write`` them to it, without seeds and digests.

    ``local`` and ``remote``: an address a page, 8 bytes each, little-endian: at the node, and in
    the peer's process. ``seeds``: of the digests, likewise. ``digests``: 16 bytes a page.
    """

    number: int
    endpoint: str
    page_bytes: int
    local: bytes
    remote: bytes
    seeds: bytes
    digests: bytes
    write: bool = False

    @classmethod
    def of(cls, transfer: PageTransfer, *, write: bool) -> "ReadPages":
        """The message for a transfer."""
        return cls(
            transfer.number, transfer.endpoint, transfer.page_bytes,
            transfer.local.astype("<u8").tobytes(), transfer.addresses,
            b"" if write else transfer.seeds.astype("<u8").tobytes(),
            b"" if write else transfer.digests, write,
        )  # fmt: skip


class EngineReady(msgspec.Struct, array_like=True, tag=5):
    """The engine listens on ``port``."""

    port: int


class EngineRefused(msgspec.Struct, array_like=True, tag=6):
    """The engine could not be started; ``why`` says what to do."""

    why: str


class MemoryMapped(msgspec.Struct, array_like=True, tag=7):
    """Memory is registered at ``address`` of this process; 0 = it cannot be."""

    start: int
    serial: int
    address: int
    huge_bytes: int = 0
    """In huge pages when it was registered."""


class Contacting(msgspec.Struct, array_like=True, tag=8):
    """The engine contacts a peer for the first time; that may block everything for a minute."""

    number: int


class Contacted(msgspec.Struct, array_like=True, tag=9):
    """It does not any more."""

    number: int


class PagesRead(msgspec.Struct, array_like=True, tag=10):
    """A read or write has ended.

    ``good``: a byte a page, as :class:`kvstore.transport.base.PageArrival`. ``why``: empty if all
    arrived. ``touched``: bytes may still arrive.
    """

    number: int
    good: bytes
    why: str = ""
    touched: bool = False


ToEngine = StartEngine | MapMemory | UnmapMemory | ReadPages
FromEngine = EngineReady | EngineRefused | MemoryMapped | Contacting | Contacted | PagesRead
_DECODER: Final[msgspec.msgpack.Decoder[ToEngine | FromEngine]] = msgspec.msgpack.Decoder(
    ToEngine | FromEngine
)
_ENCODER: Final = msgspec.msgpack.Encoder()


def framed(message: ToEngine | FromEngine) -> bytes:
    """One message with its length."""
    body = _ENCODER.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


class MessageReader:
    """Puts messages together from the bytes of a socket."""

    def __init__(self) -> None:
        self._left = bytearray()

    def feed(self, data: bytes) -> Iterator[ToEngine | FromEngine]:
        """The messages that are complete now.

        Raises:
            ProtocolError: it is none.
        """
        self._left += data
        while len(self._left) >= _LENGTH_BYTES:
            size = int.from_bytes(self._left[:_LENGTH_BYTES], "little")
            if size > MESSAGE_BYTES_MAX:
                raise ProtocolError(f"a message of {size} bytes")
            if len(self._left) < _LENGTH_BYTES + size:
                return
            body = bytes(self._left[_LENGTH_BYTES : _LENGTH_BYTES + size])
            del self._left[: _LENGTH_BYTES + size]
            try:
                yield _DECODER.decode(body)
            except msgspec.MsgspecError as error:
                raise ProtocolError(f"not a message: {error}") from error
