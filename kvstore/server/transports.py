"""The transports of a node, and the memory that one of them lets peers read without a ticket."""

import asyncio
import logging
import ssl
from collections.abc import Collection, Sequence
from typing import Final

from kvstore.config.addresses import read_address
from kvstore.config.cluster import ClusterConfig
from kvstore.process.faults import Faults
from kvstore.protocol.errors import ConfigError, InvalidArgument, TierUnavailable, reason
from kvstore.state.tree.slots import SlotTable
from kvstore.tier.host import HostMemory
from kvstore.transport.base import Transport
from kvstore.transport.mooncake import MooncakeTransport
from kvstore.transport.tcp import TcpTransport

_log = logging.getLogger(__name__)

TURN_S: Final = 0.2
"""Between two looks for memory that a tenant has got."""
EXTENTS_A_TURN: Final = 32
"""Each is mapped here, and again in the processes of the transport."""


def open_transports(
    cluster: ClusterConfig, server: ssl.SSLContext | None, client: ssl.SSLContext | None
) -> list[Transport]:
    """Open the transports of ``cluster.transports``, the preferred one first.

    Args:
        cluster: the settings.
        server: for connections of peers; None = no TLS.
        client: for connections to peers; None = no TLS.

    Raises:
        ConfigError: an address cannot be used, or there is no device.
    """
    opened: list[Transport] = []
    try:
        for name in cluster.transports:
            if name == "mooncake":
                host = read_address(cluster.transfer_listen).host
                opened.append(
                    MooncakeTransport(
                        host, cluster.in_flight_bytes_max, protocol=cluster.mooncake_protocol
                    )
                )
            else:
                opened.append(
                    TcpTransport(
                        cluster.transfer_listen, cluster.in_flight_bytes_max,
                        server=server, client=client,
                    )
                )  # fmt: skip
    except (ConfigError, InvalidArgument) as error:
        for transport in opened:
            transport.close()
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"cluster.{error}") from error
    return opened


class Registration:
    """Registers the memory of some tenants with the transports, a little at a time.

    An extent belongs to one tenant for as long as it has its number, so others' pages are never in
    registered memory.

    Args:
        memory: of the slots.
        slots: says whose each extent is.
        transports: transports of the node.
        tenants: whose memory is registered.

    Attributes:
        faults: extents that could not be registered yet, by cause.
    """

    def __init__(
        self, memory: HostMemory, slots: SlotTable, transports: Sequence[Transport],
        tenants: Collection[str],
    ) -> None:  # fmt: skip
        self.faults = Faults(_log, "registration of memory")
        self._memory = memory
        self._slots = slots
        self._transports = transports
        self._tenants = frozenset(tenants)
        #: Registered extents → address.
        self._known: dict[int, int] = {}
        memory.leaving = self.left

    async def run(self) -> None:
        """Register what there is to register until cancelled."""
        while self._tenants:
            self.step()
            await asyncio.sleep(TURN_S)

    def step(self) -> None:
        """Register some of the extents that these tenants have got."""
        new = [
            one.number
            for one in self._slots.extents
            if one.domain in self._tenants and one.number not in self._known
        ]
        for number in new[:EXTENTS_A_TURN]:
            descriptor = self._memory.descriptor(number)
            if descriptor is None:
                continue  # its memory is being made
            try:
                address = self._memory.address(number)
            except TierUnavailable:
                continue
            self._register(number, address, descriptor)

    def _register(self, number: int, address: int, descriptor: int) -> None:
        """Register one extent with every transport; with none if that fails, then later again."""
        done: list[Transport] = []
        try:
            for transport in self._transports:
                transport.register(address, self._slots.extent_bytes, descriptor)
                done.append(transport)
        except OSError as error:  # no descriptor is left
            for transport in done:
                transport.unregister(address)
            self.faults.note("memory", f"an extent is registered later: {reason(error)}")
        else:
            self._known[number] = address

    def left(self, number: int) -> None:
        """The memory of an extent goes."""
        address = self._known.pop(number, None)
        if address is not None:
            for transport in self._transports:
                transport.unregister(address)
