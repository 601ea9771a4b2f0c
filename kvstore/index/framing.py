"""The byte format between the index process and the process that started it.

Messages are msgpack with a length of four bytes before them, over a socket pair. The process that
started the index sends :class:`StartIndex` first. The socket's end is the end of the index process.
"""

import asyncio
from typing import Final

import msgspec

from kvstore.index.control import Command, Report
from kvstore.index.reading import read

MESSAGE_BYTES_MAX: Final = 64 << 20
"""A report about 1,024 workers has less than one MiB; an expected prompt 8 bytes a block."""
_LENGTH_BYTES: Final = 4
_COMMANDS: Final[msgspec.msgpack.Decoder[Command]] = msgspec.msgpack.Decoder(Command)
_REPORTS: Final[msgspec.msgpack.Decoder[Report]] = msgspec.msgpack.Decoder(Report)
_ENCODER: Final = msgspec.msgpack.Encoder()


def framed(message: Command | Report) -> bytes:
    """One message with its length."""
    body = _ENCODER.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


async def next_command(reader: asyncio.StreamReader) -> Command:
    """Wait for the next command.

    Raises:
        EOFError: the other process has ended.
        UnreadableError: this is no command.
    """
    return read(_COMMANDS.decode, await _body(reader))


async def next_report(reader: asyncio.StreamReader) -> Report:
    """Wait for the next report; raises the same as :func:`next_command`."""
    return read(_REPORTS.decode, await _body(reader))


async def _body(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(_LENGTH_BYTES)
    size = int.from_bytes(head, "little")
    if size > MESSAGE_BYTES_MAX:
        raise EOFError(f"a message of {size} bytes")
    return await reader.readexactly(size)
