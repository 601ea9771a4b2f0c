"""Goal: nodes that have no list find each other, and lose nothing when the process between ends."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path

import pytest

from kvstore.cluster.access import StoreServers
from kvstore.cluster.membership import STORE_NODES_MAX, StoreMembership, used_nodes
from kvstore.cluster.messages import ChildSettings, Join, Leave, NodesFound, StorePlace
from kvstore.cluster.records import JoinStanding, NodeRecord, write_record
from kvstore.cluster.talk import ChildTalk
from kvstore.index.control import IndexSettings, SourceBounds
from kvstore.index.credentials import PeerCredentials
from kvstore.index.process import IndexProcess
from kvstore.protocol.errors import PeerUnreachable
from tests.cluster.fake_transport import Network
from tests.cluster.folder_child import AWAY
from tests.cluster.whole_node import KEYS, SCHEME, WholeNode, reading, serving, whole_node
from tests.loops import eventually, in_loop

A = NodeRecord(name="a", boot=b"a" * 16, endpoint="127.0.0.1:7001")
B = NodeRecord(name="b", boot=b"b" * 16, endpoint="127.0.0.1:7002")
JOINED = JoinStanding("joined")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the records are; child processes find the tests."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    made = tmp_path / "nodes"
    made.mkdir()
    return made


class Kept:
    """The membership of one node, with the index process that keeps it."""

    def __init__(self, name: str, folder: Path) -> None:
        bounds = SourceBounds(replay_s=5.0, verify_s=5.0, foreign_blocks=1)
        self.index = IndexProcess(IndexSettings(4096, bounds), "tests.cluster.folder_child")
        store = StorePlace("etcd", StoreServers((str(folder),)))
        shown = PeerCredentials("blue", name, SCHEME)
        talk = ChildTalk(self.index, lambda: ChildSettings(credentials=shown, membership=store))
        self.membership = StoreMembership(store.kind, talk.tell)
        talk.attach_membership(self.membership)
        self.nodes: Mapping[str, NodeRecord] = {}

    @property
    def state(self) -> str:
        return self.membership.standing.state

    def kill(self) -> None:
        assert self.index._life is not None
        os.kill(self.index._life._process.pid, signal.SIGKILL)

    async def watch(self) -> None:
        async with aclosing(self.membership.watch()) as changes:
            async for nodes in changes:
                self.nodes = nodes


def test_of_too_many_records_each_node_hears_of_its_own_and_of_those_that_it_uses() -> None:
    many = {
        name: NodeRecord(name=name, boot=b"x" * 16, endpoint="127.0.0.1:1")
        for name in (f"a{number}" for number in range(5_000))
    }
    told = used_nodes({**many, "b": B}, "b")

    assert len(told) == STORE_NODES_MAX
    assert told["b"] == B
    membership = StoreMembership("etcd", lambda _: None)
    membership._own = B
    membership.heard(NodesFound(told, JOINED))
    assert membership._nodes.present == told


@asynccontextmanager
async def kept(record: NodeRecord, folder: Path) -> AsyncIterator[Kept]:
    """A node that is kept in a folder, by a process of its own."""
    made = Kept(record.name, folder)
    tasks = [asyncio.create_task(made.index.run()), asyncio.create_task(made.watch())]
    await made.membership.join(record)
    try:
        yield made
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@in_loop
async def test_two_nodes_find_each_other_without_a_list_and_read_each_others_pages(folder: Path):
    async with AsyncExitStack() as undo:
        network = Network()
        nodes: list[WholeNode] = []
        memberships: list[Kept] = []
        for name in "ab":
            node = await undo.enter_async_context(whole_node(name, network))
            service = await undo.enter_async_context(serving(node))
            record = NodeRecord(name=name, boot=node.local.boot, endpoint=service.endpoint)
            made = await undo.enter_async_context(kept(record, folder))
            await undo.enter_async_context(reading(node, made.membership))
            nodes.append(node)
            memberships.append(made)
        a, b = nodes
        await eventually(lambda: "a" in b.peers.sessions() and b.up())
        await eventually(lambda: "b" in a.peers.sessions() and a.up("b"))
        pages = a.store()
        slots = b.room(KEYS)
        number = b.fetch(slots)
        await eventually(lambda: b.end(number))
        assert b.content(slots) == pages

        await memberships[0].membership.leave()
        await eventually(lambda: not b.peers.sessions())
        number = b.fetch(b.room(KEYS, "t"), tenant="t")
        await eventually(lambda: b.end(number))
        assert isinstance(b.end(number).error, PeerUnreachable)


@in_loop
async def test_a_killed_process_is_told_everything_again_and_no_session_ends(folder: Path):
    async with AsyncExitStack() as undo:
        network = Network()
        a = await undo.enter_async_context(whole_node("a", network))
        b = await undo.enter_async_context(whole_node("b", network))
        service = await undo.enter_async_context(serving(a))
        there = NodeRecord(name="a", boot=a.local.boot, endpoint=service.endpoint)
        (folder / "a").write_bytes(write_record(there))
        made = await undo.enter_async_context(kept(B, folder))
        await undo.enter_async_context(reading(b, made.membership))
        await eventually(lambda: "a" in b.peers.sessions() and b.up())
        seen = dict(made.nodes)

        made.kill()
        await eventually(lambda: made.index.restarts == 1 and made.state == "joining")
        assert made.nodes == seen, "what was told last counts"
        await eventually(lambda: made.state == "joined")

        assert made.nodes == seen == {"a": there, "b": B}
        assert b.up()
        assert b.peers.sessions()["a"].faults == {}
        assert made.membership.stats().changes == {"joined": 2, "joining": 1}


@in_loop
async def test_a_store_that_is_away_takes_no_node_away(folder: Path):
    (folder / "a").write_bytes(write_record(A))
    async with kept(B, folder) as b:
        await eventually(lambda: set(b.nodes) == {"a", "b"})
        (folder.parent / AWAY).touch()
        await eventually(lambda: b.state == "away")
        b.kill()
        await eventually(lambda: b.index.restarts == 1 and b.state == "away")
        assert b.nodes == {"a": A, "b": B}
        assert b.membership.stats().why == "it does not answer"
        (folder / "a").unlink()
        (folder.parent / AWAY).unlink()
        await eventually(lambda: b.nodes == {"b": B})


@in_loop
async def test_a_store_that_is_away_at_the_start_is_joined_later(folder: Path):
    (folder.parent / AWAY).touch()
    async with kept(A, folder) as a:
        await eventually(lambda: a.state == "away")
        assert a.nodes == {}
        (folder.parent / AWAY).unlink()
        await eventually(lambda: a.nodes == {"a": A})


@in_loop
async def test_records_that_cannot_be_read_are_left_out_and_counted(folder: Path):
    (folder / "x").write_bytes(b"{")
    async with kept(A, folder) as a:
        await eventually(lambda: a.nodes == {"a": A})
        assert a.membership.stats().unreadable_records == 1


@in_loop
async def test_the_name_of_a_live_node_is_refused_and_that_of_a_dead_one_taken(folder: Path):
    async with AsyncExitStack() as undo:
        node = await undo.enter_async_context(whole_node("a", Network()))
        async with serving(node) as service:
            there = NodeRecord(name="a", boot=node.local.boot, endpoint=service.endpoint)
            (folder / "a").write_bytes(write_record(there))
            again = NodeRecord(name="a", boot=b"x" * 16, endpoint="127.0.0.1:7009")
            a = await undo.enter_async_context(kept(again, folder))
            await eventually(lambda: a.state == "refused")
            assert (a.membership.standing.field, a.nodes) == ("name", {})
            assert (folder / "a").read_bytes() == write_record(there)
        await eventually(lambda: a.nodes == {"a": again}, "nobody listens there any more")


PARENT = """
import asyncio, sys
from pathlib import Path
from tests.cluster.test_store_membership import A, kept
async def main():
    async with kept(A, Path(sys.argv[1])) as a:
        while a.state != "joined":
            await asyncio.sleep(0.01)
        print("joined", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


def test_the_record_of_a_killed_node_is_withdrawn_at_once(folder: Path):
    command = [sys.executable, "-c", PARENT, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        try:
            assert parent.stdout.readline() == "joined\n"
            assert (folder / "a").read_bytes() == write_record(A)
        finally:
            parent.kill()
        deadline = time.monotonic() + 10
        while (folder / "a").exists():
            assert time.monotonic() < deadline, "its record is there still"
            os.sched_yield()


# ---- without a process -----------------------------------------------------------------------


class Alone:
    """A membership that is told by hand."""

    def __init__(self) -> None:
        self.said: list[Join | Leave] = []
        self.membership = StoreMembership("redis", self.said.append)

    async def nodes(self) -> Mapping[str, NodeRecord]:
        async with aclosing(self.membership.watch()) as changes:
            return await anext(changes)


@in_loop
async def test_what_was_told_counts_only_if_the_node_is_in_it():
    it = Alone()
    it.membership.heard(NodesFound({"a": A, "b": B}, JOINED))
    assert await it.nodes() == {}, "it is none yet"
    await it.membership.join(A)
    for state in ("joining", "away"):
        it.membership.heard(NodesFound({"a": A, "b": B}, JoinStanding(state)))
        assert await it.nodes() == {}
    it.membership.heard(NodesFound({"a": A, "b": B}, JOINED))
    assert await it.nodes() == {"a": A, "b": B}
    for nodes in ({}, {"b": B}, {"a": NodeRecord(name="a", boot=b"x" * 16, endpoint=A.endpoint)}):
        it.membership.heard(NodesFound(nodes, JOINED))
        assert await it.nodes() == {"a": A, "b": B}
    it.membership.heard(NodesFound({"a": A}, JOINED))
    assert await it.nodes() == {"a": A}
    await it.membership.leave()
    await it.membership.leave()
    assert await it.nodes() == {}
    assert it.said == [Join(A), Leave()]


@in_loop
async def test_a_refused_node_is_alone_and_each_change_is_one_line(
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.INFO, "kvstore.cluster.membership")
    it = Alone()
    it.membership.began()
    await it.membership.join(A)
    it.membership.heard(NodesFound({"a": A, "b": B}, JOINED))
    refused = JoinStanding("refused", "scheme", "not\nours")
    for _ in range(3):
        it.membership.heard(NodesFound({"b": B}, refused))
    assert await it.nodes() == {}
    it.membership.heard(NodesFound({"a": A}, JoinStanding("refused", "name", "another")))
    it.membership.began()
    assert it.said == [Join(A), Join(A)]
    said = [record.getMessage().partition(" store=")[0] for record in caplog.records]
    assert said == [
        "membership joined", "membership refused", "membership refused", "membership joining"
    ]  # fmt: skip
    assert "\n" not in caplog.text.splitlines()[1]
    assert it.membership.stats().changes == {"joined": 1, "refused": 2, "joining": 1}


@in_loop
async def test_more_nodes_than_can_have_sessions_are_not_used():
    it = Alone()
    await it.membership.join(A)
    many = {f"n{n:03}": NodeRecord(name=f"n{n:03}", endpoint=f"h:{n + 1}") for n in range(400)}
    it.membership.heard(NodesFound(many | {"a": A}, JOINED))
    nodes = await it.nodes()
    assert len(nodes) == 256
    assert nodes["a"] == A
    assert "n254" in nodes
    assert "n255" not in nodes


@in_loop
async def test_new_names_push_out_no_node_that_is_used_already():
    it = Alone()
    await it.membership.join(A)
    real = NodeRecord(name="z", boot=b"z" * 16, endpoint="127.0.0.1:7026")
    it.membership.heard(NodesFound({"a": A, "z": real}, JOINED))
    many = {f"n{n:03}": NodeRecord(name=f"n{n:03}", endpoint=f"h:{n + 1}") for n in range(400)}
    it.membership.heard(NodesFound({**many, "a": A, "z": real}, JOINED))

    nodes = await it.nodes()
    assert len(nodes) == STORE_NODES_MAX
    assert nodes["z"] == real
    it.membership.began()
    joined = it.said[-1]
    assert isinstance(joined, Join)
    assert joined.known == sorted(nodes), "the process that has started knows them too"


@in_loop
async def test_new_records_push_out_no_node_that_is_used_when_the_process_has_started_again(
    folder: Path,
):
    other = NodeRecord(name="z", boot=b"z" * 16, endpoint="127.0.0.1:7026")
    async with kept(A, folder) as a, kept(other, folder) as z:
        await eventually(lambda: a.nodes.keys() == z.nodes.keys() == {"a", "z"})
        for number in range(300):
            made_up = NodeRecord(name=f"b{number:03}", boot=b"b" * 16, endpoint="h:2")
            (folder / made_up.name).write_bytes(write_record(made_up))
        await eventually(lambda: len(a.nodes) == STORE_NODES_MAX)
        assert "z" in a.nodes
        a.kill()
        await eventually(lambda: a.index.restarts == 1 and a.state == "joined")
        assert "z" in a.nodes
