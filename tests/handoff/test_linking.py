"""Goal: slow ranks hold each other up no more than they must, and who fails is named."""

import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import pytest

from kvstore.handoff import connecting, decode
from kvstore.handoff.connecting import link_all, link_to
from kvstore.handoff.links import LinkThreads
from kvstore.handoff.peers import PeerRank
from kvstore.handoff.ranks import RankPart, plan_ranks
from kvstore.handoff.registry import RankRecord
from kvstore.handoff.shape import PoolShape
from kvstore.handoff.states import State
from kvstore.handoff.tables import LinkSource
from kvstore.protocol.errors import (
    InvalidArgument,
    KVStoreError,
    PeerUnreachable,
    ProtocolError,
    TransferTimeout,
)
from tests.handoff.ranked import BLOCK_TOKENS, HEADS, ranked
from tests.handoff.test_unequal_ranks import split

SHAPE = PoolShape(2, 2, 64, 4, 8)
LONG_NS = 60 * 10**9
WAIT_S, SOON_S = 10.0, 0.2


def ranks_of(count: int, data_ranks: int = 1) -> list[PeerRank]:
    """So many ranks of prefill that hold the same."""
    share = plan_ranks([RankPart((0, 1), (0, 1))], [RankPart((0, 1), (0, 1))]).shares[0]
    found = []
    for rank in range(count):
        record = RankRecord(
            rank, f"127.0.0.1:{1_000 + rank}", "", 0, (0, 1), (0, 1), SHAPE, "", ["tcp"], 1, 1.0,
            count, data_ranks - 1, data_ranks,
        )  # fmt: skip
        found.append(PeerRank(record, share, LinkSource(rank, SHAPE.whole)))
    return found


class SlowRanks:
    """Ranks to which a link is made when a gate opens."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.lock = threading.Lock()
        self.inside: set[int] = set()
        self.most = 0
        self.made: list[int] = []
        self.wrong: dict[int, Exception] = {}

    def make(self, rank: PeerRank, until_ns: int) -> None:
        number = rank.record.rank
        with self.lock:
            self.inside.add(number)
            self.most = max(self.most, len(self.inside))
        try:
            if number in self.wrong:
                raise self.wrong[number]
            assert self.gate.wait(30)
            self.made.append(number)
        finally:
            with self.lock:
                self.inside.discard(number)


def in_thread(call) -> tuple[threading.Thread, list[Exception]]:
    raised: list[Exception] = []

    def run() -> None:
        try:
            call()
        except KVStoreError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


def test_links_to_slow_ranks_are_made_side_by_side_as_many_as_may_be(wait_until):
    slow = SlowRanks()
    until_ns = time.monotonic_ns() + LONG_NS
    thread, raised = in_thread(lambda: link_all(ranks_of(40), slow.make, until_ns))
    wait_until(lambda: len(slow.inside) == connecting.LINKING_MAX)
    assert slow.made == []
    slow.gate.set()
    thread.join()

    assert raised == []
    assert sorted(slow.made) == list(range(40)), "each once"
    assert slow.most == connecting.LINKING_MAX


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PeerUnreachable("nobody"), PeerUnreachable),
        (ProtocolError("nonsense"), ProtocolError),
        (InvalidArgument("heads", "others"), InvalidArgument),
    ],
)
def test_no_more_links_are_begun_when_one_has_failed_which_is_named(
    error, kind, wait_until, monkeypatch
):
    calls: list[Future] = []

    class Threads(ThreadPoolExecutor):
        def submit(self, *args):
            calls.append(super().submit(*args))
            return calls[-1]

    monkeypatch.setattr(connecting, "ThreadPoolExecutor", Threads)
    slow = SlowRanks()
    slow.wrong = {3: error}
    until_ns = time.monotonic_ns() + LONG_NS
    thread, raised = in_thread(lambda: link_all(ranks_of(40, 2), slow.make, until_ns))
    wait_until(lambda: len(calls) == 40 and calls[3].done())
    assert thread.is_alive(), "it waits for those that are being made"
    slow.gate.set()
    thread.join()

    assert type(raised[0]) is kind
    assert "rank 3 of group 1 at 127.0.0.1:1003: " in str(raised[0])
    assert getattr(raised[0], "field", "") == getattr(error, "field", "")
    assert slow.inside == set()
    assert len(slow.made) < connecting.LINKING_MAX, "those that were begun before"


def test_a_fault_of_ours_while_links_are_made_is_not_hidden():
    slow = SlowRanks()
    slow.wrong = {1: ZeroDivisionError()}
    slow.gate.set()
    with pytest.raises(ZeroDivisionError):
        link_all(ranks_of(3), slow.make, time.monotonic_ns() + LONG_NS)


@pytest.mark.parametrize("count", [1, 5])
def test_no_link_is_begun_when_the_time_for_all_is_over(count):
    slow = SlowRanks()
    with pytest.raises(PeerUnreachable, match=rf"rank \d at .*no time is left to link {count} "):
        link_all(ranks_of(count), slow.make, time.monotonic_ns())
    assert slow.most == 0


def test_no_connection_is_made_after_the_time_for_all():
    class Silent:
        def greet(self, *_):
            pytest.fail("it is connected")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        (rank,) = ranks_of(1)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        rank = rank._replace(record=msgspec.structs.replace(rank.record, address=address))
        with pytest.raises(TransferTimeout):
            link_to(rank, "p", Silent(), None, time.monotonic_ns())


def test_a_manager_waits_for_all_its_slow_ranks_at_once(wait_until, monkeypatch):
    link_to, slow = decode.link_to, SlowRanks()
    limits = set()

    def late(rank, peer, greeter, tls, until_ns):
        slow.make(rank, until_ns)
        limits.add(until_ns)
        return link_to(rank, peer, greeter, tls, until_ns)

    monkeypatch.setattr(decode, "link_to", late)
    before_ns = time.monotonic_ns()
    with ranked(split(heads=HEADS), split()) as engines:
        engines.decode[0].receiver(1, engines.registry.url, BLOCK_TOKENS)
        wait_until(lambda: len(slow.inside) == HEADS)
        after_ns = time.monotonic_ns()
        slow.gate.set()
        wait_until(lambda: engines.decode[0].stats()["links"] == HEADS)
    (until_ns,) = limits
    total_ns = int(connecting.LINKING_S * 1e9)
    assert before_ns + total_ns <= until_ns <= after_ns + total_ns


def test_the_failure_of_a_handoff_names_the_rank_that_cannot_be_reached(wait_until, monkeypatch):
    link_to = decode.link_to

    def broken(rank, *arguments):
        if rank.record.rank == 2:
            raise PeerUnreachable("nobody listens there")
        return link_to(rank, *arguments)

    monkeypatch.setattr(decode, "link_to", broken)
    with ranked(split(heads=HEADS), split()) as engines:
        receiver = engines.decode[0].receiver(1, engines.registry.url, BLOCK_TOKENS)
        wait_until(lambda: receiver.state is State.FAILED)
        at = engines.prefill[2].address
        assert receiver.failure.message == f"rank 2 at {at}: nobody listens there"
        wait_until(lambda: engines.decode[0].stats()["threads"] == 0)


def test_who_waits_for_all_threads_waits_for_one_that_is_being_started(monkeypatch):
    threads, real, ended = LinkThreads(), threading.Thread.start, threading.Event()

    def wait():
        threads.join(WAIT_S)
        ended.set()

    waiting = threading.Thread(target=wait)

    def start(self):
        if self.name == "late":
            waiting.start()
            assert not ended.wait(SOON_S), "it is not running, and must not be passed over"
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    threads.start(lambda: None, "late")
    waiting.join(WAIT_S)
    assert ended.is_set()
