"""A pair of transports over Mooncake, for :class:`kvstore.testing.transport.TransportContract`.

It cannot keep all of the contract: Mooncake has no tickets. So :data:`CHECKS` are fewer. Run it
where nobody else can reach its ports, as in a network namespace.
"""

import os
import select
import socket
import time
from typing import Final

import numpy as np

from kvstore.mover.memory import map_shared, memory_at
from kvstore.testing.transfer_pages import Bytes
from kvstore.testing.transport import IN_FLIGHT_BYTES, WAIT_S, TransportContract
from kvstore.transport.base import Transport
from kvstore.transport.mooncake import MooncakeTransport

NOT_KEPT: Final = (
    "check_only_a_ticket_that_is_open_opens_pages",
    "check_a_ticket_opens_exactly_its_ranges",
    "check_written_pages_can_be_read_where_they_went",
)
"""Whoever reaches the port reads and writes; the last one writes with a revoked ticket too."""
CHECKS: Final = tuple(one for one in TransportContract.CHECKS if one not in NOT_KEPT)
MEMORY_BYTES: Final = 128 << 20


class MooncakePair:
    """A pair over Mooncake's TCP on loopback; see :class:`kvstore.testing.transport.TransportPair`.

    Its memory stays mapped until this process ends.
    """

    def __init__(self) -> None:
        """Open both, register memory, and open a listener that nobody serves."""
        self.owner: Transport = MooncakeTransport("127.0.0.1", IN_FLIGHT_BYTES, protocol="tcp")
        self.reader: Transport = MooncakeTransport(
            "127.0.0.1", IN_FLIGHT_BYTES, protocol="tcp", serves=False
        )
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.silent = f"127.0.0.1:{self._listener.getsockname()[1]}"
        descriptor = os.memfd_create("kvstore-test", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, MEMORY_BYTES)
        address = map_shared(descriptor, MEMORY_BYTES)
        for one in (self.owner, self.reader):
            one.register(address, MEMORY_BYTES, descriptor)
        os.close(descriptor)
        self._memory = np.frombuffer(memory_at(address, MEMORY_BYTES), dtype=np.uint8)
        self._used = 0
        until_s = time.monotonic() + WAIT_S
        while not self.reader.stats()["registered_bytes"] and time.monotonic() < until_s:
            self.wait()

    def memory(self, size: int) -> Bytes:
        """See :class:`kvstore.testing.transport.TransportPair`."""
        first, self._used = self._used, self._used + size
        assert self._used <= MEMORY_BYTES
        return self._memory[first : self._used]

    def now_ns(self) -> int:
        """See :class:`kvstore.testing.transport.TransportPair`."""
        return time.monotonic_ns()

    def wait(self) -> None:
        """See :class:`kvstore.testing.transport.TransportPair`."""
        select.select([self.reader], [], [], 0.05)

    def close(self) -> None:
        """See :class:`kvstore.testing.transport.TransportPair`."""
        self.reader.close()
        self.owner.close()
        self._listener.close()
