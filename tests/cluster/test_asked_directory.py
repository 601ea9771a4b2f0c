"""Goal: a node asks its index process who has pages, and is never kept waiting."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvstore.cluster.announcer import PageAnnouncer
from kvstore.cluster.asked import OUTSTANDING_MAX, AskedDirectory
from kvstore.cluster.membership import LocalMembership
from kvstore.cluster.messages import AskPages, DirectoryReport, HoldingsFound
from kvstore.cluster.page_store import PageStore
from kvstore.cluster.records import SCHEME, NodeRecord
from kvstore.cluster.sharing import PageQuestions
from kvstore.index.control import Source
from kvstore.index.credentials import PeerCredentials
from kvstore.state.remote.jobs import Holding, Locate
from kvstore.testing.memory_pages import MemoryPages
from tests.cluster.nodes import SPACE, PeerNode, nodes, shard
from tests.cluster.test_peers_directory import KEYS, ONE, SETTINGS
from tests.local_index import LocalIndex
from tests.loops import eventually, in_loop

BOOT = b"b" * 16


@pytest.fixture(autouse=True)
def renewed_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.cluster.announcing.RENEW_NS", 10_000_000)


class Asked:
    """A node ``self``, its directory, and what its index process would be told."""

    def __init__(self, membership: LocalMembership) -> None:
        self.sent: list[AskPages] = []
        self.answers: dict[int, list[Holding]] = {}
        self.directory = AskedDirectory(LocalIndex(SETTINGS), membership, "self", self.sent.append)

    def ask(self, number: int, *shards: object) -> None:
        asked = Locate(number, SPACE, shards or ONE, KEYS.packed)  # type: ignore[arg-type]
        self.directory.locate(asked, lambda n, found: self.answers.update({n: list(found)}))


@asynccontextmanager
async def asking() -> AsyncIterator[Asked]:
    membership = LocalMembership({"b": "127.0.0.1:2"})
    it = Asked(membership)
    running = asyncio.create_task(it.directory.run())
    try:
        await membership.join(NodeRecord(name="self", boot=BOOT, endpoint="127.0.0.1:1"))
        await eventually(lambda: it.directory._nodes)
        yield it
    finally:
        running.cancel()
        await asyncio.wait([running])


@in_loop
async def test_an_answer_counts_other_nodes_of_the_cluster_only() -> None:
    async with asking() as it:
        it.ask(7)
        [sent] = it.sent
        assert sent.space == SPACE.digest.hex()
        assert sent.shards == [(ONE[0].digest.hex(), 0)]
        it.directory.heard(
            HoldingsFound(sent.number, [("self", BOOT, 9), ("b", b"any", 4), ("stranger", BOOT, 3)])
        )
        assert it.answers == {7: [Holding("b", 4)]}
        it.directory.heard(HoldingsFound(sent.number, [("b", b"any", 5)]))
        assert it.answers == {7: [Holding("b", 4)]}, "an answer came twice"


@in_loop
async def test_questions_without_an_answer_are_answered_with_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.cluster.asked.ANSWER_S", 0.01)
    async with asking() as it:
        it.ask(1)
        assert it.answers == {}
        await eventually(lambda: it.answers == {1: []})
        monkeypatch.setattr("kvstore.cluster.asked.ANSWER_S", 60.0)
        for number in range(OUTSTANDING_MAX + 3):
            it.ask(1_000 + number)
        assert len(it.answers) == 5, "one that was not answered may still be in its socket"
        it.directory.began()  # the process has started again: it knows no question
        assert len(it.answers) == OUTSTANDING_MAX + 4
        assert not any(it.answers.values())
        shown = it.directory.stats().shared
        assert shown.unanswered == {"timeout": 1, "overload": 4}
        assert shown.outstanding == 0


@in_loop
async def test_the_nodes_that_have_one_page_are_told_with_its_shards() -> None:
    async with asking() as it:
        found: list[dict[str, list[int]]] = []
        it.directory.holders(SPACE, [shard(0), shard(1)], KEYS[0], found.append)
        first, second = it.sent
        it.directory.heard(HoldingsFound(second.number, [("b", b"", 1)]))
        assert not found
        it.directory.heard(HoldingsFound(first.number, []))
        assert found == [{"b": [1]}]
        it.directory.holders(SPACE, [], KEYS[0], found.append)
        assert found[1] == {}


@in_loop
async def test_what_the_process_reports_is_shown() -> None:
    async with asking() as it:
        it.directory.heard(DirectoryReport(current=True, announced=7, faults={"away": 2}))
        shown = it.directory.stats().shared
        assert (shown.current, shown.announced, shown.faults) == (True, 7, {"away": 2})


@in_loop
async def test_a_process_that_reports_nothing_any_more_has_no_current_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with asking() as it:
        it.directory.heard(DirectoryReport(current=True, announced=7))
        assert it.directory.stats().shared.current
        monkeypatch.setattr("kvstore.cluster.asked.SILENT_S", 0.0)
        shown = it.directory.stats().shared
        assert (shown.current, shown.trouble, shown.announced) == (False, "silent", 7)


def announcer(peer: PeerNode, store: PageStore) -> PageAnnouncer:
    endpoint = f"peer://{peer.endpoint}"
    source = Source(
        worker=peer.name, domain=f"node/{peer.name}", endpoint=endpoint, is_node=True,
        replay_endpoint=endpoint, peer=PeerCredentials("c", peer.name, SCHEME, None),
    )  # fmt: skip
    return PageAnnouncer(store, source, "c", bytes.fromhex(peer.boot))


@in_loop
async def test_a_nodes_own_events_are_announced_and_found_by_questions() -> None:
    pages, told = MemoryPages(), list[HoldingsFound]()
    questions = PageQuestions(pages, "c", told.append)

    async def finds(expected: int, *shards: tuple[str, int]) -> None:
        def answered() -> bool:
            if told and told[-1].holdings == ([("a", boot, expected)] if expected else []):
                return True
            if len(told) == asked[0]:
                asked[0] += 1
                space, among = SPACE.digest.hex(), {"a": boot}
                questions.ask(AskPages(asked[0], space, list(shards), KEYS.packed, among))
            return False

        asked = [len(told)]
        await eventually(answered)
        told.clear()

    async with nodes("a") as (a,):
        boot = bytes.fromhex(a.boot)
        a.store(KEYS[:4], *ONE)  # before anybody follows: it comes by the snapshot
        its = announcer(a, pages)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(its.run()), tasks.create_task(questions.run())]
            wanted = (ONE[0].digest.hex(), 0)
            await finds(4, wanted)
            a.store(KEYS[4:], *ONE)
            await finds(16, wanted)
            a.remove(KEYS[9:], *ONE)
            await finds(9, wanted)
            assert its.report().current
            pages.away = True
            await finds(0, wanted)  # nobody, at once
            assert questions.faults["away"]
            await eventually(lambda: its.report().trouble == "away")
            assert not its.report().current, "nobody can look for its pages"
            pages.away = False
            await finds(9, wanted)
            await eventually(lambda: its.report().current)
            assert its.report().trouble == ""
            for task in running:
                task.cancel()
    assert not (await pages.find([bytes(13)])).holders, "its number was not withdrawn"
