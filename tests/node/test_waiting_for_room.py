"""Goal: who waits for room goes on as soon as there is some, whoever else waits for other room."""

from collections.abc import Sequence

import pytest

from bench.node_alone import LARGE_PAGE_BYTES, Clock, Engine, LoneNode, TakesAll
from kvstore.node.awaited import RoomFor
from kvstore.node.node import Node
from kvstore.node.requests import NodeLimits
from kvstore.node.waiting import QUEUES_TICK, SESSION_QUEUES_TICK, Waiter, WaitingRoom
from kvstore.protocol import wire
from kvstore.protocol.page import (
    CanonicalLayout,
    ShardSpec,
    SpaceIdentity,
    page_keys,
)
from kvstore.state.table.pages import PageTable
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.sessions import Peer
from kvstore.state.tree.slots import SlotTable

PAGES = 512
PROMPT_PAGES = 64
MANY = 20
TICK_S = 0.02


class Held:
    """A node whose memory is full of leased pages of two engines, and whose disk ends no write.

    Attributes:
        engines: both have used up the quota of their session.
        leases: of each of them, one for each of its prompts.
        last: the last one's last prompt.
    """

    def __init__(self) -> None:
        self.clock = Clock()
        self.lone = LoneNode(PAGES, "lru", self.clock, at_once=False, ssd_pages=0)
        self.node = self.lone.desk.node
        self.engines = [Engine(self.lone, 1), Engine(self.lone, 2)]
        self.leases: list[list[int]] = [[], []]
        for at, engine in enumerate(self.engines):
            for _ in range(PAGES // len(self.engines) // PROMPT_PAGES):
                prompt = self.lone.keys(PROMPT_PAGES)
                engine.put(prompt)
                self.leases[at].append(engine.acquire(prompt)[0])
                self.clock.skip(1)
        self.node.pages.disk.admission.name = "none"
        self.last = prompt
        self.persist(prompt[:32])

    def persist(self, keys: bytes) -> None:
        """Begin to write pages of the last engine."""
        engine, waiting = self.engines[-1], len(self.node.waiting)
        engine.say(wire.Persist(1, engine.space, engine.shard, keys, wait_ms=60_000))
        assert self.node.pages.disk.busy
        assert len(self.node.waiting) == waiting + 1, "for the write"

    def end_write(self) -> None:
        """The first write that has not ended ends."""
        disk = self.lone.desk.disk
        assert isinstance(disk, TakesAll)
        self.node.disk_completed(disk._begun.popleft(), None, self.clock())

    def begin(self, engine: Engine, pages: int = 1, wait_ms: int = 60_000) -> int:
        """Begin a put that waits; its number."""
        begun, _ = engine.put_messages(self.lone.keys(pages))
        begun.wait_ms, begun.id = wait_ms, begun.put
        engine.say(begun)
        assert not engine.answers
        return begun.put

    def tick(self) -> None:
        """The daemon's tick, with the turns that it asks for; no job of the disk ends."""
        self.clock.skip(TICK_S)
        self.lone.turn("advance", self.lone.desk.advance)
        while self.node.unfinished:
            self.lone.go_on()


@pytest.fixture
def held() -> Held:
    return Held()


def granted(engine: Engine) -> list[int]:
    """The numbers of puts that were granted all their pages, in the order of the answers."""
    answers = [one for one in engine.answers if isinstance(one, wire.PutGranted)]
    assert len(answers) == len(engine.answers)
    assert all(set(one.statuses) == {PageStatus.GRANTED} for one in answers)
    return [one.id for one in answers]


# Whom others hold up


def test_a_put_does_not_wait_for_puts_of_another_size_that_find_no_room(held: Held):
    large = Engine(held.lone, 3, LARGE_PAGE_BYTES, "large")
    for _ in range(MANY):
        held.begin(large)
    number = held.begin(held.engines[0])

    held.engines[0].release(held.leases[0][0])
    held.tick()

    assert granted(held.engines[0]) == [number]
    assert not large.answers


def test_a_put_does_not_wait_for_puts_of_a_session_that_has_used_up_its_quota(held: Held):
    greedy, other = held.engines
    for _ in range(MANY):
        held.begin(greedy)
    number = held.begin(other)

    other.release(held.leases[1][0])
    held.tick()

    assert granted(other) == [number]
    assert not greedy.answers


def test_a_put_does_not_wait_for_another_space_of_its_session(held: Held):
    engine = held.engines[0]
    spec = ShardSpec(layout=CanonicalLayout(128), layers=(0, 32), heads=(0, 16))
    model = SpaceIdentity(model="large", kv_dtype="uint8", page_tokens=64)
    opened = engine.ask(wire.OpenSpace(1, model, [spec]))
    assert isinstance(opened, wire.SpaceOpened)
    for number in range(MANY):
        keys = held.lone.keys(1)
        engine.say(wire.BeginPut(1, 1000 + number, opened.space, 0, keys, b"", wait_ms=60_000))
    number = held.begin(engine)

    engine.release(held.leases[0][0])
    held.tick()

    assert granted(engine) == [number]


def test_puts_for_the_same_room_go_on_in_the_order_in_which_they_came(held: Held):
    engine = held.engines[0]
    numbers = [held.begin(engine, PROMPT_PAGES) for _ in range(3)]
    for lease in held.leases[0][:3]:
        for _ in range(2):
            held.tick()
        engine.release(lease)

    held.tick()

    assert granted(engine) == numbers


def test_engines_whose_puts_wait_for_room_of_one_size_get_it_in_turn(held: Held):
    first, second = held.engines
    numbers = [[held.begin(engine, PROMPT_PAGES) for _ in range(2)] for engine in held.engines]
    order = []
    for _ in range(2):
        first.release(held.leases[0].pop(0))
        second.release(held.leases[1].pop(0))
        held.tick()
        order += [granted(first), granted(second)]

    assert order == [numbers[0][:1], numbers[1][:1], numbers[0], numbers[1]]


# Turns


def test_of_some_queues_one_request_is_tried_for_each_tick_and_one_in_vain_in_each_turn(
    held: Held, monkeypatch: pytest.MonkeyPatch
):
    others = [Engine(held.lone, 10 + at, LARGE_PAGE_BYTES, "large") for at in range(MANY)]
    for engine in others:
        held.begin(engine)
        held.begin(engine)
    tried = count_attempts(monkeypatch)

    held.clock.skip(TICK_S)
    held.node.advance(held.clock())
    turns = [len(tried)]
    while held.node.unfinished:
        held.node.go_on(held.clock())
        turns.append(len(tried) - sum(turns))

    assert turns == [1] * QUEUES_TICK
    assert sorted(tried) == sorted(engine.connection for engine in others[:QUEUES_TICK])
    held.node.go_on(held.clock())
    assert len(tried) == QUEUES_TICK, "nobody is tried in vain in each turn"


def test_when_a_write_ends_one_request_of_each_size_is_tried_in_vain(
    held: Held, monkeypatch: pytest.MonkeyPatch
):
    """An attempt costs milliseconds, and many writes may end a second."""
    for at in range(MANY):
        held.begin(Engine(held.lone, 10 + at, LARGE_PAGE_BYTES, "large"))
    for engine in held.engines:
        held.begin(engine)
    held.persist(held.last[32:64])
    held.tick()
    tried = count_attempts(monkeypatch)

    held.end_write()
    while held.node.unfinished:
        held.node.go_on(held.clock())

    assert sorted(connection > 2 for connection in tried) == [False, True]


def test_a_request_that_was_just_refused_room_is_not_tried_again_before_there_may_be_some(
    held: Held, monkeypatch: pytest.MonkeyPatch
):
    held.tick()
    tried = count_attempts(monkeypatch)

    held.begin(held.engines[0])

    assert len(tried) == 1, "when it came"
    assert not held.node.unfinished


def test_the_first_of_each_session_is_tried_in_turn_however_many_queues_one_has():
    room = WaitingRoom()
    greedy = [room_waiter(b"greedy", space) for space in range(3)]
    other = room_waiter(b"other", 0)
    for one in (*greedy, other):
        room.add(one)
    assert room.take() is None
    room.try_some()

    assert take_in_vain(room) == [greedy[0], other, greedy[1], greedy[2]]
    room.try_some()
    assert take_in_vain(room, 2) == [greedy[0], other]
    room.try_some()
    assert take_in_vain(room) == [greedy[1], other, greedy[2], greedy[0]], "who was not tried first"


def test_a_tick_has_some_queues_of_a_session_tried_those_that_were_tried_longest_ago():
    room = WaitingRoom()
    many = [room_waiter(b"many", space) for space in range(SESSION_QUEUES_TICK + 2)]
    other = room_waiter(b"other", 0)
    for one in (*many, other):
        room.add(one)

    room.try_some()
    assert set(take_in_vain(room)) == {*many[:-2], other}
    room.try_some()
    assert set(take_in_vain(room)) == {*many[:2], *many[-2:], other}


def test_what_makes_room_has_each_tenant_use_and_size_tried_until_one_finds_none():
    room = WaitingRoom()
    first, second = room_waiter(b"a", 0), room_waiter(b"b", 0)
    others = [
        room_waiter(b"c", 1, use="disk"), room_waiter(b"d", 2, tenant="blue"),
        room_waiter(b"e", 3, slot_bytes=2),
    ]  # fmt: skip
    for one in (first, second, *others):
        room.add(one)

    room.note_room()
    assert take_in_vain(room) == [first, *others]
    room.note_room()
    assert take_in_vain(room) == [second, *others], "each in turn"
    room.note_room()
    room.try_some()
    room.note_room()
    assert take_in_vain(room) == [first, second, *others], "a tick has all of them tried"


def test_a_request_that_finds_no_room_keeps_its_place_and_one_that_leaves_is_not_tried():
    room = WaitingRoom()
    first, second = room_waiter(b"a", 0), room_waiter(b"a", 0)
    room.add(first)
    room.add(second)
    for _ in range(2):
        room.note_room()
        assert take_in_vain(room) == [first]
    room.note_room()
    assert room.take() is first
    assert room.take() is second, "there may be room for it as well"
    assert room.add_again(second, second.awaited)
    assert not room.add_again(first, ("page", 1)), "it waits for something else now"
    assert room.awaits_events

    room.note_room()
    assert room.may_go_on
    room.remove(second)
    assert not room.may_go_on
    room.check()


def room_waiter(
    session: bytes, space: int, *, use: str = "put", tenant: str = "red", slot_bytes: int = 1
) -> Waiter:
    """A request that waits for room."""
    awaited = RoomFor(use, tenant, slot_bytes, session, space)
    return Waiter(1, session, None, 32, 0, 1 << 60, awaited)


def take_in_vain(room: WaitingRoom, most: int = 99) -> list[Waiter]:
    """Take requests that find no room."""
    taken: list[Waiter] = []
    while len(taken) < most and (waiter := room.take()) is not None:
        taken.append(waiter)
        assert room.add_again(waiter, waiter.awaited)
        room.check()
    return taken


def count_attempts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The connections of all attempts to begin a put, as they come."""
    tried: list[int] = []
    begin_put = PageTable.begin_put

    def counted(self, process, *arguments):
        tried.append(process.connection)
        return begin_put(self, process, *arguments)

    monkeypatch.setattr(PageTable, "begin_put", counted)
    return tried


# An extent that changes its class

IDENTITY = SpaceIdentity(model="m", kv_dtype="uint8", page_tokens=2)
SHARD = ShardSpec(layout=CanonicalLayout(1024), layers=(0, 1), heads=(0, 1))
PAGE_BYTES = SHARD.page_bytes(IDENTITY)


class Extents:
    """A node with an extent that is full of one tenant's pages; another tenant's puts come."""

    def __init__(self, slots: int) -> None:
        tokens = (bytes([number]) * 16 for number in range(1, 9))
        limits = NodeLimits(1 << 30, 1000)
        table = SlotTable(slots * PAGE_BYTES, 1)
        self.node = Node("n", b"b" * 16, table, limits, lambda: next(tokens))
        for connection, tenant in ((1, "red"), (2, "blue")):
            self.node.connected(connection, Peer(connection, connection))
            hello = wire.Hello(1, wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR, tenant)
            space = SpaceIdentity(model="m", kv_dtype="uint8", page_tokens=2, tenant=tenant)
            self.ask(connection, hello, wire.OpenSpace(2, space, [SHARD]))
        keys = page_keys(range(2 * slots), 2)
        for at in range(0, slots, 128):
            some = keys[at : at + 128]
            self.ask(
                1, wire.BeginPut(3, at + 1, 0, 0, some.packed, some.parent),
                wire.CommitPut(4, at + 1, b"d" * 16 * len(some)),
            )  # fmt: skip
        assert self.node.pages.counts["moved_extents"] == 0

    def ask(self, connection: int, *messages: wire.Request) -> Sequence[wire.Answer]:
        for message in messages:
            self.node.receive(connection, message, 1)
        return self.answers()

    def answers(self) -> list[wire.Answer]:
        found = [answer for _, answer in self.node.outbox]
        self.node.outbox.clear()
        assert not [answer for answer in found if isinstance(answer, wire.Failure)]
        return found

    def begin(self, number: int) -> Sequence[wire.Answer]:
        """Ask for a page of the tenant that comes."""
        keys = page_keys([number, number], 2).packed
        return self.ask(2, wire.BeginPut(number, number, 1, 0, keys, b"", wait_ms=1000))


@pytest.mark.parametrize("slots", [150, 151, 181, 211])
def test_a_put_goes_on_in_the_turn_that_empties_its_extent_however_many_steps_that_takes(slots):
    """Of 151, 181 and 211 pages the last turn takes no step: it only finds the walk at its end."""
    world = Extents(slots)
    assert world.begin(9) == []
    turns = 0
    while world.node.pages.draining.now is not None:
        assert not world.answers()
        assert world.node.unfinished
        world.node.go_on(1)
        turns += 1
    assert turns > 1

    [answer] = world.answers()
    assert isinstance(answer, wire.PutGranted)
    assert set(answer.statuses) == {PageStatus.GRANTED}


def test_a_put_is_refused_in_the_turn_in_which_its_extent_turns_out_to_be_needed():
    world = Extents(150)
    assert world.begin(9) == []
    first = page_keys(range(2), 2).packed
    [acquired] = world.ask(1, wire.Acquire(5, 1, 0, 0, first, 1000))
    assert isinstance(acquired, wire.Acquired)
    answers: list[wire.Answer] = []
    while world.node.pages.draining.now is not None:
        assert not answers
        world.node.go_on(1)
        answers += world.answers()

    [refused] = answers
    assert isinstance(refused, wire.PutGranted)
    assert set(refused.statuses) == {PageStatus.NO_ROOM}


def test_all_puts_go_on_when_a_later_one_empties_the_extent():
    world = Extents(150)
    assert world.begin(9) == []
    answers: list[wire.Answer] = []
    asked = 9
    while not answers:
        assert world.node.pages.draining.now is not None
        asked += 1
        answers += world.begin(asked)

    while world.node.unfinished:
        world.node.go_on(1)
        answers += world.answers()

    assert len(answers) == asked - 8 > 2


def waiting_engines(held: Held, count: int) -> list[Engine]:
    """Engines of which each waits for room for one page."""
    engines = [Engine(held.lone, number) for number in range(3, 3 + count)]
    for engine in engines:
        held.begin(engine)
    return engines


def test_one_that_finds_room_at_a_tick_lets_all_others_try_in_the_same_tick(held: Held):
    engines = waiting_engines(held, QUEUES_TICK + 10)

    held.engines[0].release(held.leases[0][0])
    held.tick()

    assert all(granted(engine) for engine in engines)


def test_a_tick_tries_few_requests_however_many_sessions_wait(
    held: Held, monkeypatch: pytest.MonkeyPatch
):
    waiting_engines(held, 3 * QUEUES_TICK)
    tried = count_attempts(monkeypatch)
    for ticks in (1, 2, 3):
        held.tick()
        assert len(tried) == ticks * QUEUES_TICK
    assert len(set(tried)) == 3 * QUEUES_TICK, "each in its turn"
