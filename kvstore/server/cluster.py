"""A node's side towards the other nodes of its cluster: all of its parts in one object.

The node listens for others before its engines are served, and the engines of this node are served
whether another node can be reached or not.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from kvstore.cluster.asked import AskedDirectory
from kvstore.cluster.configured import check_stores, store_servers
from kvstore.cluster.copier import Copier
from kvstore.cluster.directory import PeersDirectory
from kvstore.cluster.greeting import LocalNode
from kvstore.cluster.membership import LocalMembership, StoreMembership
from kvstore.cluster.messages import ChildSettings, DirectorySettings, StorePlace
from kvstore.cluster.records import SCHEME, NodeRecord, NodeState
from kvstore.cluster.serving import EventTunnels
from kvstore.cluster.side import Peers
from kvstore.cluster.talk import ChildTalk, index_process
from kvstore.cluster.tls import client_context, credentials, server_context
from kvstore.config import ServerConfig
from kvstore.config.addresses import Address, is_loopback, is_wildcard, read_address
from kvstore.node.desk import Desk
from kvstore.process.logs import event
from kvstore.protocol.counts import ClusterCounts
from kvstore.protocol.page import PrefixKey, ShardSpec, SpaceIdentity
from kvstore.server.loans import Loans
from kvstore.server.peers import PeerService, advertised_transports
from kvstore.server.publish import Publication
from kvstore.server.transports import Registration, open_transports
from kvstore.state.remote.jobs import PeerJob, PeerLimits
from kvstore.tier.host import HostMemory

log = logging.getLogger(__name__)


def join(
    config: ServerConfig, desk: Desk, memory: HostMemory, publication: Publication, admin_url: str,
    undo: ExitStack,
) -> "ClusterSide | None":  # fmt: skip
    """Listen for the other nodes of the cluster; None if the node is alone.

    Args:
        config: of the node.
        desk: gets a peer side.
        memory: the memory of the node's slots.
        publication: the node's events, for other nodes.
        admin_url: where the admin API listens over TCP.
        undo: gets a function that ends everything.

    Raises:
        ConfigError: an address or a certificate cannot be used; names its key.
    """
    if not config.cluster.name:
        return None
    side = ClusterSide(config, desk, memory, publication, admin_url)
    undo.callback(side.close)
    side.start()
    event(log, logging.INFO, "listening for other nodes", cluster=config.cluster.name,
          endpoint=side.service.endpoint)  # fmt: skip
    return side


class ClusterSide:
    """A node's peer service, its sessions with other nodes, and its directory of their pages.

    Creating it opens the port for bytes of pages; :meth:`start` does the rest.

    Args:
        config: of the node; ``cluster.name`` is set.
        desk: gets a peer side; other nodes get lines at it.
        memory: the memory of the node's slots.
        publication: the node's events, for other nodes.
        admin_url: where the admin API listens over TCP.

    Raises:
        ConfigError: an address or a certificate cannot be used; names its key.

    Attributes:
        cluster: name of the cluster.
        peers: the desk's peer side.
        service: the peer service.
        state: ``up`` or ``draining``, as other nodes are told.
    """

    def __init__(
        self, config: ServerConfig, desk: Desk, memory: HostMemory, publication: Publication,
        admin_url: str,
    ) -> None:  # fmt: skip
        cluster, node = config.cluster, desk.node
        self.state: NodeState = "up"
        self._state_changed = asyncio.Event()
        assert cluster.name
        self.cluster = cluster.name
        check_stores(config)
        self._local = LocalNode(cluster.name, node.name, node.boot, SCHEME)
        self._client = client_context(cluster)
        server = server_context(cluster)
        self._config = config
        self._credentials = credentials(cluster, node.name)
        self._membership, self._directory = self._members()
        self._tunnels = EventTunnels(publication)
        self._advertise = cluster.advertise
        self._admin_url = admin_url
        self._desk = desk
        self._limits = PeerLimits(cluster.in_flight_bytes_max)
        self._transports = open_transports(cluster, server, self._client)
        self._registration = Registration(
            memory, node.pages.slots, self._transports, cluster.rdma_tenants
        )
        self._loans = Loans(memory, self._transports)
        self.service = PeerService(
            cluster.listen, self._local, self._membership.knows, desk, self._loans,
            self._tunnels.serve_events, server,
        )  # fmt: skip
        self.peers = Peers(
            desk, self._take, node.pages.slots, memory, self._transports, self._directory,
            self._loans.ticket_ended,
        )  # fmt: skip

    def start(self) -> None:
        """Listen for other nodes; from now on the node asks them for what it has not.

        Raises:
            ConfigError: the address cannot be used.
        """
        self.service.listen()
        self._desk.node.join(self._limits)
        self._desk.peers = self.peers

    async def run(self) -> None:
        """Serve the other nodes, and keep sessions with them, until cancelled."""
        await self._membership.join(self._record())
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.service.serve(), name="peer service")
                tasks.create_task(self._registration.run(), name="registration")
                tasks.create_task(self._tell_state(), name="state")
                tasks.create_task(self._directory.run(), name="directory of peers")
                tasks.create_task(
                    self.peers.run(self._local, self._membership, self._client), name="sessions"
                )
        finally:
            await self._membership.leave()

    async def _tell_state(self) -> None:
        """Replace this node's record whenever its state has changed."""
        while True:
            await self._state_changed.wait()
            self._state_changed.clear()
            await self._membership.join(self._record())

    def _record(self) -> NodeRecord:
        """This node, as others reach it."""
        listening = self.service.endpoint
        endpoint = read_address(self._advertise or listening)
        if not endpoint.port:
            endpoint = Address(endpoint.host, read_address(listening).port)
        return NodeRecord(
            name=self._local.name, boot=self._local.boot, endpoint=str(endpoint),
            transports=advertised_transports(self._transports), state=self.state,
            admin=advertised_admin(self._config.http.advertise, self._admin_url, endpoint.host),
        )  # fmt: skip

    def _members(
        self,
    ) -> tuple[LocalMembership | StoreMembership, PeersDirectory | AskedDirectory]:
        """Membership and directory, and the index process that they use."""
        config, cluster, shown = self._config, self._config.cluster, self._credentials
        index = index_process(cluster)
        talk = ChildTalk(index, self._child_settings) if cluster.stores else None
        membership: LocalMembership | StoreMembership
        if cluster.membership == "local" or talk is None:
            places = {name: str(at) for name, at in cluster.others(config.node.name).items()}
            membership = LocalMembership(places)
        else:
            membership = StoreMembership(cluster.membership, talk.tell)
            talk.attach_membership(membership)
        if cluster.directory == "peers" or talk is None:
            return membership, PeersDirectory(index, membership, shown)
        directory = AskedDirectory(index, membership, shown.node, talk.tell)
        talk.attach_directory(directory)
        return membership, directory

    def _child_settings(self) -> ChildSettings:
        """What the index process needs to know; called once the node listens."""
        config, cluster = self._config, self._config.cluster
        place = directory = None
        if cluster.membership != "local":
            servers = store_servers(getattr(config, cluster.membership))
            place = StorePlace(cluster.membership, servers)
        if cluster.directory != "peers":
            directory = DirectorySettings(
                servers=store_servers(getattr(config, cluster.directory)), boot=self._local.boot,
                endpoint=self._record().endpoint,
            )  # fmt: skip
        return ChildSettings(credentials=self._credentials, membership=place, directory=directory)

    def close(self) -> None:
        """End everything; nothing reads or writes the node's memory afterwards."""
        self.service.close()
        self._loans.close()
        for transport in self._transports:
            transport.close()

    def holders(
        self, identity: SpaceIdentity, shards: Sequence[ShardSpec], key: PrefixKey,
        found: Callable[[dict[str, list[int]]], None],
    ) -> None:  # fmt: skip
        """See :meth:`kvstore.cluster.directory.PeersDirectory.holders`."""
        self._directory.holders(identity, shards, key, found)

    @property
    def copier(self) -> Copier:
        """Lets other nodes have pages of this one."""
        return self.peers.copier

    def set_state(self, state: NodeState) -> None:
        """Tell the other nodes; this one serves what it is asked for in any state."""
        self.state = state
        self._state_changed.set()

    def stats(self) -> ClusterCounts:
        """What other nodes there are, what they read here and this node there."""
        return ClusterCounts(
            name=self.cluster, endpoint=self.service.endpoint, state=self.state,
            copies=self.copier.stats(), membership=self._membership.stats(),
            service=self.service.stats(), events=self._tunnels.stats(),
            directory=self._directory.stats(), peers=self.peers.sessions(),
            transfers=self.peers.transfers, transports=self.peers.transports(),
        )  # fmt: skip

    def _take(self) -> list[PeerJob]:
        remote = self._desk.node.remote
        assert remote is not None
        taken = list(remote.jobs)
        remote.jobs.clear()
        return taken


def advertised_admin(advertise: str, listening: str, host: str) -> str:
    """The URL of a node's admin API as other machines reach it; empty if they do not.

    Args:
        advertise: what the configuration says; empty = nothing.
        listening: where it listens, ``http://host:port``.
        host: of the node's peer service, as others reach it.
    """
    if advertise:
        return advertise
    bound, _, port = listening.rpartition("//")[2].rpartition(":")
    at = bound.strip("[]")
    if at == "*" or is_wildcard(at):
        return f"http://{Address(host, int(port))}"
    return "" if is_loopback(at) and not is_loopback(host) else listening
