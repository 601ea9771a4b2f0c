"""Goal: what the node decides is carried out in one order, whoever asked for it."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.node.desk import Desk
from kvstore.node.node import Node
from kvstore.node.requests import NodeLimits
from kvstore.protocol import wire
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.page import PrefixKey, SpaceIdentity
from kvstore.state.remote.jobs import Locate, PeerLimits
from kvstore.state.tree.actions import Removed, Stored
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.sessions import Peer
from kvstore.state.tree.slots import Replacement, SlotTable

HELLO = wire.Hello(1, wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR, "engine")


class Line:
    """A connection that writes down what comes on it, and may ask more at once."""

    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen
        self.asks: list[Any] = []

    def answer(self, answer: wire.Answer) -> None:
        self.seen.append(answer)
        for ask in self.asks:
            ask()

    def cut(self) -> None:
        self.seen.append("cut")


@pytest.fixture
def seen() -> list[Any]:
    return []


@pytest.fixture
def later() -> list[Any]:
    """What the desk wants to be called soon."""
    return []


@pytest.fixture
def desk(seen, later) -> Desk:
    limits = NodeLimits(1 << 20, 1_000)
    node = Node("n", b"b" * 16, SlotTable(1 << 16, 2), limits, lambda: b"t" * 16)

    def replace(replaced: list[Replacement]) -> None:
        seen.extend(replaced)
        replaced.clear()

    made = Desk(
        node, SimpleNamespace(replace=replace), lambda actions: seen.append(tuple(actions)),
        lambda: 1, later.append,
    )  # fmt: skip
    made.disk = SimpleNamespace(
        flush=lambda: seen.append("disk"), poll=lambda now_ns: seen.append(("poll", now_ns)),
        stats=lambda: {"live_bytes": 7},
    )  # fmt: skip
    return made


def decide(desk: Desk, number: int) -> None:
    """Let the node have decided one of each kind, in the worst order."""
    space = PrefixTree(0, SpaceIdentity(model="m", kv_dtype="uint8", page_tokens=1))
    key = PrefixKey(b"k" * 32)
    desk.node.actions += [
        Removed(space, 0, [key], "evicted"), Stored(space, 0, [key], PrefixKey(b""), b""),
    ]  # fmt: skip
    desk.node.closing.append(number)
    desk.node.outbox.append((number, wire.Pong(5)))
    desk.node.pages.slots.replaced.append(Replacement(1, 3, in_use=False))


def test_memory_comes_first_then_the_disk_then_answers_then_events(desk, seen):
    number = desk.connect(Peer(1), Line(seen))
    decide(desk, number)
    desk.flush()

    kinds = [type(one) for one in seen]
    assert kinds == [Replacement, str, wire.Pong, str, tuple]
    assert (seen[1], seen[3]) == ("disk", "cut")
    assert [type(one) for one in seen[4]] == [Removed, Stored], "in the order of the decisions"


def test_memory_that_a_failed_job_gave_away_is_there_before_anyone_is_told_of_it(desk, seen):
    number = desk.connect(Peer(1), Line(seen))
    desk.disk.flush = lambda: decide(desk, number)
    desk.flush()

    kinds = [type(one) for one in seen]
    assert kinds.index(Replacement) < kinds.index(wire.Pong)


def test_memory_that_a_failed_fetch_gave_away_is_there_before_anyone_is_told_of_it(desk, seen):
    number = desk.connect(Peer(1), Line(seen))
    desk.node.join(PeerLimits(1 << 20))

    def fail() -> None:
        desk.node.remote.jobs.clear()
        decide(desk, number)

    desk.peers = SimpleNamespace(flush=fail)
    desk.node.remote.jobs.append(
        Locate(1, SpaceIdentity(model="m", kv_dtype="uint8", page_tokens=1), (), b"")
    )
    desk.flush()

    kinds = [type(one) for one in seen]
    assert kinds.index(Replacement) < kinds.index(wire.Pong)


def test_what_an_answer_makes_the_other_end_ask_is_answered_after_it(desk, seen):
    line = Line(seen)
    number = desk.connect(Peer(1), line)
    pings = iter([wire.Ping(8), wire.Ping(9)])
    desk.receive(number, HELLO)
    line.asks.append(lambda: [desk.receive(number, one) for one in pings])
    desk.node.outbox += [(number, wire.Pong(2)), (number, wire.Pong(3))]
    desk.flush()

    answers = [one for one in seen if not isinstance(one, str)]
    assert [one.id for one in answers] == [1, 2, 3, 8, 9]


def test_who_left_gets_no_answer_and_its_number_is_not_used_again(desk, seen):
    number = desk.connect(Peer(1), Line(seen))
    desk.node.outbox.append((number, wire.Pong(5)))
    desk.disconnect(number, ended=True)

    assert not any(isinstance(one, wire.Pong) for one in seen)
    assert desk.connect(Peer(1), Line(seen)) > number


def test_what_one_turn_cannot_end_goes_on_in_the_next_and_is_asked_for_once(
    desk, later, monkeypatch
):
    turns = []

    def go_on(now_ns: int) -> None:
        turns.append(now_ns)
        desk.node.unfinished = len(turns) < 3

    monkeypatch.setattr(desk.node, "go_on", go_on)
    desk.node.unfinished = True
    desk.flush()
    desk.flush()
    assert (turns, len(later)) == ([], 1)
    while later:
        later.pop(0)()
    assert turns == [1, 1, 1]


def test_it_goes_on_with_what_a_flush_has_left(desk, later, monkeypatch):
    disk = desk.node.pages.disk
    monkeypatch.setattr(desk.disk, "flush", lambda: setattr(disk, "unfinished", True))

    desk.flush()

    assert not desk.node.unfinished
    assert len(later) == 1


def test_requests_try_again_once_a_space_is_behind_no_more(desk, monkeypatch):
    noted, node = [], desk.node
    monkeypatch.setattr(type(node.waiting), "note_room", lambda _: noted.append(1))
    node.go_on(1)
    assert not noted
    node.pages.disk._passed = True

    node.go_on(1)
    node.go_on(1)

    assert noted == [1]


def test_without_later_turns_it_goes_on_at_once(desk, monkeypatch):
    turns = []

    def go_on(now_ns: int) -> None:
        turns.append(now_ns)
        desk.node.unfinished = len(turns) < 3

    desk._soon = None
    monkeypatch.setattr(desk.node, "go_on", go_on)
    desk.node.unfinished = True
    desk.flush()
    assert turns == [1, 1, 1]


def test_what_an_operator_began_before_it_was_refused_is_carried_out(desk, seen):
    number = desk.connect(Peer(1), Line(seen))

    def change(_table: object) -> None:
        decide(desk, number)
        raise InvalidArgument("key", "is none")

    with pytest.raises(InvalidArgument):
        desk.operate(change)
    assert any(isinstance(one, wire.Pong) for one in seen)
    desk.advance()  # a failure leaves the desk as it was
    assert seen[-1] == "disk"


def test_an_end_that_fails_does_not_stop_the_desk(desk, seen):
    line = Line(seen)
    number = desk.connect(Peer(1), line)

    def breaks() -> None:
        line.asks.clear()
        raise OSError("gone")

    line.asks.append(breaks)
    with pytest.raises(OSError, match="gone"):
        desk.receive(number, HELLO)
    desk.receive(number, wire.Ping(4))
    assert seen[-1] == wire.Pong(4)


def test_statistics_are_those_of_the_node_and_of_its_disk(desk):
    assert desk.stats().ssd == {"live_bytes": 7}
    assert desk.stats().node == "n"
    desk.disk = None
    assert desk.stats().ssd is None


def test_the_longest_turn_is_named_once_and_all_are_counted(desk):
    ticks = iter([0, 5, 10, 100, 200, 230])
    desk._clock = lambda: next(ticks)
    number = desk.connect(Peer(1), Line([]))

    desk.receive(number, wire.Lookup(1, 0, [0], bytes(96)))
    desk.advance()
    desk.disconnect(number, ended=True)

    assert desk.node.pages.meter.take_longest() == (90, "deadlines")
    assert desk.node.pages.meter.take_longest() == (0, "")
    assert sum(desk.node.pages.meter.loop_turn.counts) == 3


def test_a_later_turn_is_named_by_what_it_went_on_with(desk, later, monkeypatch):
    ticks = iter([0, 5, 100, 190])
    desk._clock = lambda: next(ticks)
    desk.node.pages.ahead.used[0, 0] = desk, 1  # type: ignore[assignment]
    desk.node.unfinished = True
    monkeypatch.setattr(desk.node, "go_on", lambda _: desk.node.pages.ahead.used.clear())
    desk.flush()

    (go_on,) = later
    desk._clock = lambda: next(ticks)
    go_on()

    assert desk.node.pages.meter.take_longest() == (5, "a later turn: slots ahead")


def test_a_turn_that_was_a_request_is_named_by_it_and_by_how_much_it_asked(desk):
    ticks = iter([0, 5])
    desk._clock = lambda: next(ticks)

    desk.receive(desk.connect(Peer(1), Line([])), wire.Lookup(1, 0, [0], bytes(96)))

    assert desk.node.pages.meter.take_longest() == (5, "Lookup of 3 keys")
