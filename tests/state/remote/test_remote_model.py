"""Goal: whatever peers, engines, memory and time do, fetches hold nothing and tell no lie.

The model is small: which jobs are under way, which may still write, and what each page must have.
:meth:`RemoteWorld.check` compares after every step.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from kvstore.protocol import wire
from kvstore.state.remote import located, pages
from kvstore.state.remote.jobs import FetchEnd, Holding
from tests.state.remote.remote_world import GONE, MS, RemoteWorld
from tests.state.world import FULL, FULL_2, PAGE, WINDOW, chain

PATHS = ("abcdef", "abcxyz", "abc", "pqrstuvw", "p")
PEERS = ("p", "q", "r")
paths = st.sampled_from(PATHS)
engines = st.integers(0, 2)
shards = st.integers(0, 2)
WAITS = (0, 10, 500, 10_000)


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = RemoteWorld(
            in_flight_pages=5, extents=2, quota_pages=10, shards=[FULL, FULL_2, WINDOW]
        )
        self.engines = [self.world.engine() for _ in range(3)]
        #: Engine → what of it waits: the latest moment at which it must be answered.
        self.waits: dict[int, int] = {}

    # ---- engines ----

    @rule(engine=engines, path=paths, wait_ms=st.sampled_from(WAITS))
    def look_up(self, engine: int, path: str, wait_ms: int) -> None:
        self.answered()
        if engine in self.waits:
            return
        answer = self.world.lookup(self.engines[engine], path, wait_ms, (0, 1, 2))
        self.note(engine, answer, wait_ms)
        if isinstance(answer, wire.Found):
            assert answer.pages + answer.pending <= len(path)
            assert answer.pages + answer.remote <= len(path)
            assert (answer.remote > 0) == (answer.remote_s > 0)

    @rule(
        engine=engines, path=paths, start=st.integers(0, 2), shard=shards,
        wait_ms=st.sampled_from(WAITS),
    )  # fmt: skip
    def acquire(self, engine: int, path: str, start: int, shard: int, wait_ms: int) -> None:
        self.answered()
        if engine in self.waits:
            return
        start = min(start, len(path) - 1)
        answer = self.world.acquire(self.engines[engine], path, start, wait_ms, shard)
        self.note(engine, answer, min(wait_ms, 2_050))

    def note(self, engine: int, answer: wire.Answer | None, wait_ms: int) -> None:
        if answer is None:
            assert wait_ms, "who does not wait is answered at once"
            self.waits[engine] = self.world.now_ns + wait_ms * MS

    @rule(engine=engines)
    def release_all(self, engine: int) -> None:
        process = self.world.node.processes[self.engines[engine]]
        for lease in list(process.leases):
            self.world.ask(self.engines[engine], wire.Release(lease))

    @rule(engine=engines, path=paths, commits=st.booleans())
    def put(self, engine: int, path: str, commits: bool) -> None:
        self.answered()
        statuses = self.world.begin(self.engines[engine], path)
        if commits and 0 in statuses:
            self.world.commit(self.engines[engine], path, statuses)

    @rule(engine=engines, ended=st.booleans())
    def disconnect(self, engine: int, ended: bool) -> None:
        gone = self.engines[engine]
        pid = self.world.node.processes[gone].peer.identity
        self.world.desk.disconnect(gone, ended=ended)
        self.world.desk.process_ended(pid)
        self.waits.pop(engine, None)
        self.engines[engine] = self.world.engine()
        self.world.check()

    @rule(path=paths, shard=shards)
    def corrupt(self, path: str, shard: int) -> None:
        """A reader reports a page, and it leaves with all below it."""
        space = self.world.space
        node = space.nodes.get(chain(path)[0])
        if node is not None:
            self.world.desk.operate(lambda table: table.residents.drop(node, shard, "corrupt"))
            self.world.check()

    @rule(count=st.integers(1, 12))
    def press(self, count: int) -> None:
        """Pages of others need memory."""
        process = self.world.node.processes[self.engines[0]]
        if process.session.free_bytes >= PAGE:
            for path in "0123456789ABC"[:count]:
                self.put(0, path, commits=True)

    # ---- directory and peers ----

    @rule(data=st.data())
    def answer_question(self, data: st.DataObject) -> None:
        if self.world.locates:
            sizes = st.integers(0, 9)
            self.world.tell(*[(peer, data.draw(sizes)) for peer in PEERS])

    @rule(data=st.data(), settled=st.booleans())
    def end_job(self, data: st.DataObject, settled: bool) -> None:
        if self.world.reads:
            job = data.draw(st.sampled_from(list(self.world.reads.values())))
            came = data.draw(st.integers(0, len(job.slots)))
            digests = None if settled else b"?" * 16 * came
            self.world.end(job, came, settled=settled, digests=digests)

    @rule(data=st.data())
    def end_late(self, data: st.DataObject) -> None:
        """A job that was given up ends, with whatever; its word does not count any more."""
        if self.world.late:
            job = data.draw(st.sampled_from(list(self.world.late.values())))
            del self.world.late[job.job]
            told = data.draw(st.sampled_from([b"", b"?" * 16 * len(job.slots)]))
            self.world.desk.peer_fetched(FetchEnd(job.job, told, GONE, settled=True))
            self.world.check()

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        if self.world.late:
            self.world.settle(data.draw(st.sampled_from(list(self.world.late.values()))))

    @rule(data=st.data())
    def tell_nonsense(self, data: st.DataObject) -> None:
        """Ends and answers of what is not known, or not lost."""
        job = data.draw(st.integers(0, 50))
        if job not in self.world.late:
            self.world.desk.peer_settled(job)
        self.world.desk.located(data.draw(st.integers(10_000, 10_010)), [Holding("p", 3)])
        self.world.desk.peer_fetched(FetchEnd(1 << 40, b"", None, settled=True))
        self.world.check()

    # ---- time ----

    @rule(forward_ms=st.sampled_from((1, 20, 60, 700, 2100, 5000)))
    def pass_time(self, forward_ms: int) -> None:
        self.pass_ms(forward_ms)

    def pass_ms(self, forward_ms: int) -> None:
        self.world.go(forward_ms * MS)
        self.give_up()
        self.answered()
        for engine, until_ns in self.waits.items():
            assert self.world.now_ns < until_ns, f"engine {engine} waits past its deadline"

    def give_up(self) -> None:
        """The jobs whose deadline has passed may write until they have settled."""
        for job in list(self.world.reads.values()):
            if job.deadline_ns <= self.world.now_ns:
                self.world.late[job.job] = self.world.reads.pop(job.job)
        self.world.check()

    def answered(self) -> None:
        for engine in list(self.waits):
            if not self.world.node.waiting.of(self.engines[engine]):
                del self.waits[engine]

    # ---- the end ----

    def teardown(self) -> None:
        world = self.world
        self.give_up()
        for job in list(world.reads.values()):
            world.end(job, len(job.slots))
        while world.reads or world.late:
            world.end_all()
            for job in list(world.late.values()):
                world.settle(job)
        self.pass_ms(60_000)
        for engine in self.engines:
            pid = world.node.processes[engine].peer.identity
            world.desk.disconnect(engine, ended=True)
            world.desk.process_ended(pid)
        world.check_nothing_held()
        world.go(located.KEPT_NS + located.LOCATE_NS)
        assert len(world.remote.chains) == 0


def explore(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip


def test_fetches_hold_nothing_and_tell_no_lie(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pages, "PART_BYTES_MIN", PAGE)
    explore(60, 40)


@pytest.mark.soak("simulation", minutes=2)
@pytest.mark.timeout(1200)
def test_fetches_hold_nothing_in_long_histories(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pages, "PART_BYTES_MIN", PAGE)
    explore(2500, 60)
