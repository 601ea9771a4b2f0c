"""A node that stops at gates while it reads pages of others, a little at a time.

Run as ``python -m tests.cluster_processes.gated GATES [ARGUMENT OF kvstore-server]...``. A named
pipe in the folder GATES is a gate that is closed for whoever comes first: ``lease``: pages are
leased, and not yet asked for; ``read``: the first one has been received. Who stands there has
renamed the pipe to ``NAME.held``, and goes on after a line in it.
"""

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstore.server import daemon
from kvstore.transport.reader import PageReader
from kvstore.transport.streams import PlainStream, TlsStream

PAGE_BYTES_MIN = 64 << 10
RECEIVE_BYTES = 64 << 10  # the kernel must not receive all pages while the node stands at a gate


def stand(gates: Path, name: str) -> None:
    """Wait at a gate, if it is closed."""
    held = gates / f"{name}.held"
    try:
        (gates / name).rename(held)
    except FileNotFoundError:
        return
    with held.open() as opened:  # until somebody opens it for writing
        opened.readline()


def main() -> int:
    gates = Path(sys.argv[1])
    ask = PageReader._ask

    def gated_ask(self: PageReader, part: Any, stream: Any) -> None:
        stand(gates, "lease")
        ask(self, part, stream)

    def gate_receive(kind: type[PlainStream] | type[TlsStream]) -> None:
        take, receive = kind.__init__, kind.receive

        def narrow(self: Any, connection: socket.socket) -> None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
            take(self, connection)

        def gated(self: Any, buffers: Sequence[memoryview], deadline_ns: int) -> None:
            receive(self, buffers, deadline_ns)
            if sum(map(len, buffers)) >= PAGE_BYTES_MIN:
                stand(gates, "read")

        kind.__init__ = narrow  # type: ignore[method-assign]
        kind.receive = gated  # type: ignore[method-assign]

    PageReader._ask = gated_ask  # type: ignore[method-assign]
    gate_receive(PlainStream)
    gate_receive(TlsStream)
    return daemon.main(sys.argv[2:])


if __name__ == "__main__":
    os.environ["PYTHONUNBUFFERED"] = "1"
    raise SystemExit(main())
