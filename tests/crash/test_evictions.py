"""Goal: what an operator or a quarantine took out does not come back when the node starts again."""

import json
from collections.abc import Iterator
from pathlib import Path
from time import monotonic_ns

import numpy as np
import pytest

from kvstore.cli import main
from kvstore.client.embedded import Embedded
from kvstore.client.space import Space
from kvstore.client.store import KVStore
from kvstore.protocol.page import PrefixKey
from kvstore.state.disk.jobs import Durable
from kvstore.state.table.pages import PageTable
from kvstore.testing.crash import MIB, chain_keys, page_of
from kvstore.testing.crash import open_space as open_crash_space
from kvstore.testing.server import Server
from tests.client.conftest import content, new_keys, open_space
from tests.conftest import WaitUntil
from tests.connecting import connect
from tests.state.world import drop_below

PAGES = 6


class Lives:
    """One directory and the nodes of this process that live on it, one after the other."""

    def __init__(self, folder: Path, wait_until: WaitUntil) -> None:
        self._folder = folder
        self._wait_until = wait_until
        self._store: KVStore | None = None
        self.space = self.restart()

    def restart(self) -> Space:
        self.end()
        self._store = KVStore.open(
            1 << 20, extent_bytes=1 << 18, ssd_directories=[self._folder], sync="always",
            ssd_capacity_bytes=32 << 20,
        )  # fmt: skip
        self.space = open_space(self._store, model="evictions", page_tokens=32)
        self.space.lookup(new_keys(self.space, 1))
        return self.space

    def end(self) -> None:
        if self._store is not None:
            self._store.close()

    def put(self, start: int = 0) -> None:
        pages = content(PAGES, self.space.page_bytes[0], seed=start)
        self.space.put(new_keys(self.space, PAGES, start), pages, durable=True)

    def pages(self, start: int = 0) -> int:
        return self.space.lookup(new_keys(self.space, PAGES, start)).pages

    def take_out(
        self, key: PrefixKey | None, cause: str = "operator", *, wait: bool = True
    ) -> None:
        """What the operator's job does; waits until no restart can undo it."""
        link = self._store._link
        assert isinstance(link, Embedded)

        def begin(table: PageTable) -> Durable:
            (space,) = table.spaces
            top = space.root if key is None else space.nodes[key]
            drop_below(table, top, cause)
            return table.disk.graves.await_written(0)

        with link._answered:
            durable = link.node.operate(begin, monotonic_ns())
        if wait:
            self._wait_until(lambda: durable.ended)
            assert durable.error is None

    def lose(self, key: PrefixKey) -> None:
        """Take a page out as one that could not be read: that may be other the next time."""
        link = self._store._link

        def change(table: PageTable) -> None:
            (space,) = table.spaces
            table.residents.drop(space.nodes[key], 0, "unreadable")

        with link._answered:
            link.node.operate(change, monotonic_ns())


@pytest.fixture
def lives(tmp_path: Path, wait_until: WaitUntil) -> Iterator[Lives]:
    made = Lives(tmp_path / "ssd", wait_until)
    made.put()
    made.put(1000)
    yield made
    made.end()


def test_an_evicted_page_and_what_follows_it_is_gone_after_a_restart(lives: Lives):
    lives.take_out(new_keys(lives.space, PAGES)[2])
    assert lives.pages() == 2

    lives.restart()

    assert lives.pages() == 2
    assert lives.pages(1000) == PAGES, "the others are there"
    lives.restart()
    assert lives.pages() == 2, "and again"


def test_a_cleared_space_is_empty_after_a_restart_of_what_left_before_too(lives: Lives):
    lives.lose(new_keys(lives.space, PAGES)[0])
    assert lives.pages() == 0
    lives.take_out(None, "cleared")

    lives.restart()

    assert (lives.pages(), lives.pages(1000)) == (0, 0)
    first = new_keys(lives.space, 1)
    lives.space.put(first, content(1, lives.space.page_bytes[0]), durable=True)
    lives.restart()
    assert lives.pages() == 1, "what followed it before does not hang below it again"


def test_what_left_for_other_reasons_may_come_back(lives: Lives):
    lives.lose(new_keys(lives.space, PAGES)[0])

    lives.restart()

    assert lives.pages() == PAGES


def test_a_page_that_is_stored_again_after_its_eviction_is_there_after_a_restart(lives: Lives):
    for _ in range(3):
        lives.take_out(new_keys(lives.space, PAGES)[1])
        lives.put()

    lives.restart()

    assert lives.pages() == PAGES
    out = [np.zeros(lives.space.page_bytes[0], dtype=np.uint8) for _ in range(PAGES)]
    assert lives.space.get(new_keys(lives.space, PAGES), out) == PAGES


def test_a_page_is_stored_again_at_once_while_its_eviction_is_being_written(lives: Lives):
    for key in new_keys(lives.space, PAGES):
        lives.take_out(key, wait=False)
        lives.put()

    lives.restart()

    assert lives.pages() == PAGES


def test_a_quarantined_page_is_not_offered_after_a_restart(
    lives: Lives, tmp_path: Path, wait_until: WaitUntil
):
    keys = new_keys(lives.space, PAGES)
    damaged = content(PAGES, lives.space.page_bytes[0], seed=0)[3].tobytes()
    for start in range(2000, 8000, 1000):
        lives.put(start)  # until it is no longer in memory
    for path in (tmp_path / "ssd").glob("*.kvlog"):
        at = path.read_bytes().find(damaged)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([damaged[0] ^ 1]))
    out = [np.zeros(len(damaged), dtype=np.uint8) for _ in range(PAGES)]
    assert lives.space.get(keys, out) == 3
    counts = lives._store.stats
    wait_until(lambda: counts()["counts"].get("tombstone_keys", 0) == PAGES - 3)

    lives.restart()

    assert lives.pages() == 3, "without a tombstone it would be offered until it is read"


def test_the_command_evicts_for_good_and_a_killed_daemon_explains_it(tmp_path: Path, capsys):
    settings = {
        "socket.path": tmp_path / "kv.sock", "host.capacity_bytes": 2 * MIB,
        "host.extent_bytes": MIB, "host.session_quota_bytes": 2 * MIB, "host.prefault": "false",
        "events.endpoint": "", "events.replay_endpoint": "", "ssd.directories": tmp_path / "ssd",
        "ssd.capacity_bytes": 64 * MIB, "ssd.segment_bytes": MIB, "ssd.sync": "interval",
    }  # fmt: skip

    def command(server: Server, *words: str) -> dict:
        status = main([*words, "--url", server.admin, "--json"])
        assert status == 0
        return json.loads(capsys.readouterr().out)

    with Server(tmp_path, settings) as server:
        server.wait_ready()
        with connect(server.address, timeout_s=10.0) as store:
            space = open_crash_space(store)
            keys, others = chain_keys(space, 1, PAGES), chain_keys(space, 2, PAGES)
            for run in (keys, others):
                space.put(run, [page_of(key) for key in run], durable=True)
            label = space.identity.digest.hex()
            job = command(server, "evict", label, keys[1].hex())
            assert job["result"] == {"dropped": PAGES - 1, "kept": 0, "durable": True}
            assert command(server, "explain", keys[1].hex())["verdict"] == "operator"
        server.kill()

    with Server(tmp_path, settings) as server:
        server.wait_ready()
        with connect(server.address, timeout_s=10.0) as store:
            space = open_crash_space(store)
            assert space.lookup(keys).pages == 1
            assert space.lookup(others).pages == PAGES
            told = command(server, "explain", keys[1].hex())
            assert (told["verdict"], "since this node started" in told["text"]) == (
                "never_stored", True,
            )  # fmt: skip
