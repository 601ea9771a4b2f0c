"""The process that has the pages which ``python -m bench remote`` reads.

It offers the same memory twice: with the product's transport, and through a bare socket. It prints
where as one line of JSON, and ends when its standard input does.
"""

import json
import socket
import struct
import sys
import threading
import time
from typing import Final

import numpy as np

from bench.measure import prefaulted
from kvstore.transport.base import Range
from kvstore.transport.tcp import TcpTransport

TICKET: Final = b"bench of remotes"
ASKED: Final = struct.Struct("<QQ")
"""Offset and length of what is asked for through the bare socket."""
TICKET_S: Final = 3600.0


def pages_of(address: int, size_bytes: int, page_bytes: int) -> list[tuple[Range, int]]:
    """The range and the address of each page of some memory."""
    offsets = range(0, size_bytes, page_bytes)
    return [(Range(0, 0, offset, page_bytes), address + offset) for offset in offsets]


def send_what_is_asked_for(connection: socket.socket, memory: memoryview) -> None:
    """Send parts of the memory until the other side closes."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        while asked := connection.recv(ASKED.size, socket.MSG_WAITALL):
            offset, length = ASKED.unpack(asked)
            connection.sendall(memory[offset : offset + length])


def main() -> int:
    """Serve until standard input ends."""
    size_bytes, page_bytes = map(int, sys.argv[1:])
    memory = prefaulted(size_bytes)
    transport = TcpTransport("127.0.0.1:0", 1)
    granted = pages_of(memory.ctypes.data, size_bytes, page_bytes)
    transport.grant(TICKET, granted, time.monotonic_ns() + int(TICKET_S * 1e9))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        offer = {"pages": transport.endpoint, "bare": listener.getsockname()[1]}
        sys.stdout.write(json.dumps(offer) + "\n")
        sys.stdout.flush()
        connection, _ = listener.accept()
        thread = threading.Thread(
            target=send_what_is_asked_for, args=(connection, memory.view(np.uint8).data),
            daemon=True,
        )  # fmt: skip
        thread.start()
        sys.stdin.read()
    transport.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
