"""The node's side of the shared directory: queries go to its index process.

The node's process has no client of the directory. If the index process does not answer a query in
time, no node counts as a holder.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from time import monotonic
from typing import Final

import msgspec

from kvstore.cluster.membership import Membership
from kvstore.cluster.messages import AskPages, DirectoryReport, HoldingsFound
from kvstore.cluster.records import NodeRecord
from kvstore.index.face import PrefixIndex
from kvstore.protocol.counts import PeerDirectoryCounts, SharedDirectoryCounts
from kvstore.protocol.page import PrefixKey, ShardSpec, SpaceIdentity
from kvstore.state.remote.jobs import Holding, Locate

OUTSTANDING_MAX: Final = 256
ANSWER_S: Final = 1.0
"""Timeout of a query; a later answer is ignored."""
SILENT_S = 5.0
"""An older report is stale; four reports arrive per second."""


class AskedDirectory:
    """A :class:`kvstore.cluster.directory.PeersDirectory` that asks; for one event loop.

    Args:
        index: runs the process that answers; it indexes nothing itself.
        membership: the nodes that count, in the boot that they are in.
        own: name of this node.
        tell: sends a query to the process; queries sent while it is away are lost.

    Attributes:
        refused: always empty: no node is followed.
    """

    def __init__(
        self, index: PrefixIndex, membership: Membership, own: str, tell: Callable[[AskPages], None]
    ) -> None:
        self.refused: list[str] = []
        self._index = index
        self._membership = membership
        self._own = own
        self._tell = tell
        self._nodes: Mapping[str, NodeRecord] = {}
        self._numbers = 0
        #: Who gets the answer, and when it is too late.
        self._waiting: dict[int, tuple[Callable[[list[Holding]], None], asyncio.TimerHandle]] = {}
        self._report = DirectoryReport()
        self._reported_s = monotonic()
        self._counts: Counter[str] = Counter()
        #: Questions without an answer since the process said something last: it may have them all.
        self._unanswered = 0

    async def run(self) -> None:
        """Run the index process and follow the membership until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._index.run(), name="index of peers")
            async with aclosing(self._membership.watch()) as changes:
                async for nodes in changes:
                    self._nodes = nodes

    def locate(self, asked: Locate, found: Callable[[int, Sequence[Holding]], None]) -> None:
        """Query which nodes have pages; never blocks.

        Args:
            asked: the pages.
            found: called once, with the nodes that have at least one page, the longest prefix
                first; with none if there is no answer within :data:`ANSWER_S`.
        """
        self._ask(asked.identity, asked.shards, asked.keys, partial(found, asked.number))

    def holders(
        self, identity: SpaceIdentity, shards: Sequence[ShardSpec], key: PrefixKey,
        found: Callable[[dict[str, list[int]]], None],
    ) -> None:  # fmt: skip
        """Query which nodes have one page.

        Args:
            identity: its space.
            shards: the shards.
            key: its key.
            found: called once, at once or within :data:`ANSWER_S`: node → positions in ``shards``
                of the shards that it has.
        """
        held: dict[str, list[int]] = {}
        left = len(shards)

        def one(at: int, holdings: list[Holding]) -> None:
            nonlocal left
            for holding in holdings:
                held.setdefault(holding.peer, []).append(at)
            left -= 1
            if not left:
                found({peer: sorted(positions) for peer, positions in held.items()})

        for at, shard in enumerate(shards):
            self._ask(identity, (shard,), key, partial(one, at))
        if not shards:
            found({})

    def heard(self, message: HoldingsFound | DirectoryReport) -> None:
        """A message of the process."""
        self._unanswered = 0
        if isinstance(message, DirectoryReport):
            self._report, self._reported_s = message, monotonic()
            return
        waiting = self._waiting.pop(message.number, None)
        if waiting is None:
            self._counts["late"] += 1
            return
        found, timer = waiting
        timer.cancel()
        found([Holding(peer, pages) for peer, boot, pages in message.holdings
               if pages > 0 and self._counts_as(peer, boot)])  # fmt: skip

    def began(self) -> None:
        """The process was restarted: it knows no queries."""
        self._unanswered = 0
        self._report, self._reported_s = DirectoryReport(), monotonic()
        waiting, self._waiting = self._waiting, {}
        for found, timer in waiting.values():
            timer.cancel()
            found([])

    def stats(self) -> PeerDirectoryCounts:
        """The state of announcements and queries, in the fields of the other directory."""
        report, shared = self._index.present().report, self._report
        if monotonic() - self._reported_s > SILENT_S:
            shared = msgspec.structs.replace(shared, current=False, trouble="silent")
        return PeerDirectoryCounts(
            peers={}, refused=[], entries=report.entries, entries_max=report.entries_max,
            left_out=0, resident_bytes=report.resident_bytes, restarts=self._index.restarts,
            shared=SharedDirectoryCounts(
                current=shared.current, announced=shared.announced, waiting=shared.waiting,
                announcements=shared.announcements, asked=shared.asked, faults=shared.faults,
                why=shared.why, trouble=shared.trouble, outstanding=len(self._waiting),
                unanswered=dict(self._counts),
            ),
        )  # fmt: skip

    def _ask(
        self, identity: SpaceIdentity, shards: Sequence[ShardSpec], keys: bytes,
        found: Callable[[list[Holding]], None],
    ) -> None:  # fmt: skip
        if len(self._waiting) + self._unanswered >= OUTSTANDING_MAX:
            self._counts["overload"] += 1
            found([])
            return
        self._numbers += 1
        number = self._numbers
        timer = asyncio.get_running_loop().call_later(ANSWER_S, self._give_up, number)
        self._waiting[number] = (found, timer)
        named = [(one.digest.hex(), one.window_pages) for one in shards]
        among = {name: one.boot for name, one in self._nodes.items() if name != self._own}
        self._tell(AskPages(number, identity.digest.hex(), named, keys, among))

    def _give_up(self, number: int) -> None:
        found, _ = self._waiting.pop(number)
        self._counts["timeout"] += 1
        self._unanswered += 1
        found([])

    def _counts_as(self, peer: str, boot: bytes) -> bool:
        """Whether it is another node of the cluster, in its current boot."""
        node = self._nodes.get(peer)
        return node is not None and peer != self._own and node.boot in (boot, b"")
