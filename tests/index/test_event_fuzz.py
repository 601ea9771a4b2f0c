"""Goal: whatever is sent to those who read events, none of them ends, waits, or keeps anything.

Seeded; ten seconds in all, and ten minutes in a soak, whose seed is new each time and is named when
it fails.
"""

import asyncio
import contextlib
import functools
import gc
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.events import zmtp
from kvstore.events.kept import Bounds
from kvstore.events.publisher import END_OF_REPLAY, EventPublisher, RemovedEvent, StoredEvent
from kvstore.events.questions import (
    AUDIT,
    END,
    PAGES,
    SAMPLE,
    SNAPSHOT,
    Asked,
    OpenQuestion,
    Questions,
    encode_question,
)
from kvstore.events.server import PEERS_MAX, EventServer
from kvstore.index.control import IndexSettings, SourceBounds
from kvstore.index.feed import PageFeeds
from kvstore.index.layout import TableLayout
from kvstore.index.reading import UnreadableError
from kvstore.index.scope import key_chains, scope_seed
from kvstore.index.writer import IndexWriter
from kvstore.process.listeners import Listener, Unix
from tests.index.hostile import TOPICS, Hostile, Stopwatch, stall_s
from tests.index.publishers import node, usable
from tests.local_index import LocalIndex, anonymous_memory
from tests.loops import eventually, in_loop

QUICK_SEED = 10
QUICK_S = 10.0
ENTRIES_MAX = 20_000
SETS = 4_096
HONEST_SPACE = "cd" * 32


@pytest.fixture(
    params=[
        pytest.param(3.3, id="quick"),
        pytest.param(0.0, id="soak", marks=pytest.mark.soak("events", minutes=3.4)),
    ]
)
def seconds(request: pytest.FixtureRequest, soak_s: float) -> float:
    """How long to look."""
    quick: float = request.param
    return quick or soak_s


@contextmanager
def seeded(seconds: float) -> Iterator[Hostile]:
    """Who chooses; the seed is named when something goes wrong."""
    seed = QUICK_SEED if seconds < QUICK_S else random.SystemRandom().randrange(2**32)
    gc.collect()
    gc.freeze()  # what the tests before this one left is not walked over again and again
    try:
        yield Hostile(seed)
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    finally:
        gc.unfreeze()


def test_no_batch_ends_or_holds_up_who_applies_it(seconds: float) -> None:
    with seeded(seconds) as hostile:
        secret = hostile.getrandbits(64)
        memory = anonymous_memory(TableLayout(ENTRIES_MAX, SETS).total_bytes)
        writer = IndexWriter(memory, ENTRIES_MAX, secret, SETS)
        feeds = PageFeeds(writer, secret)
        feed = feeds.feed(node("ipc:///nowhere"), 5_000)
        watch, end, unreadable, batches = Stopwatch(), time.monotonic() + seconds, 0, 0
        while time.monotonic() < end:
            payload = hostile.payload()
            watch._before = time.thread_time()
            try:
                for _ in feed.apply(payload):
                    watch.look()
            except UnreadableError:
                unreadable += 1
                feed.clear()
            watch.look()
            feeds.advance(batches)
            watch.look()
            batches += 1
            if batches % 20 == 0:
                writer.check()
                feed._ingest.blocks.check()
        assert 0 < unreadable < batches
        assert watch.worst < stall_s(seconds)
        feed.end()
        while feeds.advance(batches):
            pass
        assert len(feeds) == len(feed._ingest.blocks) == 0
        writer.check()


class HostilePublishers:
    """Take connections and do to each what chance says; in a thread, so that their time is theirs.

    Args:
        seed: of the chance.
        folders: each gets a publisher at ``live``, whose replay is at ``replay``.
    """

    def __init__(self, seed: int, folders: list[Path]) -> None:
        self._hostile = Hostile(seed)
        self._folders = folders
        self._payloads = [self._hostile.payload() for _ in range(100)]
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "HostilePublishers":
        self._thread.start()
        assert self._listening.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        servers = []
        for folder in self._folders:
            for name, side in (("live", zmtp.PUB), ("replay", zmtp.ROUTER)):
                speak = functools.partial(self._speak, side)
                servers.append(await asyncio.start_unix_server(speak, folder / name))
        self._listening.set()
        await self._stop.wait()
        for server in servers:
            server.close()
        speaking = asyncio.all_tasks() - {asyncio.current_task()}
        if speaking:  # also with whom was accepted just now; all others have gone away
            await asyncio.wait(speaking, timeout=5)

    async def _speak(
        self, side: zmtp.Side, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            with contextlib.suppress(OSError):
                await self._say(side, writer)
                if self._hostile.random() < 0.9:
                    writer.write_eof()  # else say nothing more, until the other side gives up
                while await reader.read(1 << 16):
                    pass
        finally:
            writer.transport.abort()

    async def _say(self, side: zmtp.Side, writer: asyncio.StreamWriter) -> None:
        hostile = self._hostile
        greeting, right = hostile.handshake(side)
        writer.write(greeting)
        number = hostile.randrange(4)
        for _ in range(hostile.choice([0, 1, 5, 50, 500]) if right else 0):
            if hostile.random() < 0.03:
                for data in hostile.frames():
                    writer.write(data)
                    await writer.drain()
            if hostile.random() < 0.05:
                self._payloads[hostile.randrange(100)] = hostile.payload()
            payload = hostile.choice(self._payloads)
            message = hostile.message(number, payload, replayed=side is zmtp.ROUTER)
            number = int.from_bytes(message[-2][:8], "big") if len(message) > 2 else number
            writer.write(zmtp.encode(message))
            await writer.drain()
            if message[-2:-1] == [END_OF_REPLAY]:
                return


def pages_of(index: LocalIndex, worker: str) -> int:
    """Pages of a worker in host memory, if they count."""
    known = index.present().worker(worker)
    return known.pages.get("CPU", 0) if known is not None and known.current else -1


def page(number: int) -> bytes:
    return number.to_bytes(32, "little")


@in_loop
async def test_hostile_publishers_cost_neither_who_follows_them_nor_an_honest_one_anything(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("followers._AGAIN_S_MIN", 0.001), ("followers._AGAIN_S_MAX", 0.01),
                        ("followers.CONNECT_S", 0.2), ("replay.CONNECT_S", 0.2),
                        ("followers._REPLAY_S_MAX", 1.0), ("followers._BEAT_S", 0.1)):  # fmt: skip
        monkeypatch.setattr(f"kvstore.index.{name}", value)
    with seeded(seconds) as hostile:
        bounds = SourceBounds(replay_s=0.3, verify_s=0.2, foreign_blocks=5_000)
        index = LocalIndex(IndexSettings(ENTRIES_MAX, bounds))
        honest = f"ipc://{tmp_path}/honest"
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(
                publisher := EventPublisher(honest, f"{honest}-replay", topic=b"kvstore@h@aa")
            )
            folders = [tmp_path / name for name in ("a", "b")]
            for folder in folders:
                folder.mkdir()
                ends = (f"ipc://{folder}/live", f"ipc://{folder}/replay")
                index.follow(node(*ends, name=folder.name))
            stack.enter_context(HostilePublishers(hostile.randrange(2**32), folders))
            index.follow(node(honest, f"{honest}-replay", name="h"))
            running = asyncio.create_task(index.run())
            try:
                there = await publish_honestly(publisher, hostile, running, seconds)
                await eventually(
                    lambda: not running.done() and pages_of(index, "node/h") == len(there),
                    "everything that the honest publisher has",
                )
                table = index.present().table
                assert table is not None
                seed = scope_seed(table.secret, "keys", HONEST_SPACE)
                keys = b"".join(map(page, sorted(there)))
                assert usable(table, "node/h", key_chains(keys, seed)) == len(there)
                bad = [index.present().worker(f"node/{name}") for name in ("a", "b")]
                causes = {cause for one in bad if one is not None for cause in one.faults}
                assert causes >= {"batch", "connection"}
                for name in ("a", "b", "h"):
                    index.unfollow(f"node/{name}")
                await eventually(lambda: index.present().report.entries == 0)
            finally:
                running.cancel()
                await asyncio.wait([running])


async def publish_honestly(
    publisher: EventPublisher, hostile: Hostile, running: asyncio.Task[None], seconds: float
) -> set[int]:
    """Publish and take back pages for a while; gives those that are there at the end."""
    there: set[int] = set()
    loop = asyncio.get_running_loop()
    watch, end = Stopwatch(), loop.time() + seconds
    turn = 0
    while loop.time() < end and not running.done():
        await asyncio.sleep(0)
        watch.look()
        turn += 1
        if turn % 50:
            continue
        some = [hostile.randrange(500) for _ in range(10)]
        hashes, common = [page(n) for n in some], {"medium": "CPU", "space": HONEST_SPACE}
        if hostile.random() < 0.7:
            publisher.publish(
                [StoredEvent(block_hashes=hashes, parent_block_hash=None, token_ids=[],
                             block_size=4, shard=0, **common)]
            )  # fmt: skip
            there.update(some)
        else:
            publisher.publish([RemovedEvent(block_hashes=hashes, shard=0, **common)])
            there.difference_update(some)
        watch._before = time.thread_time()
    if running.done():
        running.result()
    assert watch.worst < stall_s(seconds)
    return there


def answer(hostile: Hostile, asked: list[OpenQuestion]) -> None:
    """Go on with the answers to some questions, as long as somebody reads them."""
    asked[:] = [question for question in asked if not question.given_up]
    for question in hostile.sample(asked, min(2, len(asked))):
        if not question.is_full:
            word = END if hostile.random() < 0.1 else PAGES
            question.put(word, bytes(hostile.randrange(100_000)))


class HostileFollower:
    """A connection that says what chance says, and mostly does not listen."""

    def __init__(self, hostile: Hostile, path: str) -> None:
        self._hostile = hostile
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.connect(path)
        self._right = False
        self._greeted = False

    def act(self) -> bool:
        """Do something; False when the connection has ended."""
        hostile = self._hostile
        try:
            if not self._greeted:
                side = hostile.choice([zmtp.SUB, zmtp.DEALER])
                data, self._right = hostile.handshake(side)
                self._greeted = True
            elif hostile.random() < 0.3:
                return bool(self._socket.recv(1 << 16))
            elif not self._right or hostile.random() < 0.2:
                data = b"".join(hostile.frames())[:200_000]
            else:
                data = zmtp.encode(
                    hostile.choice(
                        [
                            [b"\x01"], [b"\x00"], [b"\x01" + hostile.choice(TOPICS)[:900]],
                            [b"", hostile.number(5)], [b"", bytes(8)], [b"", b""], [b""] * 8,
                            [hostile.randbytes(hostile.randrange(3_000))],
                            encode_question(Asked(SNAPSHOT)), [b"", b"ask", b"everything"],
                            encode_question(Asked(SAMPLE, hostile.randrange(2**32))),
                            encode_question(
                                Asked(AUDIT, space="ab", shard="cd",
                                      packed=bytes(hostile.choice([0, 31, 32, 1 << 17, 1 << 18])))
                            ),
                        ]
                    )
                )  # fmt: skip
            self._socket.send(data)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return hostile.random() > 0.01

    def close(self) -> None:
        self._socket.close()


def test_hostile_followers_cost_neither_the_publisher_nor_an_honest_one_anything(
    seconds: float, tmp_path: Path
) -> None:
    with seeded(seconds) as hostile, contextlib.ExitStack() as stack:
        paths = [str(tmp_path / name) for name in ("live", "replay")]
        listeners = [Listener("endpoint", Unix(path), 0o600) for path in paths]
        questions, asked = Questions(lambda: None), list[OpenQuestion]()
        questions.answer = asked.append
        server = EventServer(
            *listeners, topic=TOPICS[2], token=b"", waiting_max=100, kept=Bounds(50, 1 << 20),
            questions=questions,
        )  # fmt: skip
        stack.callback(server.close)
        honest = zmtp.ZmtpPeer(zmtp.SUB, zmtp.MessageLimits(1 << 20, 8))
        raw = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        raw.connect(paths[0])
        raw.setblocking(False)
        heard: list[int] = []
        follows = False

        def listen() -> None:
            nonlocal follows
            with contextlib.suppress(BlockingIOError):
                if said := honest.outgoing():
                    raw.sendall(said)
                if honest.ready and not follows:
                    raw.sendall(zmtp.encode([b"\x01"]))
                    follows = True
                messages = honest.feed(raw.recv(1 << 18))
                heard.extend(int.from_bytes(message[1], "big") for message in messages)

        others: list[HostileFollower] = []
        watch, end, number = Stopwatch(), time.monotonic() + seconds, 0
        while time.monotonic() < end:
            if len(others) < PEERS_MAX // 2:
                others.append(HostileFollower(hostile, hostile.choice(paths)))
            for other in hostile.sample(others, min(8, len(others))):
                if not other.act():
                    other.close()
                    others.remove(other)
            watch._before = time.thread_time()
            server.turn(0.0)
            answer(hostile, asked)
            if follows and hostile.random() < 0.2:
                server.send(number, hostile.randbytes(hostile.randrange(20_000)))
                number += 1
            server.flush()
            watch.look()
            listen()
        for other in others:
            other.close()
        deadline = time.monotonic() + 10
        while len(server) > 1 and time.monotonic() < deadline:
            server.turn(0.01)
            server.flush()
            listen()
        assert len(server) == 1, "connections of those who have gone"
        assert heard[-1] == number - 1
        assert heard == list(range(heard[0], number)), "the honest one got everything"
        assert len(server.faults.counts) > 3
        assert not questions._open
        assert {name for name, count in questions.counts.items() if count} > {
            "snapshots_served", "snapshots_cut", "audits_refused",
        }  # fmt: skip
        assert watch.worst < stall_s(seconds)
