"""Goal: whatever clients send, the node goes on, no turn of it is long, and nothing stays held."""

import gc
import json
import sys
from random import Random, SystemRandom
from time import monotonic, thread_time

import pytest

from kvstore import wire
from kvstore.errors import ProtocolError, TierUnavailable
from kvstore.node.node import Node
from kvstore.node.requests import NodeLimits
from kvstore.node.selfcheck import SelfCheck
from kvstore.state.choice.admission import Admission
from kvstore.state.disk.jobs import DiskJob, DiskRules, SyncPolicy, WritePolicy
from kvstore.state.disk.log import SegmentLog
from kvstore.state.disk.pages import DiskPages
from kvstore.state.tree.sessions import Peer
from kvstore.state.tree.slots import SlotTable
from tests.conftest import Spawn
from tests.faults.conftest import Scene
from tests.fuzz.messages import Client
from tests.looking_up import LookingUp

SECONDS = 5.0
TURN_S_MAX = 0.05
"""What one turn may take; the ten minutes of the soak hold it."""
TURN_S_ANYWHERE = 0.5
"""A turn that grows with what a client sends takes longer than this on any machine."""
STALLS_MAX = 2
"""Lookups that may wait for longer than such a turn; see :func:`fuzz_a_daemon`."""
MS = 1_000_000


class Fuzzed:
    """A node with an SSD tier of which nothing moves, and its clients."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = Random(seed)
        limits = NodeLimits(1 << 20, 1000, unwatched_ns=50 * MS)
        slots = SlotTable(1 << 16, 16)
        self.node = Node("n", b"b" * 16, slots, limits, lambda: chance.randbytes(16))
        self.self_check = SelfCheck(self.node)
        rules = DiskRules(
            chance.choice(list(WritePolicy)), chance.choice(list(SyncPolicy)), 5 * MS, 1 << 18,
            20 * MS,
        )  # fmt: skip
        self.disk = DiskPages(
            self.node.pages, SegmentLog(8, 1 << 17), Admission("all", 0, 1 << 20), rules
        )
        self.node.pages.disk = self.disk
        self.jobs: list[DiskJob] = []
        self.now_ns = 1
        self.clients: dict[int, tuple[Client, Peer]] = {}
        self.connections = 0
        self.longest_s = 0.0

    def run(self, end_s: float) -> None:
        steps = 0
        while monotonic() < end_s:
            steps += 1
            self.step()
            self.self_check.step()
            if steps % 50 == 0:
                self.self_check.run()
        self.leave()

    def step(self) -> None:
        roll = self.chance.random()
        if len(self.clients) < 4:
            self.connect()
        elif roll < 0.01:
            self.disconnect(self.chance.choice(list(self.clients)))
        elif roll < 0.02:
            _, peer = self.chance.choice(list(self.clients.values()))
            if peer.watched:
                self.turn(lambda: self.node.process_ended(peer.identity, self.now_ns))
        elif roll < 0.2:
            self.now_ns += self.chance.choice((0, 1, MS, 100 * MS))
            self.turn(lambda: self.node.advance(self.now_ns))
        elif roll < 0.4:
            self.end_job()
        else:
            self.say(self.chance.choice(list(self.clients)))
        self.flush()

    def connect(self) -> None:
        self.connections += 1
        number = self.connections
        identity = self.chance.randrange(1, 6)
        peer = Peer(identity if self.chance.random() < 0.7 else -number, watched=identity < 5)
        if peer.identity < 0:
            peer = Peer(-number, watched=False)
        self.clients[number] = Client(self.chance), peer
        self.node.connected(number, peer)
        client = self.clients[number][0]
        self.tell(number, wire.Hello(1, 1, 2, "fuzz", b"", b""))
        self.tell(number, client.open_space())

    def disconnect(self, number: int) -> None:
        _, peer = self.clients.pop(number)
        ended = peer.watched and self.chance.random() < 0.5
        self.turn(lambda: self.node.disconnected(number, self.now_ns, ended=ended))

    def say(self, number: int) -> None:
        client, _ = self.clients[number]
        frame = client.frame()
        try:
            bodies = wire.FrameReader().feed(frame)
        except ProtocolError:
            self.disconnect(number)
            return
        for body in bodies:
            try:
                self.tell(number, wire.decode_request(body))
            except ProtocolError:
                self.disconnect(number)
                return

    def tell(self, number: int, request: wire.Request) -> None:
        client, _ = self.clients[number]
        before = len(self.node.outbox)
        self.turn(lambda: self.node.receive(number, request, self.now_ns))
        for connection, answer in self.node.outbox[before:]:
            if connection == number and getattr(answer, "id", 0) == getattr(request, "id", -1):
                client.told(request, answer)

    def turn(self, work) -> None:
        before = thread_time()
        work()
        self.longest_s = max(self.longest_s, thread_time() - before)

    def end_job(self) -> None:
        self.jobs += self.disk.jobs
        self.disk.jobs.clear()
        if self.jobs:
            job = self.jobs.pop(self.chance.randrange(len(self.jobs)))
            error = TierUnavailable("fuzz") if self.chance.random() < 0.05 else None
            self.turn(lambda: self.node.disk_completed(job.job, error, self.now_ns))

    def flush(self) -> None:
        for frame in (wire.encode(answer) for _, answer in self.node.outbox):
            wire.decode_answer(memoryview(frame)[4:])
        self.node.outbox.clear()
        self.node.actions.clear()
        self.node.pages.slots.replaced.clear()
        while self.node.closing:
            number = self.node.closing.pop()
            if number in self.clients:
                self.disconnect(number)
        while self.node.unfinished:
            self.turn(lambda: self.node.go_on(self.now_ns))

    def leave(self) -> None:
        """Everybody goes; then nothing may be held."""
        for number, (_, peer) in list(self.clients.items()):
            self.node.disconnected(number, self.now_ns, ended=peer.watched)
        for identity in range(-self.connections, 10):
            self.node.process_ended(identity, self.now_ns)
        while self.jobs or self.disk.jobs:
            self.end_job()
        for _ in range(5):
            self.now_ns += 2_000 * MS
            self.node.advance(self.now_ns)
            self.flush()
            while self.jobs or self.disk.jobs:
                self.end_job()
        self.self_check.run()
        stats = self.node.stats()
        assert stats["sessions"] == []
        assert stats["leases"] == stats["puts"] == stats["waiting_requests"] == 0
        host = stats["host"]
        held = {name: host[f"{name}_bytes"] for name in ("writing", "pinned", "limbo", "retiring")}
        assert not any(held.values()), held


def fuzz_the_state(seed: int, seconds: float, turn_s_max: float) -> None:
    end_s, longest_s = monotonic() + seconds, 0.0
    gc.collect()
    gc.freeze()
    try:
        while monotonic() < end_s:
            fuzzed = Fuzzed(seed)
            fuzzed.run(min(end_s, monotonic() + 1.0))
            longest_s = max(longest_s, fuzzed.longest_s)
            assert longest_s < turn_s_max
            seed += 1
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    finally:
        gc.unfreeze()


def fuzz_a_daemon(scene: Scene, spawn: Spawn, seed: int, seconds: float) -> None:
    """A process whose connections send what they like, and read what they like.

    An engine beside it looks up all the time; how long it waits is measured without what the kernel
    says that it or the node was kept from running. What is left of a busy machine (a log that waits
    for the disk) comes once or twice; a message that holds the node up does so whenever it comes.
    """
    path = scene.daemon.address.removeprefix("unix://")
    engine = LookingUp(scene.daemon.address, scene.daemon.pid)
    hostile = spawn([sys.executable, "-m", "tests.fuzz.hostile", path, str(seed), str(seconds)])
    assert hostile.wait(seconds + 30) == 0, hostile.report()
    sent, waits = json.loads(hostile.stdout), engine.waits()
    said = f"seed {seed}: {sent}, {waits}"
    assert sent["connections"] > 2 * seconds, said
    assert sent["frames"] > 20 * seconds, said
    assert waits["lookups"] > 10 * seconds, said
    assert [one for one in waits["stalls_s"] if one > TURN_S_MAX][STALLS_MAX:] == [], said
    assert " CRITICAL " not in scene.daemon.process.stderr, said
    with scene.client() as honest:
        assert honest.connected
    assert scene.daemon.process.returncode is None


def new_seed() -> int:
    """Of a soak; named where it fails."""
    return SystemRandom().randrange(1 << 32)


def test_no_message_ends_the_state_or_holds_it_for_long():
    fuzz_the_state(seed=1, seconds=SECONDS, turn_s_max=TURN_S_ANYWHERE)


def test_no_bytes_end_the_daemon_or_stay_in_it(frail: Scene, spawn: Spawn):
    fuzz_a_daemon(frail, spawn, seed=1, seconds=SECONDS)


@pytest.mark.soak("socket", minutes=5)
def test_no_message_of_minutes_ends_the_state_or_holds_it_for_long(soak_s: float):
    fuzz_the_state(new_seed(), soak_s, TURN_S_MAX)


@pytest.mark.soak("socket", minutes=5)
def test_no_bytes_of_minutes_end_the_daemon_or_stay_in_it(
    frail: Scene, spawn: Spawn, soak_s: float
):
    fuzz_a_daemon(frail, spawn, new_seed(), soak_s)
