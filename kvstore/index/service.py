"""One index: followers, expectations and audits that write one table, in one event loop."""

import asyncio
import resource
import time
from typing import Final

import numpy as np

from kvstore.index.audit import Auditor
from kvstore.index.control import (
    Aside,
    Command,
    Expect,
    Follow,
    FollowedWorker,
    IndexReport,
    IndexSettings,
    StartIndex,
    Unexpect,
    Unfollow,
)
from kvstore.index.expected import Expectations
from kvstore.index.feed import PageFeeds, WorkerFeed
from kvstore.index.followers import Follower, Followers
from kvstore.index.memory import TableMemory
from kvstore.index.table import IndexReader
from kvstore.index.writer import IndexWriter

_TURN_S: Final = 0.02
"""Pause before expectations are looked at again, and the next sign of life is given."""


class IndexService:
    """An index, and everything that feeds it."""

    def __init__(self, memory: TableMemory, settings: IndexSettings, secret: int) -> None:
        """Make an empty table in ``memory``; nothing connects yet.

        Args:
            memory: zeroed, for a table of ``settings.entries_max``.
            settings: its settings.
            secret: 64 bits that are unknown to those who choose tokens.
        """
        writer = IndexWriter(memory, settings.entries_max, secret)
        self._settings = settings
        self._pages = PageFeeds(writer, secret)
        self._followers = Followers(self._pages, settings.bounds)
        self._expected = Expectations()
        self._auditor = Auditor(IndexReader(memory.buffer), self._followers)

    def obey(self, command: Command) -> None:
        """Carry out a command."""
        match command:
            case Follow(source):
                self._followers.follow(source)
            case Unfollow(worker):
                self._expected.forget(worker)
                self._followers.drop(worker)
                self._pages.drop(worker)
            case Expect(worker, chains, from_ns, until_ns):
                blocks = np.frombuffer(chains, dtype="<u8")
                self._expected.add(worker, blocks, from_ns, until_ns)
            case Unexpect(Expect(worker, chains, _, until_ns)):
                blocks, now_ns = np.frombuffer(chains, dtype="<u8"), time.monotonic_ns()
                self._expected.withdraw(worker, blocks, until_ns, now_ns)
            case StartIndex() | Aside():
                raise AssertionError(f"{type(command).__name__} is not for the index")

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._followers.run(), name="followers")
            tasks.create_task(self._auditor.run(), name="audits")
            while True:
                now_ns = time.monotonic_ns()
                for change in self._expected.due(now_ns):
                    self._pages.expect(change)
                more = self._pages.advance(now_ns)
                await asyncio.sleep(0 if more else _TURN_S)

    def report(self) -> IndexReport:
        """The present state."""
        pages = self._pages.pages()
        return IndexReport(
            entries=len(self._pages),
            entries_max=self._settings.entries_max,
            sets=self._pages.sets,
            dropped=self._pages.left_out + self._expected.refused,
            expected=len(self._expected),
            resident_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            workers=[self._reported(one, pages) for one in self._followers],
        )

    def _reported(
        self, follower: Follower[WorkerFeed], pages: dict[str, dict[str, int]]
    ) -> FollowedWorker:
        feed, sequence, worker = follower.feed, follower.sequence, follower.source.worker
        audit = self._auditor.last(worker)
        return FollowedWorker(
            worker=worker,
            connected=follower.connected,
            current=follower.current,
            why=follower.why,
            kind=feed.kind,
            block_tokens=feed.block_tokens,
            groups={number: group.last_blocks for number, group in feed.groups.items()},
            pages=pages.get(worker, {}),
            batches=feed.batches,
            lag_s=follower.lag_s,
            restarts=sequence.restarts,
            gaps=sequence.gaps,
            gaps_lost=sequence.gaps_lost,
            skipped=feed.skipped,
            unmapped=feed.unmapped,
            waiting=feed.waiting,
            snapshots=follower.snapshots,
            audited=audit.pages,
            missing=audit.missing,
            stale=audit.stale,
            resyncs=follower.resyncs,
            faults=dict(follower.faults.counts),
        )
