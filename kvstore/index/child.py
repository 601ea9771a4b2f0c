"""``python -m kvstore.index.child MEMORY SOCKET``: the index process.

Started by :class:`kvstore.index.process.IndexProcess` only, which passes both as descriptors. It
ends when the socket's other end is closed.
"""

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

import uvloop

from kvstore.index.control import Aside, StartIndex
from kvstore.index.framing import framed, next_command
from kvstore.index.memory import TableMemory
from kvstore.index.reading import UnreadableError
from kvstore.index.service import IndexService
from kvstore.process.collector import spare_the_old

_REPORT_S: Final = 0.25
_UNREAD_BYTES_MAX: Final = 16 << 20
"""A reader that has left this much unread does not read any more."""


class Companion(Protocol):
    """Does something else in the same process, and the same event loop."""

    async def run(self, tell: Callable[[bytes], None]) -> None:
        """Run until cancelled, which must take at most a second.

        Args:
            tell: sends an aside to the parent process; never blocks.
        """
        ...

    def hear(self, body: bytes) -> None:
        """Process an aside.

        Raises:
            UnreadableError: it is not for this companion; the process ends.
        """
        ...


async def _serve(memory: int, control: socket.socket, companion: Companion | None) -> None:
    reader, writer = await asyncio.open_connection(sock=control)
    try:
        begin = await next_command(reader)
    except (OSError, EOFError, UnreadableError):
        return  # who started it has ended already
    assert isinstance(begin, StartIndex)
    settings = begin.settings
    service = IndexService(TableMemory.attach(memory, write=True), settings, secrets.randbits(64))

    async def report() -> None:
        with contextlib.suppress(ConnectionError):  # the end of the socket is seen below
            while not writer.transport.is_closing():
                writer.write(framed(service.report()))
                await writer.drain()
                await asyncio.sleep(_REPORT_S)

    async with asyncio.TaskGroup() as tasks:
        background = [tasks.create_task(service.run()), tasks.create_task(report())]
        if companion is not None:
            background.append(tasks.create_task(companion.run(partial(_tell, writer))))
        try:
            while True:
                command = await next_command(reader)
                if not isinstance(command, Aside):
                    service.obey(command)
                elif companion is not None:
                    companion.hear(command.body)
        except (OSError, EOFError, UnreadableError):
            for task in background:
                task.cancel()


def _tell(writer: asyncio.StreamWriter, body: bytes) -> None:
    """Send an aside; a parent that does not read is abandoned."""
    if writer.transport.is_closing():  # the end is seen by the reader
        return
    if writer.transport.get_write_buffer_size() > _UNREAD_BYTES_MAX:
        writer.transport.abort()
    else:
        writer.write(framed(Aside(body)))


def serve(memory: int, control: int, companion: Companion | None = None) -> None:
    """Serve as the index process until the socket is closed.

    Args:
        memory: descriptor of the table's memory.
        control: descriptor of the socket.
        companion: the additional task of this process; it is cancelled at the end.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spare_the_old()
    uvloop.run(_serve(memory, socket.socket(fileno=control), companion))


def main() -> int:
    """Serve until the socket is closed.

    Returns:
        Exit status.
    """
    memory, control = (int(argument) for argument in sys.argv[1:])
    serve(memory, control)
    return 0


if __name__ == "__main__":
    sys.exit(main())
