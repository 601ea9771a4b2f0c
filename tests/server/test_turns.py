"""Goal: operators' work gets one short turn at a time; what goes wrong in it changes nothing."""

import asyncio
import logging
import socket
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvstore.config import EventsConfig, SocketConfig
from kvstore.node.desk import Desk
from kvstore.node.node import Node
from kvstore.node.requests import NodeLimits
from kvstore.protocol.errors import CapacityError, InvalidArgument
from kvstore.server import operations, turns
from kvstore.server.channel import (
    ASKS_MAX,
    Abandon,
    Answered,
    Ask,
    Caller,
    Channel,
    FromAdmin,
    Refused,
)
from kvstore.server.dispatch import Dispatcher
from kvstore.server.operate import OperatorRequests
from kvstore.server.publish import Publication
from kvstore.server.refusal import Refusal
from kvstore.server.status import NodeStatus
from kvstore.server.turns import TURN_S, Turns, Work
from kvstore.state.table.invariants import check
from kvstore.state.tree.slots import SlotTable
from tests.state.disk.disk_world import DiskWorld
from tests.state.world import World

ME = Caller("operate", "10.0.0.7:4711")


class Loop:
    """A loop whose time passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.later: list[tuple[float, Any, tuple[Any, ...]]] = []

    def call_later(self, delay: float, call: Any, *arguments: Any) -> SimpleNamespace:
        entry = (self.now + delay, call, arguments)
        self.later.append(entry)
        return SimpleNamespace(cancel=lambda: entry in self.later and self.later.remove(entry))

    def run(self) -> None:
        """Until nothing is left to be called."""
        for _ in range(10_000):
            if not self.later:
                return
            self.step()
        pytest.fail("it never ends")

    def step(self) -> None:
        entry = min(self.later, key=lambda one: one[0])
        self.later.remove(entry)
        self.now = max(self.now, entry[0])
        entry[1](*entry[2])


@pytest.fixture
def loop(monkeypatch) -> Loop:
    made = Loop()
    monkeypatch.setattr(turns.asyncio, "get_running_loop", lambda: made)
    monkeypatch.setattr(turns, "perf_counter", lambda: made.now)
    return made


@pytest.fixture
def node() -> Node:
    return Node("n", b"b" * 16, SlotTable(1 << 16, 1), NodeLimits(1, 1), lambda: b"t" * 16)


def working(loop: Loop, seconds: float, steps: int, seen: list[str], name: str = "") -> Work[str]:
    for _ in range(steps):
        loop.now += seconds
        seen.append(name)
        yield None
    return name


# Turns


def at(node: Node) -> Desk:
    """The desk of a node whose memory nobody looks at."""
    return Desk(node, SimpleNamespace(replace=list.clear), lambda _actions: None)


def test_all_work_together_gets_a_turn_and_then_the_others_as_long(loop, node):
    ends: list[float] = []
    desk = at(node)
    desk.flush = lambda: ends.append(loop.now)
    work = Turns(desk)
    seen: list[str] = []
    for name in "abc":
        work.start(working(loop, TURN_S / 4, 8, seen, name), lambda _result: None)
    loop.run()

    assert "".join(seen[:8]) == "aaaaabca", "the first had begun when the others came"
    assert len(work) == 0
    apart = [after - before for before, after in pairwise(ends)]
    assert apart[:-1] == pytest.approx([2 * TURN_S] * (len(apart) - 1)), "a pause and a turn"


def test_a_long_turn_is_called_after_the_work_whose_step_was_longest(loop, node):
    desk = at(node)
    work = Turns(desk, "an operator's request")
    for name, step_s in (("first", TURN_S / 8), ("second", 4 * TURN_S), ("third", TURN_S / 8)):
        work.start(working(loop, step_s, 2, [], name), lambda _result: None, name)
    loop.run()

    took_ns, what = desk.node.pages.meter.take_longest()
    assert what == "an operator's request: second"
    assert took_ns >= 4e9 * TURN_S


def test_work_that_waits_takes_no_turn_until_then(loop, node):
    work, woke = Turns(at(node)), []

    def waits() -> Work[None]:
        yield 5.0
        woke.append(loop.now)

    work.start(waits(), lambda _result: None)
    loop.run()

    assert woke[0] >= 5.0


def test_what_is_begun_in_a_turn_has_its_own(loop, node):
    work, order = Turns(at(node)), []

    def inner() -> Work[None]:
        order.append("inner")
        yield from ()

    def outer() -> Work[None]:
        work.start(inner(), lambda _result: order.append("inner ended"))
        order.append("outer")
        yield from ()

    work.start(outer(), lambda _result: order.append("outer ended"))
    loop.run()

    assert order == ["outer", "outer ended", "inner", "inner ended"]


@pytest.mark.parametrize(
    ("error", "status", "code", "field"),
    [
        (InvalidArgument("key", "is none"), 400, "invalid_argument", "key"),
        (CapacityError("full"), 409, "capacity", ""),
        (Refusal(418, "teapot", "short", "stout"), 418, "teapot", "stout"),
    ],
)
def test_what_is_refused_is_told_and_the_others_go_on(loop, node, error, status, code, field):
    work, results = Turns(at(node)), []

    def refused() -> Work[None]:
        yield None
        raise error

    work.start(refused(), results.append)
    work.start(working(loop, 0, 3, [], "other"), results.append)
    loop.run()

    (told,) = [one for one in results if isinstance(one, Refusal)]
    assert (told.status, told.code, told.field) == (status, code, field)
    assert "other" in results


def test_what_is_our_own_mistake_is_not_caught(loop, node):
    work, results = Turns(at(node)), []

    def wrong() -> Work[None]:
        yield None
        raise AssertionError("the state is wrong")

    def go_on() -> None:
        work.start(wrong(), results.append)
        loop.run()

    with pytest.raises(AssertionError, match="the state is wrong"):
        go_on()
    assert results == []


def test_work_that_nobody_waits_for_ends_where_it_is(loop, node):
    work, seen, results = Turns(at(node)), [], []
    begun = work.start(working(loop, TURN_S, 100, seen), results.append)
    loop.step()
    before = len(seen)
    work.abandon(begun)
    loop.run()

    assert (len(seen), results, len(work)) == (before, [], 0)


def test_nothing_is_done_once_turns_are_closed(loop, node):
    work, seen = Turns(at(node)), []
    work.start(working(loop, TURN_S, 100, seen), lambda _result: pytest.fail("it ended"))
    work.close()
    before = len(seen)
    loop.run()

    assert len(seen) == before


# What the admin process asks


class Operators:
    """A dispatcher, and what it answers."""

    def __init__(self, loop: Loop, node: Node) -> None:
        self.loop = loop
        self.sent: list[Answered | Refused] = []
        desk = at(node)
        memory = SimpleNamespace()
        off = Publication(EventsConfig(endpoint=""), SocketConfig(), "n", bytes(16))
        status = NodeStatus(desk, memory, "lru", 0.0, off)
        self.turns = Turns(desk)
        self.dispatcher = Dispatcher(node, memory, status, self.turns, self.sent.append)
        self._number = 0

    def begin(self, name: str, arguments: object) -> int:
        self._number += 1
        packed = msgspec.Raw(msgspec.msgpack.encode(arguments))
        self.dispatcher.ask(Ask(self._number, name, ME, packed))
        return self._number

    def ask(self, asked: operations.Operation) -> Any:
        number = self.begin(type(asked).__name__, asked)
        self.loop.run()
        (answer,) = [one for one in self.sent if one.id == number]
        return msgspec.msgpack.decode(answer.result) if isinstance(answer, Answered) else answer


def test_a_policy_is_changed_a_few_leaves_at_a_time(loop):
    """Those that wait for the policy before; else one turn would move all of them."""
    leaves, world = 300, World(extents=1, slots_each=300)
    node = Node("n", b"b" * 16, world.slots, NodeLimits(1, 1), lambda: b"t" * 16)
    world.table = node.pages
    engine = world.process()
    space = world.space(engine)
    for number in range(leaves):
        world.store(engine, space, chr(0x1000 + number))
    node.pages.eviction.change_policy("lfu")
    desk = at(node)
    status = NodeStatus(desk, SimpleNamespace(), "lru", 0.0, None)
    asked = OperatorRequests(node.pages, SimpleNamespace(), status, Turns(desk))

    steps = len(list(asked.set_policy(operations.SetPolicy(name="lru"), ME)))

    assert steps >= leaves // 64
    assert node.pages.eviction.policy == "lru"


def test_a_quota_that_ended_and_began_anew_is_told_only_of_pages_that_were_queued_for_it(loop):
    world = DiskWorld(write="through", extents=60)
    for number in range(200):
        world.store(world.me, world.mine, chr(0x5000 + number))
    world.end_all()
    assert sum(node.on_disk > 0 for node in world.mine.nodes.values()) == 200
    jobs: list[Any] = []
    turns = SimpleNamespace(start=lambda work, _ended, _name: jobs.append(work))
    asked = OperatorRequests(world.table, SimpleNamespace(), SimpleNamespace(others=None), turns)

    def limit(quota: int) -> None:
        wanted = operations.SetLimits(space=world.mine.label, quota_bytes=quota, tier="ssd")
        assert not list(asked.limit(wanted, ME))

    limit(1 << 30)
    for _ in range(3):
        next(jobs[0])
    limit(0)
    limit(1 << 30)

    for job in jobs:
        for _ in job:
            check(world.table)
    leaves = world.disk.limits.leaves_of(world.mine)
    assert leaves is not None
    assert leaves.all_offered
    assert len(leaves.queued) == 200
    asked.close()


@pytest.fixture
def operators(loop, node) -> Iterator[Operators]:
    made = Operators(loop, node)
    yield made
    made.turns.close()
    made.dispatcher.close()


def test_an_operation_is_answered(operators):
    assert operators.ask(operations.PingNode()) == {"status": "ok"}
    assert operators.ask(operations.ListJobs()) == {"jobs": []}
    refused = operators.ask(operations.Unpin(pin=7))
    assert (refused.status, refused.code, refused.field) == (404, "not_found", "pin")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("Nonsense", {}), ("__init__", {}), ("Pin", {"space": 1}), ("Pin", []),
        ("ListPages", {"space": "x", "limit": 0}), ("ListPages", {"space": "x", "cursor": "-1"}),
        ("FindRuns", {"page_tokens": 1, "keys": b"x" * (32 * 1025)}), ("Unpin", {"pin": -1}),
        ("Move", {"space": "x", "keys": ["a"] * 10_001}), ("ListPages", {"space": "x" * 300}),
        ("Verify", {"deadline_s": float("nan")}), ("ListPages", {"space": "x", "age_min_s": 1e13}),
    ],
)  # fmt: skip
def test_what_the_admin_process_would_not_ask_is_refused(operators, name, arguments):
    number = operators.begin(name, arguments)
    operators.loop.run()

    (told,) = operators.sent
    assert isinstance(told, Refused)
    assert (told.id, told.status, told.code) == (number, 400, "invalid_argument")


def test_more_operations_than_connections_are_refused(operators):
    def never() -> Work[None]:
        while True:
            yield 10.0

    operators.dispatcher._handlers["ListQuotas"] = (operations.ListQuotas, lambda _asked: never())
    for _ in range(ASKS_MAX):
        operators.begin("ListQuotas", {})
    assert operators.sent == []
    operators.begin("ListQuotas", {})
    (told,) = operators.sent
    assert (told.status, told.code) == (503, "busy")

    operators.dispatcher.abandon(Abandon(1))
    operators.begin("ListQuotas", {})
    assert len(operators.sent) == 1, "there is room again"
    operators.dispatcher.forget()
    assert len(operators.turns) == 0


def test_an_answer_that_is_no_text_is_an_error_of_one_request(operators):
    operators.dispatcher._handlers["ListQuotas"] = (
        operations.ListQuotas,
        lambda _asked: told("\ud800"),
    )

    assert operators.ask(operations.ListQuotas()).status == 500
    assert operators.ask(operations.ListJobs()) == {"jobs": []}


def told(value: object) -> Work[object]:
    yield from ()
    return value


def test_every_change_leaves_a_line_with_who_what_and_how_many(operators, caplog):
    caplog.set_level(logging.INFO)
    operators.ask(operations.SetPolicy(name="lfu"))
    operators.ask(operations.Unpin(pin=3))
    operators.ask(operations.Clear(all=True))
    operators.ask(operations.ListJobs())
    lines = [(one.message, one.fields) for one in caplog.records]

    by = {"role": ME.role, "address": ME.address}
    changed, refused, ended, begun = lines
    assert changed[0] == "operation done"
    assert changed[1] == {**by, "operation": "SetPolicy", "name": "lfu", "previous": "lru"}
    assert refused[0] == "operation refused"
    assert refused[1].items() >= {**by, "operation": "Unpin", "pin": 3, "code": "not_found"}.items()
    if begun[0] == "job ended":
        begun, ended = ended, begun
    assert begun[1].items() >= {**by, "operation": "Clear", "all": True, "job": 1}.items()
    assert ended[1].items() >= {**by, "job": 1, "kind": "clear", "pages": 0}.items()
    assert all(one.spared for one in caplog.records), "none of them may be left out"


# The channel


def test_what_is_no_message_closes_the_channel():
    async def run(data: bytes) -> tuple[list[object], bool]:
        received: list[object] = []
        lost = asyncio.Event()
        channel = Channel(FromAdmin, received.append, lost.set, 64)
        mine, its = socket.socketpair()
        mine.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=mine)
        with its:
            its.sendall(data)
            await asyncio.wait_for(lost.wait(), 10)
        return received, channel.closed

    long = b"\x41\x00\x00\x00" + bytes(65)
    for data in (b"\xff" * 64, b"\x02\x00\x00\x00\x91\x63", b"\x01\x00\x00\x00\x01", long):
        assert asyncio.run(run(data)) == ([], True)
