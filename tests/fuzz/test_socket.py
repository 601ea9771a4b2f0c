"""Goal: whatever clients send, the node goes on, no turn of it is long, and nothing stays held."""

import gc
import json
import sys
from collections.abc import Callable
from random import Random, SystemRandom
from time import monotonic, thread_time
from types import SimpleNamespace

import pytest

from kvstore.node.describe import describe
from kvstore.node.desk import Desk
from kvstore.node.node import Node
from kvstore.node.requests import NodeLimits
from kvstore.protocol import wire
from kvstore.protocol.errors import KVStoreError, ProtocolError, TierUnavailable
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

SECONDS = 3.0
TURN_S_MAX = 0.05
"""What one turn may take; the ten minutes of the soak hold it."""
TURN_S_ANYWHERE = 0.5
"""A turn that grows with what a client sends takes longer than this on any machine."""
STALLS_MAX = 2
"""Lookups that may wait for longer than such a turn; see :func:`fuzz_a_daemon`."""
MS = 1_000_000


class StillTier:
    """An SSD tier of which nothing moves: its jobs end when the test says so."""

    def __init__(self, node: Node, pages: DiskPages) -> None:
        self._node = node
        self._pages = pages
        self.jobs: list[DiskJob] = []
        self.ended: list[tuple[int, KVStoreError | None]] = []

    def flush(self) -> None:
        self.jobs += self._pages.jobs
        self._pages.jobs.clear()

    def poll(self, now_ns: int) -> None:
        ended, self.ended = self.ended, []
        for job, error in ended:
            self._node.disk_completed(job, error, now_ns)


class Line:
    """One connection: keeps what it was told, and whether it was cut."""

    def __init__(self) -> None:
        self.answers: list[wire.Answer] = []
        self.is_cut = False

    def answer(self, answer: wire.Answer) -> None:
        self.answers.append(answer)

    def cut(self) -> None:
        self.is_cut = True


class Fuzzed:
    """A node with an SSD tier of which nothing moves, and its clients."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = Random(seed)
        limits = NodeLimits(1 << 20, 1000, unwatched_ns=50 * MS)
        slots = SlotTable(1 << 16, 16)
        self.node = Node("n", b"b" * 16, slots, limits, lambda: chance.randbytes(16))
        rules = DiskRules(
            chance.choice(list(WritePolicy)), chance.choice(list(SyncPolicy)), 5 * MS, 1 << 18,
            20 * MS,
        )  # fmt: skip
        self.node.pages.residents.disk = DiskPages(
            self.node.pages.residents, SegmentLog(8, 1 << 17), Admission("all", 0, 1 << 20), rules
        )
        self.now_ns = 1
        #: What the desk goes on with in a later turn.
        self.later: list[Callable[[], None]] = []
        memory = SimpleNamespace(replace=list.clear)
        self.desk = Desk(
            self.node, memory, lambda _actions: None, lambda: self.now_ns, self.later.append
        )
        self.disk = self.desk.disk = StillTier(self.node, self.node.pages.disk)
        self.clients: dict[int, tuple[Client, Peer, Line]] = {}
        self.connections = 0
        self.longest_s = 0.0

    def run(self, end_s: float) -> None:
        steps = 0
        while monotonic() < end_s:
            steps += 1
            self.step()
            self.desk.self_check.step()
            if steps % 50 == 0:
                self.desk.self_check.run()
        self.leave()

    def step(self) -> None:
        roll = self.chance.random()
        if len(self.clients) < 4:
            self.connect()
        elif roll < 0.01:
            self.disconnect(self.chance.choice(list(self.clients)))
        elif roll < 0.02:
            _, peer, _ = self.chance.choice(list(self.clients.values()))
            if peer.watched:
                self.turn(lambda: self.desk.process_ended(peer.identity))
        elif roll < 0.2:
            self.now_ns += self.chance.choice((0, 1, MS, 100 * MS))
            self.turn(self.desk.advance)
        elif roll < 0.4:
            self.end_job()
        else:
            self.say(self.chance.choice(list(self.clients)))
        self.settle()

    def connect(self) -> None:
        self.connections += 1
        identity = self.chance.randrange(1, 6)
        if self.chance.random() >= 0.7:
            identity = -self.connections
        peer = Peer(identity, watched=0 < identity < 5)
        client, line = Client(self.chance), Line()
        number = self.desk.connect(peer, line)
        self.clients[number] = client, peer, line
        self.tell(number, wire.Hello(1, 1, 2, "fuzz", b"", b""))
        self.tell(number, client.open_space())

    def disconnect(self, number: int) -> None:
        _, peer, _ = self.clients.pop(number)
        ended = peer.watched and self.chance.random() < 0.5
        self.turn(lambda: self.desk.disconnect(number, ended=ended))

    def say(self, number: int) -> None:
        client, _, _ = self.clients[number]
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
        client, _, line = self.clients[number]
        before = len(line.answers)
        self.turn(lambda: self.desk.receive(number, request))
        for answer in line.answers[before:]:
            if getattr(answer, "id", 0) == getattr(request, "id", -1):
                client.told(request, answer)

    def turn(self, work: Callable[[], None]) -> None:
        before = thread_time()
        work()
        self.longest_s = max(self.longest_s, thread_time() - before)

    def end_job(self) -> None:
        if self.disk.jobs:
            job = self.disk.jobs.pop(self.chance.randrange(len(self.disk.jobs)))
            error = TierUnavailable("fuzz") if self.chance.random() < 0.05 else None
            self.disk.ended.append((job.job, error))
            self.turn(self.desk.poll_disk)

    def settle(self) -> None:
        """What was said goes out, who was cut goes, and what waits for its turn is done."""
        for number, (_, _, line) in list(self.clients.items()):
            answers, line.answers = line.answers, []
            for frame in map(wire.encode, answers):
                wire.decode_answer(memoryview(frame)[4:])
            if line.is_cut:
                self.disconnect(number)
        while self.later:
            self.turn(self.later.pop())

    def leave(self) -> None:
        """Everybody goes; then nothing may be held."""
        for number, (_, peer, _) in list(self.clients.items()):
            self.desk.disconnect(number, ended=peer.watched)
        self.clients.clear()
        for identity in range(-self.connections, 10):
            self.desk.process_ended(identity)
        for _ in range(5):
            while self.disk.jobs:
                self.end_job()
            self.now_ns += 2_000 * MS
            self.desk.advance()
            self.settle()
        while self.disk.jobs:
            self.end_job()
        self.desk.self_check.run()
        stats = describe(self.node)
        assert stats.sessions == []
        assert stats.leases == stats.puts == stats.waiting_requests == 0
        host = stats.host
        assert host.writing_bytes == host.pinned_bytes == 0
        assert host.limbo_bytes == host.retiring_bytes == 0


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
