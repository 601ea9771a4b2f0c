"""Announces the pages of this node to a directory that nodes share.

It follows the node's own events like those of any other node: with snapshot, replay and gaps.
"""

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from time import monotonic_ns
from typing import Final

from kvstore.cluster.announcing import (
    Announcing,
    ChangeEntries,
    Claim,
    PageAnnouncement,
    Renew,
    Step,
    WaitUntil,
    Withdraw,
)
from kvstore.cluster.entries import EntryNames
from kvstore.cluster.messages import DirectoryReport
from kvstore.cluster.page_store import DirectoryFault, PageStore
from kvstore.index.blocks import Workspace
from kvstore.index.control import Source, SourceBounds
from kvstore.index.followers import Follower
from kvstore.process.faults import Faults

_log = logging.getLogger(__name__)

BOUNDS: Final = SourceBounds(replay_s=5.0, verify_s=5.0, foreign_blocks=1)
LOOK_S: Final = 0.005
"""Seconds between checks for something to announce."""
LEAVE_S: Final = 1.0


class PageAnnouncer:
    """Announces the pages of one node until it is cancelled.

    Args:
        store: of the entries; not shared.
        source: the node's own events.
        cluster: name of the cluster.
        boot: boot id of the node.
        bounds: limits of following.
    """

    def __init__(
        self, store: PageStore, source: Source, cluster: str, boot: bytes,
        bounds: SourceBounds = BOUNDS,
    ) -> None:  # fmt: skip
        self._store = store
        self._source = source
        self._boot = boot
        self._bounds = bounds
        self._names = EntryNames(cluster)
        self._space = Workspace(0)
        self._announcing = Announcing(self._begin)
        self._faults = Faults(_log, "the directory in Redis")
        self._following: dict[
            str, tuple[Follower[PageAnnouncement], asyncio.Task[None]]
        ] = {}  # by token

    def _begin(self) -> PageAnnouncement:
        return PageAnnouncement(secrets.token_hex(8), self._names, self._space)

    async def run(self) -> None:
        """Announce until cancelled; after that, the node's pages no longer count."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    step = self._announcing.next(monotonic_ns())
                    try:
                        await self._carry_out(step)
                    except DirectoryFault as fault:
                        self._faults.note(fault.cause, str(fault))
                        self._announcing.failed(fault.cause, monotonic_ns())
                    self._follow(tasks)
        finally:
            await self._leave()

    def report(self) -> DirectoryReport:
        """The state of the announcements."""
        state = self._announcing
        following = [follower for follower, _ in self._following.values()]
        faults = Counter(state.faults)
        for follower in following:
            faults.update(follower.faults.counts)
        return DirectoryReport(
            current=state.present is not None and not state.trouble, announced=state.pages,
            waiting=sum(one.waiting for one in state.announcements),
            announcements=state.completed, faults=dict(faults),
            why="; ".join(one.why for one in following if one.why), trouble=state.trouble,
        )  # fmt: skip

    async def _carry_out(self, step: Step) -> None:
        """Carry out one step.

        Raises:
            DirectoryFault: that failed.
        """
        state = self._announcing
        match step:
            case Claim(announcement=one):
                number = await self._store.claim(self._source.worker, self._boot, one.token)
                state.claimed(one, number)
            case ChangeEntries(one):
                paced, batch = one.is_paced, one.batch
                changes = one.next_changes()
                done = await self._store.change(one.number, one.token, batch, changes)
                state.changed(one, monotonic_ns(), done=done, paced=paced)
            case Renew(numbers):
                lost = await self._store.renew(numbers)
                state.renewed(lost, monotonic_ns())
            case Withdraw(number, token):
                await self._store.withdraw(number, token)
                state.withdrawn()
            case WaitUntil(until_ns=until_ns):
                await asyncio.sleep(min(LOOK_S, max(0, until_ns - monotonic_ns()) / 1e9))

    def _follow(self, tasks: asyncio.TaskGroup) -> None:
        """Follow the events once for each active announcement."""
        wanted = {one.token: one for one in self._announcing.announcements}
        for token in self._following.keys() - wanted.keys():
            _, task = self._following.pop(token)
            task.cancel()
        for token in wanted.keys() - self._following.keys():
            follower = Follower(self._source, wanted[token], self._bounds)
            self._following[token] = (follower, tasks.create_task(follower.run()))

    async def _leave(self) -> None:
        """Withdraw the numbers, within a short time limit."""
        with contextlib.suppress(DirectoryFault, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                for one in self._announcing.announcements:
                    await self._store.withdraw(one.number, one.token)
