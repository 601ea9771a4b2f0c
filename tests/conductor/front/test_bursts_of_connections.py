"""Goal: clients that come at once are all connected at once."""

import select
import socket
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

from tests.conductor.fakes import FakeEngine, serving
from tests.loops import in_loop

READY_MS = 500
"""What a busy machine may add; who is dropped finds no place before the loop accepts others."""
CLIENTS = min(1_000, int(Path("/proc/sys/net/core/somaxconn").read_text()))


@in_loop
async def test_a_burst_of_connections_waits_in_the_kernel_and_none_is_dropped() -> None:
    async with serving(FakeEngine("e", "mixed")) as client:
        at = urlsplit(client.url)
        poll = select.poll()
        with ExitStack() as undo:
            for _ in range(CLIENTS):  # the loop accepts none of them meanwhile
                one = undo.enter_context(socket.socket())
                one.setblocking(False)
                one.connect_ex((at.hostname, at.port))
                poll.register(one, select.POLLOUT)
            left = CLIENTS
            while found := poll.poll(READY_MS) if left else []:
                for descriptor, _ in found:
                    poll.unregister(descriptor)
                left -= len(found)
            assert left == 0, "some must ask again, after a second, and again"
