"""The nodes of a cluster, which are followed as they appear in its store and leave it.

The Conductor reads the store only; it is no node. A record names the admin API of its node; all
else is read there, as of a registered node (:mod:`conductor.front.nodes`). A node that was
registered by hand, under its name or as the process of the record, stays as it was registered.
"""

import asyncio
import logging
from typing import Final, NamedTuple, get_args

from conductor.config import ConductorConfig, NodeEntry, check_url
from conductor.front.answers import MembershipState
from conductor.front.auth import checked_token, read_token_file
from conductor.front.guarding import Guard
from conductor.front.nodes import NODES_MAX, Nodes
from kvstore.cluster.configured import check_store, store_servers
from kvstore.cluster.records import SCHEME, NodeRecord
from kvstore.cluster.store import RecordStore
from kvstore.cluster.stores import open_store
from kvstore.cluster.watched import WatchedMembership, WatchState
from kvstore.protocol.errors import printable

_log = logging.getLogger(__name__)


class LeftOut(NamedTuple):
    """Why a node of the cluster is not followed, and what to do about it."""

    why: str
    do: str


_NO_ADMIN: Final = LeftOut(
    "its record names no admin API that other machines reach",
    "set http.host or http.advertise at the node; or register it with `id` and `events`",
)
_BAD_ADMIN: Final = LeftOut(
    "the admin API in its record is no URL http://host:port", "set http.advertise at the node"
)
_OTHER_SCHEME: Final = LeftOut(
    "it computes keys in another way than this Conductor", "use one version of both"
)
_TOO_MANY: Final = LeftOut(
    f"there are more than {NODES_MAX} nodes", "use a Conductor for each part of them"
)


class ClusterNodes:
    """Follows the nodes that the store of a cluster tells of; none with the membership ``local``.

    Args:
        config: its ``cluster`` says which one.
        nodes: get those that are found.
        guard: keeps a failure to take nodes up from what else is done.
        store: has them; None = the one in ``config``.

    Attributes:
        left_out: nodes of the store that are not followed, by name.

    Raises:
        ConfigError: the store, or a file with a token, cannot be used by this process.
    """

    def __init__(
        self, config: ConductorConfig, nodes: Nodes, guard: Guard, store: RecordStore | None
    ) -> None:
        cluster = config.cluster
        self.left_out: dict[str, LeftOut] = {}
        self._cluster = cluster
        self._nodes = nodes
        self._guard = guard
        self._wake = asyncio.Event()
        self._read_token = self._token("read_token_file", cluster.read_token_file)
        self._events_token = self._token("events_token_file", cluster.events_token_file)
        self._operate_token = self._token("operate_token_file", cluster.operate_token_file)
        self._membership: WatchedMembership | None = None
        self._said = ""
        if cluster.membership != "local":
            if store is None:
                section = getattr(config, cluster.membership)
                user = f"cluster.membership={cluster.membership}"
                check_store(cluster.membership, section, user)
                store = open_store(cluster.membership, store_servers(section), cluster.name)
            self._membership = WatchedMembership(store, self.look)

    def look(self) -> None:
        """What the store tells, or what is registered by hand, may have changed."""
        self._wake.set()

    async def run(self) -> None:
        """Follow the nodes until cancelled."""
        if self._membership is None:
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._membership.run(), name="membership of the cluster")
            while True:
                await self._wake.wait()
                self._wake.clear()
                with self._guard.turn("nodes of the cluster"):
                    self._say(self._membership)
                    self._compare(self._membership)

    def state(self) -> MembershipState | None:
        """The standing of the membership, for operators; None without one."""
        if self._membership is None:
            return None
        standing = self._membership.standing
        return MembershipState(
            kind=self._cluster.membership, cluster=self._cluster.name,
            state=standing.state, field=standing.field, why=standing.why,
            nodes=sorted(self._membership.nodes), unreadable_records=standing.unreadable,
        )  # fmt: skip

    def gauges(self) -> dict[str, dict[tuple[str, ...], float]]:
        """State of the membership, for metrics; all 0 without one."""
        membership = self._membership
        standing = membership.standing if membership is not None else None
        unreadable = standing.unreadable if standing is not None else 0
        return {
            "membership_state": {
                (state,): float(standing is not None and state == standing.state)
                for state in get_args(WatchState)
            },
            "membership_nodes": {(): float(len(membership.nodes) if membership is not None else 0)},
            "membership_left_out": {(): float(len(self.left_out) + unreadable)},
        }

    def _compare(self, membership: WatchedMembership) -> None:
        """Follow those who are in the store, and nobody who has left it."""
        registered = [node for node in self._nodes if node.source == "registered"]
        names = {node.id for node in registered}
        boots = {node.view.boot for node in registered if node.view is not None}
        members = {
            name: record
            for name, record in membership.nodes.items()
            if name not in names and record.boot.hex() not in boots
        }
        followed = {node.id for node in self._nodes if node.source == "membership"}
        for name in followed - members.keys():
            self._nodes.remove(name)
            _log.info("node %s has left cluster %s", name, self._cluster.name)
        left_out = {}
        for name, record in sorted(members.items()):
            why = self._take_up(record)
            if why is not None:
                left_out[name] = why
                self._nodes.remove(name)
                if self.left_out.get(name) != why:
                    _log.warning("node %s is not followed: %s; %s", name, *why)
            elif name not in followed:
                _log.info("node %s is in cluster %s at %s", name, self._cluster.name, record.admin)
        self.left_out = left_out

    def _take_up(self, record: NodeRecord) -> LeftOut | None:
        """Follow a node; returns why it cannot be."""
        if record.scheme != SCHEME:
            return _OTHER_SCHEME
        if not record.admin:
            return _NO_ADMIN
        try:
            check_url(record.admin)
        except ValueError:
            return _BAD_ADMIN
        entry = NodeEntry(
            id=record.name, url=record.admin, read_token=self._read_token,
            operate_token=self._operate_token, events_token=self._events_token,
        )  # fmt: skip
        return None if self._nodes.take_up(entry) else _TOO_MANY

    def _say(self, membership: WatchedMembership) -> None:
        standing = membership.standing
        if standing.state == self._said:
            return
        self._said = standing.state
        level = logging.WARNING if standing.state == "away" else logging.INFO
        kind = self._cluster.membership
        _log.log(level, "membership in %s is %s %s", kind, standing.state, printable(standing.why))

    @staticmethod
    def _token(field: str, path: str) -> str | None:
        key = f"cluster.{field}"
        text = read_token_file(key, path)
        return checked_token(f"{key}={path}", text).decode() if text else None
