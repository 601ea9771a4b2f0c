"""The part of a node's index process that uses the directory that nodes share."""

import asyncio
import logging
from collections.abc import Callable
from time import monotonic
from typing import Final

import msgspec

from kvstore.cluster.announcer import PageAnnouncer
from kvstore.cluster.entries import EntryNames, usable_prefixes
from kvstore.cluster.messages import AskPages, DirectoryReport, DirectorySettings, HoldingsFound
from kvstore.cluster.page_store import DirectoryFault, PageStore
from kvstore.cluster.redis_client import redis_clients
from kvstore.cluster.redis_pages import CALL_S, RedisPages
from kvstore.index.control import Source
from kvstore.index.credentials import PeerCredentials
from kvstore.index.tunnel import SCHEME as PEER
from kvstore.process.faults import Faults

_log = logging.getLogger(__name__)

ASKS_MAX: Final = 256
ASK_S: Final = 1.0
"""Timeout of a query."""
_REPORT_S: Final = 0.25


class SharedDirectory:
    """Announces the node's pages, and looks for those of others.

    Args:
        settings: the servers of the directory.
        shown: credentials for the node's own peer service.
        tell: gets answers and reports; never blocks.
    """

    def __init__(
        self, settings: DirectorySettings, shown: PeerCredentials,
        tell: Callable[[HoldingsFound | DirectoryReport], None],
    ) -> None:  # fmt: skip
        self._stores = [
            RedisPages(redis_clients(settings.servers, CALL_S), shown.cluster) for _ in range(2)
        ]
        endpoint = PEER + settings.endpoint
        source = Source(
            worker=shown.node, domain=f"node/{shown.node}", endpoint=endpoint,
            replay_endpoint=endpoint, peer=shown, is_node=True,
        )  # fmt: skip
        self._announcer = PageAnnouncer(self._stores[0], source, shown.cluster, settings.boot)
        self._questions = PageQuestions(self._stores[1], shown.cluster, tell)
        self._tell = tell

    def ask(self, question: AskPages) -> None:
        """Answer a query within :data:`ASK_S`."""
        self._questions.ask(question)

    async def run(self) -> None:
        """Announce, and answer, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._announcer.run(), name="announcer")
                tasks.create_task(self._questions.run(), name="questions")
                while True:
                    report = self._announcer.report()
                    faults = {f"ask_{cause}": n for cause, n in self._questions.faults.items()}
                    self._tell(
                        msgspec.structs.replace(
                            report, asked=self._questions.asked, faults=report.faults | faults
                        )
                    )
                    await asyncio.sleep(_REPORT_S)
        finally:
            for store in self._stores:
                await store.close()


class PageQuestions:
    """Queries which nodes have pages, answered from a store of entries.

    Args:
        store: of the entries.
        cluster: name of the cluster.
        tell: gets the answers.

    Attributes:
        asked: queries that were answered.
    """

    def __init__(
        self, store: PageStore, cluster: str, tell: Callable[[HoldingsFound], None]
    ) -> None:
        self.asked = 0
        self._store = store
        self._names = EntryNames(cluster)
        self._tell = tell
        self._waiting: asyncio.Queue[tuple[float, AskPages]] = asyncio.Queue(ASKS_MAX)
        self._log = Faults(_log, "questions to the directory in Redis")

    @property
    def faults(self) -> dict[str, int]:
        """Queries without a real answer, by cause."""
        return dict(self._log.counts)

    def ask(self, question: AskPages) -> None:
        """Answer a query soon; one beyond the limit is answered at once, with no node."""
        try:
            self._waiting.put_nowait((monotonic(), question))
        except asyncio.QueueFull:
            self._log.note("overload", f"{ASKS_MAX} questions wait")
            self._tell(HoldingsFound(question.number, []))

    async def run(self) -> None:
        """Answer queries, a few at the same time, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(4):
                tasks.create_task(self._answer_each())

    async def _answer_each(self) -> None:
        while True:
            since, question = await self._waiting.get()
            answer = HoldingsFound(question.number, [])
            try:
                async with asyncio.timeout(since + ASK_S - monotonic()):
                    answer = await self._answer(question)
            except DirectoryFault as fault:
                self._log.note(fault.cause, str(fault))
            except TimeoutError:
                self._log.note("late", f"a question was not answered within {ASK_S} s")
            else:
                self.asked += 1
            self._tell(answer)

    async def _answer(self, question: AskPages) -> HoldingsFound:
        """Look pages up.

        Raises:
            DirectoryFault: that failed.
        """
        shards = [
            self._names.of(question.space, shard, question.keys) for shard, _ in question.shards
        ]
        found = await self._store.find(shards)
        usable = usable_prefixes(found, [window for _, window in question.shards], question.among)
        return HoldingsFound(
            question.number, [(one.holder.node, one.holder.boot, one.pages) for one in usable]
        )
