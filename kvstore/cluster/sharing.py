"""The part of a node's index process that uses the directory that nodes share."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Final, TypeVar

import msgspec

from kvstore.cluster.announcer import PageAnnouncer
from kvstore.cluster.entries import NAME_BYTES, EntryNames, usable_prefixes
from kvstore.cluster.messages import AskPages, DirectoryReport, DirectorySettings, HoldingsFound
from kvstore.cluster.page_store import DirectoryFault, PageStore
from kvstore.cluster.redis_client import redis_clients
from kvstore.cluster.redis_pages import CALL_S, RedisPages
from kvstore.index.control import Source
from kvstore.index.credentials import PeerCredentials
from kvstore.index.tunnel import SCHEME as PEER
from kvstore.process.faults import Faults

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

ASKS_MAX: Final = 256
ASK_S: Final = 1.0
"""Timeout of a query."""
CALL_OF_ASK_S: Final = 0.5
"""Time limit of each call for a query; it is shorter, so that a silent server is left."""
TROUBLE_FAULTS: Final = 3
"""Consecutive failures after which queries count as failing."""
_AGAIN_S: Final = 1.0
"""While queries fail, one more is made this often, so that their success is seen without any."""
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
            RedisPages(redis_clients(settings.servers, call_s), shown.cluster, call_s=call_s)
            for call_s in (CALL_S, CALL_OF_ASK_S)
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
                    self._tell(self._report())
                    await asyncio.sleep(_REPORT_S)
        finally:
            for store in self._stores:
                await store.close()

    def _report(self) -> DirectoryReport:
        """The state of announcements and queries."""
        report, questions = self._announcer.report(), self._questions
        faults = {f"ask_{cause}": n for cause, n in questions.faults.items()}
        trouble = f"ask_{questions.trouble}" if questions.trouble else ""
        return msgspec.structs.replace(
            report, current=report.current and not trouble, asked=questions.asked,
            faults=report.faults | faults, trouble=report.trouble or trouble,
        )  # fmt: skip


class PageQuestions:
    """Queries which nodes have pages, answered from a store of entries.

    Args:
        store: of the entries.
        cluster: name of the cluster.
        tell: gets the answers.

    Attributes:
        asked: queries that were answered.
        trouble: why the last :data:`TROUBLE_FAULTS` queries failed; empty = they did not.
    """

    def __init__(
        self, store: PageStore, cluster: str, tell: Callable[[HoldingsFound], None]
    ) -> None:
        self.asked = 0
        self.trouble = ""
        self._failed = 0  # consecutively
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
            tasks.create_task(self._look_again())

    async def _answer_each(self) -> None:
        while True:
            since, question = await self._waiting.get()
            answer = HoldingsFound(question.number, [])
            left_s = since + ASK_S - monotonic()
            if left_s < CALL_OF_ASK_S:
                self._log.note("overload", f"a question has waited for {ASK_S - left_s:.1f} s")
            elif (found := await self._unless_failed(self._answer(question), left_s)) is not None:
                answer = found
                self.asked += 1
            self._tell(answer)

    async def _look_again(self) -> None:
        """While queries fail, make one that nobody asks for."""
        while True:
            await asyncio.sleep(_AGAIN_S)
            if self.trouble:
                await self._unless_failed(self._store.find([bytes(NAME_BYTES)]), ASK_S)

    async def _unless_failed(self, query: Awaitable[_T], left_s: float) -> _T | None:
        """The answer to a query; None, and it is counted, if that failed."""
        try:
            async with asyncio.timeout(left_s):
                found = await query
        except DirectoryFault as fault:
            cause, why = fault.cause, str(fault)
        except TimeoutError:
            cause, why = "late", f"a question was not answered within {ASK_S} s"
        else:
            self._failed, self.trouble = 0, ""
            return found
        self._log.note(cause, why)
        self._failed += 1
        if self._failed >= TROUBLE_FAULTS:
            self.trouble = cause
        return None

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
