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
from typing import Final

import uvloop

from kvstore.index.control import StartIndex
from kvstore.index.framing import framed, next_command
from kvstore.index.memory import TableMemory
from kvstore.index.reading import UnreadableError
from kvstore.index.service import IndexService
from kvstore.process.collector import spare_the_old

_REPORT_S: Final = 0.25


async def _serve(memory: int, control: socket.socket) -> None:
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
            while True:
                writer.write(framed(service.report()))
                await writer.drain()
                await asyncio.sleep(_REPORT_S)

    async with asyncio.TaskGroup() as tasks:
        background = [tasks.create_task(service.run()), tasks.create_task(report())]
        try:
            while True:
                service.obey(await next_command(reader))
        except (OSError, EOFError, UnreadableError):
            for task in background:
                task.cancel()


def main() -> int:
    """Serve until the socket is closed.

    Returns:
        Exit status.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spare_the_old()
    memory, control = (int(argument) for argument in sys.argv[1:])
    uvloop.run(_serve(memory, socket.socket(fileno=control)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
