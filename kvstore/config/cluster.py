"""The settings of a node in a cluster."""

import re
from typing import Annotated, Final, Literal

import msgspec

from kvstore.config.addresses import Address, is_loopback, is_wildcard, read_address
from kvstore.config.section import NAME_WORDS, Section

NODES_MAX: Final = 16
"""Nodes of a cluster with the directory ``peers``, this one included: each follows all others."""
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_FILES: Final = ("certificate", "key", "authority")


class ClusterConfig(Section, frozen=True):
    """Other nodes, whose pages this one can use, and which can use its pages.

    Attributes:
        name: name of the cluster; nodes of another one are refused. Empty = this node is alone.
        listen: ``host:port`` at which other nodes ask for pages and follow this node's events;
            beyond loopback it needs certificates.
        transfer_listen: ``host:port`` at which other nodes read the bytes of pages; likewise.
        advertise: ``host:port`` of ``listen`` as other nodes reach it; empty = ``listen``. Port 0 =
            the port of ``listen``.
        membership: where the nodes of the cluster are known: ``local`` = in ``nodes``, ``etcd`` =
            in the etcd of section ``etcd``, ``redis`` = in the Redis of section ``redis``.
        directory: how a node knows which pages the others have: ``peers`` = it follows the events
            of each, 15 at most, ``redis`` = all write it into the Redis of section ``redis``.
        nodes: with the membership ``local``, all nodes of the cluster, 16 at most: entries
            ``NODE=host:port``, the ``node.name`` of each and its ``cluster.listen`` as seen from
            here. This node may be among them.
        certificate: PEM file with this node's certificate; empty = no TLS. Whoever has a
            certificate of the authority can read every tenant's pages.
        key: PEM file with its private key, not encrypted.
        authority: PEM file with the certificate of the authority that signs the certificates of all
            nodes, and no others.
        transports: how the bytes of pages are read from other nodes, the preferred one first: two
            nodes use the first of the reader's that the owner has too. ``mooncake`` needs the extra
            ``mooncake`` or ``mooncake-cuda``; ``tcp`` must be among them.
        rdma_tenants: tenants whose pages may be read through ``mooncake``; pages of other tenants
            are read through ``tcp``. Mooncake has neither tickets nor certificates: whoever reaches
            its ports can read and write all memory of these tenants.
        mooncake_protocol: ``rdma``; ``tcp`` is for tests, and slower than the transport ``tcp``.
        in_flight_bytes_max: the most bytes of pages that are being fetched from other nodes at a
            time.
        index_pages_max: the most entries of the index of other nodes' pages: one for each prefix
            key, whatever number of nodes has it, of 16 bytes or so. Further ones are left out.
    """

    name: Annotated[
        str,
        msgspec.Meta(
            pattern=r"^[A-Za-z0-9._-]{0,64}$(?!\n)", description=f"{NAME_WORDS}, or empty"
        ),
    ] = ""
    listen: str = "127.0.0.1:7400"
    transfer_listen: str = "127.0.0.1:7401"
    advertise: str = ""
    membership: Literal["local", "etcd", "redis"] = "local"
    directory: Literal["peers", "redis"] = "peers"
    nodes: tuple[str, ...] = ()
    certificate: str = ""
    key: str = ""
    authority: str = ""
    transports: tuple[Literal["tcp", "mooncake"], ...] = ("tcp",)
    rdma_tenants: tuple[str, ...] = ()
    mooncake_protocol: Literal["rdma", "tcp"] = "rdma"
    in_flight_bytes_max: Annotated[int, msgspec.Meta(ge=1 << 20)] = 256 << 20
    index_pages_max: Annotated[int, msgspec.Meta(ge=1_024, le=1 << 28)] = 10_000_000

    def __post_init__(self) -> None:
        """Refuse addresses that are none, and a service beyond loopback without certificates."""
        read_nodes(self.nodes)
        for field, unused in (("nodes", ()), ("membership", "local"), ("directory", "peers")):
            if not self.name and getattr(self, field) != unused:
                raise ValueError(
                    f"cluster.{field} needs cluster.name: an empty one means no cluster"
                )
        if self.nodes and self.membership != "local":
            raise ValueError(
                f"cluster.nodes={','.join(self.nodes)} is not used with"
                f" cluster.membership={self.membership}: leave one of the two out"
            )
        self._check_advertise()
        missing = [field for field in _FILES if not getattr(self, field)]
        if missing and len(missing) < len(_FILES):
            given = next(field for field in _FILES if field not in missing)
            needed = " and ".join(f"cluster.{field}" for field in missing)
            path = getattr(self, given)
            raise ValueError(f"cluster.{given}={path} needs {needed} as well")
        for field in ("listen", "transfer_listen"):
            text = getattr(self, field)
            try:
                address = read_address(text)
            except ValueError as error:
                raise ValueError(f"cluster.{field}={text}: {error}") from error
            if self.name and not self.has_certificates and not is_loopback(address.host):
                raise ValueError(
                    f"cluster.{field}={text} is not loopback, so cluster.certificate, cluster.key"
                    " and cluster.authority are needed"
                )
        self._check_transports()

    def _check_transports(self) -> None:
        """Refuse transports that cannot work together, and tenants that none would serve."""
        chosen = ",".join(self.transports)
        if "tcp" not in self.transports or len(set(self.transports)) < len(self.transports):
            raise ValueError(f"cluster.transports={chosen}: each once, and tcp among them")
        if self.rdma_tenants and "mooncake" not in self.transports:
            raise ValueError(
                f"cluster.rdma_tenants={','.join(self.rdma_tenants)} is of no use without mooncake"
                " in cluster.transports"
            )
        if "mooncake" in self.transports and is_wildcard(read_address(self.transfer_listen).host):
            raise ValueError(
                f"cluster.transfer_listen={self.transfer_listen} stands for all addresses: name"
                " the one that other nodes reach, for mooncake tells it to them"
            )

    def _check_advertise(self) -> None:
        """Refuse an address to which other nodes cannot connect."""
        if self.advertise:
            try:
                address = read_address(self.advertise)
            except ValueError as error:
                raise ValueError(f"cluster.advertise={self.advertise}: {error}") from error
            if is_wildcard(address.host):
                raise ValueError(
                    f"cluster.advertise={self.advertise} stands for all addresses: name the one"
                    " that other nodes reach"
                )
            return
        try:
            host = read_address(self.listen).host
        except ValueError:
            return  # said below
        for field in ("membership", "directory"):
            where = getattr(self, field)
            if self.name and where not in ("local", "peers") and is_wildcard(host):
                raise ValueError(
                    f"cluster.{field}={where} needs cluster.advertise, because"
                    f" cluster.listen={self.listen} stands for all addresses"
                )

    @property
    def stores(self) -> dict[Literal["etcd", "redis"], str]:
        """Which sections this one needs: ``etcd`` or ``redis`` → the setting that says so."""
        needed: dict[Literal["etcd", "redis"], str] = {}
        if self.name and self.directory != "peers":
            needed[self.directory] = f"cluster.directory={self.directory}"
        if self.name and self.membership != "local":
            needed[self.membership] = f"cluster.membership={self.membership}"
        return needed

    @property
    def has_certificates(self) -> bool:
        """Whether nodes speak TLS with each other."""
        return bool(self.certificate)

    def others(self, own: str) -> dict[str, Address]:
        """The addresses of all nodes but the one of this name."""
        found = read_nodes(self.nodes)
        found.pop(own, None)
        return found


def read_nodes(entries: tuple[str, ...]) -> dict[str, Address]:
    """Parse ``cluster.nodes``.

    Raises:
        ValueError: an entry is none, or a name or an address is there twice; the message names it.
    """
    found: dict[str, Address] = {}
    for entry in entries:
        name, equals, where = entry.partition("=")
        if not equals or not _NAME.fullmatch(name):
            raise ValueError(
                f"cluster.nodes={entry}: an entry is NODE=host:port, and the name has {NAME_WORDS}"
            )
        try:
            address = read_address(where)
        except ValueError as error:
            raise ValueError(f"cluster.nodes={entry}: {error}") from error
        if not address.port:
            raise ValueError(f"cluster.nodes={entry}: port 0 is no address to connect to")
        if is_wildcard(address.host):
            raise ValueError(
                f"cluster.nodes={entry}: {address.host} is no address to connect to; write the one"
                " at which the other nodes reach it"
            )
        if name in found:
            raise ValueError(f"cluster.nodes={entry}: {name} is there twice")
        if address in found.values():
            raise ValueError(f"cluster.nodes={entry}: another node has this address")
        found[name] = address
    return found
