"""Which nodes have which pages.

A directory is a hint: the node that reads a page checks its digest, and a page that is not where
the directory says is a miss.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from kvstore.cluster.membership import Membership, known_first
from kvstore.cluster.records import NodeRecord
from kvstore.config.cluster import NODES_MAX
from kvstore.index.apply import shard_name
from kvstore.index.control import IndexSettings, Source, SourceBounds
from kvstore.index.credentials import PeerCredentials
from kvstore.index.directory import PageHolder
from kvstore.index.face import PrefixIndex
from kvstore.index.runs import PartNeed, PrefixNeeds
from kvstore.index.scope import key_chains, scope_seed
from kvstore.index.table import IndexReader
from kvstore.index.tunnel import SCHEME as PEER
from kvstore.protocol.counts import FollowedPeer, PeerDirectoryCounts
from kvstore.protocol.page import KEY_BYTES, PrefixKey, ShardSpec, SpaceIdentity
from kvstore.state.remote.jobs import Holding, Locate

MEDIA: Final = ("CPU", "STORAGE")
"""Media from which a node lends pages, as its events name them."""
TURN_KEYS: Final = 4_096
"""Keys that are looked up in one turn of the loop."""
_SPACES_MAX: Final = 1_024
_SHAPES_MAX: Final = 256
"""Maximum spaces and shard lists that are kept prepared."""

_BOUNDS: Final = SourceBounds(replay_s=5.0, verify_s=5.0, foreign_blocks=1)
"""Nodes have no blocks with hashes of their own."""

Found = Callable[[int, Sequence[Holding]], None]
"""The number of a query, and its answer."""


def index_settings(pages_max: int) -> IndexSettings:
    """The settings of the index process of a :class:`PeersDirectory`.

    Args:
        pages_max: maximum entries.
    """
    return IndexSettings(pages_max, _BOUNDS)


class PeersDirectory:
    """The directory that each node builds from the events of all others, in an index process.

    Args:
        index: not shared.
        membership: the nodes to follow.
        credentials: for connections to the others; the node with this name is not followed.

    Attributes:
        refused: nodes that are not followed because there are too many.
    """

    def __init__(
        self,
        index: PrefixIndex,
        membership: Membership,
        credentials: PeerCredentials,
    ) -> None:
        self.refused: list[str] = []
        self._index = index
        self._membership = membership
        self._credentials = credentials
        self._peers: list[str] = []
        self._followed: dict[str, Source] = {}
        self._table: IndexReader | None = None
        self._seeds: dict[SpaceIdentity, int] = {}
        self._needs: dict[tuple[ShardSpec, ...], PrefixNeeds] = {}

    async def run(self) -> None:
        """Follow the other nodes until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._index.run(), name="index of peers")
            async with aclosing(self._membership.watch()) as changes:
                async for nodes in changes:
                    self._follow(nodes)

    def locate(self, asked: Locate, found: Found) -> None:
        """Look pages up in the index's table; takes well below a millisecond.

        Args:
            asked: the pages.
            found: called once: with the nodes that have at least one page, the longest prefix
                first. If nothing is known, no node has one. It is called at once, unless a node has
                the first :data:`TURN_KEYS`; the others are looked up in later turns.
        """
        if any(shard.window_pages for shard in asked.shards):
            found(asked.number, self._holdings(asked))  # the last pages count: it cannot be split
        else:
            self._locate_from(0, asked, {}, found)

    def _locate_from(self, at: int, asked: Locate, before: dict[str, int], found: Found) -> None:
        """Look up further pages of a query.

        Args:
            at: number of pages looked up already.
            asked: the query.
            before: nodes that have at least one of these pages, and how many.
            found: see :meth:`locate`.
        """
        end = at + TURN_KEYS
        part = replace(asked, keys=asked.keys[at * KEY_BYTES : end * KEY_BYTES])
        for peer, pages in self._holdings(part):
            if before.get(peer, 0) == at:
                before[peer] = at + pages
        if end * KEY_BYTES < len(asked.keys) and end in before.values():
            loop = asyncio.get_running_loop()
            loop.call_soon(self._locate_from, end, asked, before, found)
            return
        holdings = [Holding(peer, pages) for peer, pages in before.items()]
        holdings.sort(key=lambda one: -one.pages)
        found(asked.number, holdings)

    def holders(
        self, identity: SpaceIdentity, shards: Sequence[ShardSpec], key: PrefixKey,
        found: Callable[[dict[str, list[int]]], None],
    ) -> None:  # fmt: skip
        """Look up which nodes have one page.

        Args:
            identity: its space.
            shards: the shards.
            key: its key.
            found: called once, at once: node → positions in ``shards`` of the shards that it has.
        """
        held: dict[str, list[int]] = {}
        for at, shard in enumerate(shards):
            for one in self._holdings(Locate(0, identity, (shard,), key)):
                held.setdefault(one.peer, []).append(at)
        found(held)

    def stats(self) -> PeerDirectoryCounts:
        """The state of each node's index, and numbers of pages."""
        report = self._index.present().report
        peers = {
            one.worker: FollowedPeer(
                current=one.current, why=one.why, pages=one.pages, lag_s=one.lag_s,
                faults=one.faults,
            )
            for one in report.workers
        }  # fmt: skip
        return PeerDirectoryCounts(
            peers=peers, refused=list(self.refused), entries=report.entries,
            entries_max=report.entries_max, left_out=report.dropped,
            resident_bytes=report.resident_bytes, restarts=self._index.restarts,
        )  # fmt: skip

    def _follow(self, nodes: Mapping[str, NodeRecord]) -> None:
        others = known_first(nodes, self._credentials.node, self._followed)
        self.refused = others[NODES_MAX - 1 :]
        sources = {name: self._source(nodes[name]) for name in others[: NODES_MAX - 1]}
        for name in self._followed.keys() - sources.keys():
            self._index.unfollow(name)
        for name, source in sources.items():
            if self._followed.get(name) != source:
                self._index.follow(source)
        self._followed = sources
        self._peers = list(sources)
        self._needs.clear()

    def _source(self, node: NodeRecord) -> Source:
        endpoint = PEER + node.endpoint
        return Source(
            worker=node.name, domain=f"node/{node.name}", endpoint=endpoint,
            replay_endpoint=endpoint, peer=self._credentials, is_node=True,
        )  # fmt: skip

    def _holdings(self, asked: Locate) -> list[Holding]:
        table = self._index.present().table
        if table is not self._table:  # another secret, and other numbers of holders
            self._table = table
            self._seeds.clear()
            self._needs.clear()
        if table is None or not self._peers or not asked.keys:
            return []
        chains = key_chains(asked.keys, self._seed(table, asked.identity))
        pages = table.match([chains], self._needs_of(asked.shards))[0].tolist()
        found = [Holding(peer, n) for peer, n in zip(self._peers, pages, strict=True) if n]
        found.sort(key=lambda one: -one.pages)
        return found

    def _seed(self, table: IndexReader, identity: SpaceIdentity) -> int:
        """The seed of a space's chain values in this table."""
        seed = self._seeds.get(identity)
        if seed is None:
            if len(self._seeds) >= _SPACES_MAX:
                self._seeds.clear()
            seed = scope_seed(table.secret, "keys", identity.digest.hex())
            self._seeds[identity] = seed
        return seed

    def _needs_of(self, shards: tuple[ShardSpec, ...]) -> PrefixNeeds:
        """The requirements on each node for some shards."""
        needs = self._needs.get(shards)
        if needs is None:
            if len(self._needs) >= _SHAPES_MAX:
                self._needs.clear()
            needs = self._needs[shards] = PrefixNeeds(
                [[_part(peer, shard) for shard in shards] for peer in self._peers]
            )
        return needs


def _part(peer: str, shard: ShardSpec) -> PartNeed:
    """One shard at one node, in any medium."""
    name = shard_name(0, shard.digest.hex())
    return PartNeed(
        [PageHolder(peer, medium, name, 0) for medium in MEDIA], shard.window_pages or None
    )
