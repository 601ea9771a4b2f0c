"""The transports through which pages of another node can be read; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstore.protocol import wire
from kvstore.protocol.endpoint import is_endpoint


@dataclass(frozen=True, slots=True)
class Way:
    """A transport through which leased pages can be read.

    Attributes:
        transport: its name.
        endpoint: of the other node's transport.
        addresses: of the pages there, 8 bytes each; empty = unknown.
    """

    transport: str
    endpoint: str
    addresses: bytes


def reached(endpoint: str, host: str) -> str:
    """An endpoint reported by another node, with the host of that node."""
    return f"{host}{endpoint}" if endpoint.startswith(":") else endpoint


def offered(own: Sequence[str], advertised: Mapping[str, str], host: str) -> dict[str, str]:
    """Endpoint of each transport of both nodes, the preferred one first."""
    return {name: reached(advertised[name], host) for name in own if advertised.get(name)}


def ways_of(lent: wire.Lent, endpoints: Mapping[str, str], host: str) -> tuple[Way, ...]:
    """The ways to the pages of a lease, the preferred one first.

    Addresses of the pages behind an endpoint that is none count as unknown.
    """
    ways: list[Way] = []
    for name, known in endpoints.items():
        told, places = lent.places.get(name, (known, b""))
        at = reached(told, host)
        ways.append(Way(name, at, places if is_endpoint(at) else b""))
    return tuple(ways)
