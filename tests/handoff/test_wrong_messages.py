"""Goal: whatever a peer sends, it is refused and logged, and no other handoff changes."""

import contextlib
import time
from collections.abc import Callable
from random import Random, SystemRandom
from typing import Any

import msgspec
import numpy as np
import pytest

from kvstore.handoff.decode import DecodeManager, Receiver
from kvstore.handoff.effects import SendTo, Submit
from kvstore.handoff.links import PeerLinks
from kvstore.handoff.messages import (
    Abort,
    Announce,
    Done,
    Drained,
    Failed,
    FromDecode,
    FromPrefill,
    HandoffPing,
    LandingPlace,
    RangesHead,
    RangesWritten,
    RenewRoom,
    encode_message,
    read_from_decode,
    read_from_prefill,
)
from kvstore.handoff.places import PushRange, pack_numbers
from kvstore.handoff.receiving import Receivers
from kvstore.handoff.sending import Senders
from kvstore.handoff.shape import PoolShape
from kvstore.handoff.states import FailureCode, HandoffFailure, HandoffSide, Layer, Patience, State
from kvstore.protocol.errors import CapacityError, InvalidArgument, ProtocolError
from tests.handoff.pair import PATIENCE, SECRET, SPACE, Memory, managers, push_all
from tests.handoff.wrong_fields import at_an_edge, kinds_of, of_another_type

SHAPE = PoolShape(4, 2, 64, 16, 40)
FAILURE = HandoffFailure(FailureCode.ABORTED, HandoffSide.DECODE, 0, Layer.PROTOCOL, "for a test")
EMPTY = np.zeros(0, dtype=np.uint64)
SECOND = 1_000_000_000


def right(room: int) -> list[msgspec.Struct]:
    """One right message of each kind about a room of three blocks."""
    ranges = [PushRange(0, 0, 1), PushRange(1, 1, 2)]
    packed = pack_numbers([number for one in ranges for number in one])
    place = LandingPlace("rdma", "h:1", bytes(32))
    return [
        HandoffPing(), RenewRoom(room),
        Announce(room, 48, 0, pack_numbers([7, 8, 9]), 2, place, []),
        Abort(room, FAILURE), Done(room), Failed(room, FAILURE), Drained(room),
        RangesHead(room, packed, bytes(32)), RangesWritten(room, packed, bytes(32)),
    ]  # fmt: skip


FROM_DECODE = [one for one in right(1) if type(one) in kinds_of(FromDecode)]
FROM_PREFILL = [one for one in right(1) if type(one) in kinds_of(FromPrefill)]


def test_there_is_an_example_of_each_message():
    assert {type(one) for one in FROM_DECODE} == set(kinds_of(FromDecode))
    assert {type(one) for one in FROM_PREFILL} == set(kinds_of(FromPrefill))


@pytest.mark.parametrize(
    ("read", "message"),
    [(read_from_decode, one) for one in FROM_DECODE]
    + [(read_from_prefill, one) for one in FROM_PREFILL],
    ids=lambda one: one.__name__ if callable(one) else type(one).__name__,
)
def test_a_field_of_another_type_is_refused_in_every_message(
    read: Callable[[bytes], Any], message: msgspec.Struct
) -> None:
    assert read(encode_message(message)) == message
    for what, wrong in of_another_type(message):
        with pytest.raises(ProtocolError):
            assert read(msgspec.msgpack.encode(wrong)) is None, what


@pytest.mark.parametrize(
    ("read", "message", "text"),
    [
        (read_from_decode, Abort(1, FAILURE), b"for a test"),
        (read_from_decode, Announce(1, 1, 0, b"", 0, LandingPlace("rdma", "h:1", b"")), b"rdma"),
        (read_from_prefill, Failed(1, FAILURE), b"for a test"),
    ],
    ids=["abort", "announce", "failed"],
)
def test_text_that_is_no_text_is_refused_in_every_message(
    read: Callable[[bytes], Any], message: Any, text: bytes
) -> None:
    """msgspec has another error for it than for everything else."""
    with pytest.raises(ProtocolError):
        read(encode_message(message).replace(text, b"\xff" * len(text)))


# What the cores do with messages that can be read


class Cores:
    """Both cores with rooms of two links, and random messages and calls of engines.

    Room 1 is the honest peer's, over link H; all that is wrong is sent over link L.
    """

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.now = 0
        self.senders = Senders(SHAPE, Patience())
        self.receivers = Receivers(SHAPE, 8, 64, Patience())
        self.jobs: list[int] = []
        self.landings: list[Any] = []
        self.receivers.linked("h", b"H", 0)
        self.receivers.linked("l", b"L", 0)
        self.honest = [self.senders.open(1, 48, 0)[0], self.receivers.open(1, "h", 48, 0)[0]]
        self.receivers.announce(1, 0, [0, 1, 2], 0)
        self.senders.received(b"H", Announce(1, 48, 0, pack_numbers([0, 1, 2]), 0), 0)
        self.room = 1  # the last one
        self.sending: set[int] = set()
        self.receiving: set[int] = set()

    def engines_go_on(self) -> None:
        """Something that an engine may do next; a wrong call of it is refused."""
        chance, now = self.chance, self.now
        here = chance.choice(sorted(self.sending)) if self.sending else 0
        there = chance.choice(sorted(self.receiving)) if self.receiving else 0
        what = chance.choice(("room", "announce", "push", "push", "finish", "abort", "close"))
        if what == "room":
            self.room += 1
            with contextlib.suppress(CapacityError):
                self.take(self.receivers.open(self.room, "l", 48, now)[1])
                self.receiving.add(self.room)
            self.take(self.senders.open(self.room, 48, now)[1])
            self.sending.add(self.room)
        with contextlib.suppress(InvalidArgument):
            if what == "announce" and there:
                blocks = chance.sample(range(3, 40), 3)
                self.take(self.receivers.announce(there, 0, blocks, now))
            elif what == "push" and here:
                layer, blocks = chance.randrange(2), chance.sample(range(40), 3)
                layers = range(layer, layer + 1)
                self.take(self.senders.push(here, layers, range(3), blocks, EMPTY, now))
            elif what == "finish" and here:
                self.take(self.senders.finish(here, b"aux", now))
        if what == "abort" and here and chance.random() < 0.3:
            self.take(self.senders.abort(here, now))
        if what == "close" and there and not self.receivers.holds_blocks(there):
            self.receiving.discard(there)
            self.take(self.receivers.close(there, now))

    def message_comes(self) -> None:
        """A message over link L, right, wrong, early or late, once or twice."""
        chance = self.chance
        room = chance.choice((1, self.room, self.room, max(self.room - 1, 1), self.room + 5))
        message = chance.choice(right(room))
        body = encode_message(message)
        if chance.random() < 0.5:
            body = msgspec.msgpack.encode(at_an_edge(message, chance))
        for _ in range(chance.choice((1, 1, 2))):
            with contextlib.suppress(ProtocolError):
                self.take(self.senders.received(b"L", read_from_decode(body), self.now))
            with contextlib.suppress(ProtocolError):
                self.prefill_says(read_from_prefill(body))

    def prefill_says(self, told: FromPrefill) -> None:
        if not isinstance(told, RangesHead | RangesWritten):
            self.take(self.receivers.received(b"L", told, self.now))
            return
        landing, size, effects = self.receivers.arriving(b"L", told, self.now)
        assert 0 <= size <= 1 << 20
        self.take(effects)
        if landing is not None:
            self.landings.append(landing)
        if self.landings and self.chance.random() < 0.7:
            code = self.chance.choice((None, None, FailureCode.DIGEST))
            self.take(self.receivers.landed(self.landings.pop(0), code, "", self.now))

    def take(self, effects: list[Any]) -> None:
        self.jobs += [one.job.number for one in effects if isinstance(one, Submit)]
        for one in effects:
            assert not isinstance(one, SendTo) or encode_message(one.message)

    def job_ends(self) -> None:
        if self.jobs:
            number = self.jobs.pop(self.chance.randrange(len(self.jobs)))
            self.take(self.senders.completed(number, None, self.now))

    def check(self) -> None:
        """No message over L changes what is H's."""
        self.senders.check()
        self.receivers.check()
        assert [one.state for one in self.honest] == [State.WAITING_FOR_INPUT] * 2
        assert self.receivers.holds_blocks(1)

    def end(self) -> None:
        """Link L closes and all jobs end: nothing is held, and known, but what is H's."""
        code = FailureCode.PEER_CLOSED
        self.take(self.senders.closed(b"L", code, "", self.now))
        self.take(self.receivers.closed(b"L", code, "", self.now))
        for landing in self.landings:
            self.receivers.landed(landing, code, "", self.now)
        while self.jobs:
            self.job_ends()
        self.receivers.settled(b"L")
        self.check()
        assert not any(map(self.receivers.holds_blocks, self.receiving))
        for room in self.receiving:
            self.receivers.close(room, self.now)
        for room in self.sending:
            self.take(self.senders.abort(room, self.now))
            assert not self.senders.holds_blocks(room)
            self.senders.close(room, self.now)
        assert [one.room for one in self.receivers.describe(self.now)] == [1]
        self.now += 40 * SECOND  # those that only decode has spoken of are forgotten then
        self.senders.renew(1, self.now)
        self.senders.tick(self.now)
        self.senders.tick(self.now + 40 * SECOND)
        assert [one.room for one in self.senders.describe(self.now)] == [1]


def fuzz_cores(seed: int, seconds: float) -> None:
    chance, end = Random(seed), time.monotonic() + seconds
    while time.monotonic() < end:
        cores = Cores(chance)
        for _ in range(chance.randrange(20, 120)):
            cores.now += chance.randrange(SECOND // 100)
            roll = chance.random()
            if roll < 0.5:
                cores.message_comes()
            elif roll < 0.8:
                cores.engines_go_on()
            else:
                cores.job_ends()
            cores.check()
        cores.end()


def test_messages_wrong_late_twice_or_out_of_order_change_nothing_of_others():
    fuzz_cores(17, 6.0)


@pytest.mark.soak("handoff", minutes=10)
def test_any_messages_change_nothing_of_others(soak_s: float) -> None:
    seed = SystemRandom().randrange(1 << 32)
    print("seed", seed)  # noqa: T201
    fuzz_cores(seed, soak_s)


# The same over real links: a manager that knows the secret, and writes what it likes


def bodies_of(messages: list[msgspec.Struct], others: list[msgspec.Struct]) -> list[bytes]:
    """One wrong body for each message, messages of the wrong side, and no messages."""
    wrong = [next(of_another_type(one))[1] for one in messages]
    far = [at_room(one, 1 << 63) for one in messages if len(one.__struct_fields__) > 0]
    return [
        *map(msgspec.msgpack.encode, [*wrong, *far]), b"", b"\xc1",
        *(encode_message(one) for one in others if type(one) not in map(type, messages)),
    ]  # fmt: skip


def at_room(message: msgspec.Struct, room: int) -> Any:
    return msgspec.msgpack.decode(encode_message(msgspec.structs.replace(message, room=room)))


def say(manager: Any, body: bytes) -> None:
    """Write a body, properly sealed, on the only link of a manager."""
    [there] = manager._links.values()
    [link] = there.links if isinstance(there, PeerLinks) else [there]
    assert link.outbox.put_message(body)


def test_prefill_refuses_every_wrong_message_over_a_link_and_says_whose_it_was(wait_until, caplog):
    with managers() as pair:
        sender, receiver = pair.begin(1, 4)
        receiver.announce(0, [0, 1, 2, 3])
        wait_until(lambda: sender.state == State.WAITING_FOR_INPUT)
        strange = DecodeManager(Memory().pool, SPACE, SECRET, name="strange", patience=PATIENCE)

        def link(room: int) -> None:
            strange.receiver(room, pair.registry.url, 16)
            wait_until(lambda: pair.prefill.stats()["links"] == 2)
            wait_until(lambda: room in [one.room for one in pair.prefill.describe()])

        try:
            bodies = bodies_of(FROM_DECODE, FROM_PREFILL)
            for number, body in enumerate(bodies):
                link(100 + number)
                say(strange, body)
                wait_until(lambda: pair.prefill.stats().get("protocol", 0) == number + 1)  # noqa: B023
                wait_until(lambda: strange.stats()["links"] == 0)
            assert "strange at 127.0.0.1: not a message of decode" in caplog.text
            caplog.clear()
            link(99)  # messages that can be read, about a request of others
            for message in (Abort(1, FAILURE), Done(1), right(1)[2], RenewRoom(1)):
                say(strange, encode_message(message))
            wait_until(lambda: pair.prefill.stats().get("foreign_messages") == 4)
            assert "strange at 127.0.0.1: Abort about room 1 was refused" in caplog.text
            assert sender.state == receiver.state == State.WAITING_FOR_INPUT
            push_all(sender, pair.here, [4, 5, 6, 7])
            wait_until(lambda: receiver.state == State.SUCCESS)
            assert pair.there.has(1, range(4), [0, 1, 2, 3])
        finally:
            strange.close()


def test_decode_refuses_every_wrong_message_over_a_link_and_says_whose_it_was(wait_until, caplog):
    with managers() as pair, managers() as strange:
        sender, receiver = pair.begin(1, 4)
        receiver.announce(0, [0, 1, 2, 3])
        wait_until(lambda: sender.state == State.WAITING_FOR_INPUT)
        url = strange.registry.url
        lost = pair.decode.receiver(99, url, 16)

        def link(room: int) -> Receiver:
            made = pair.decode.receiver(room, url, 16)
            wait_until(lambda: strange.prefill.stats()["links"] == 1)
            wait_until(lambda: room in [one.room for one in strange.prefill.describe()])
            return made

        bodies = bodies_of(FROM_PREFILL, FROM_DECODE)
        bodies.append(encode_message(RangesHead(99, pack_numbers([0, 0, 1 << 30]), bytes(16))))
        bodies.append(encode_message(RangesHead(99, b"abc", bytes(16))))
        for number, body in enumerate(bodies):
            lost = link(100 + number)
            lost.announce(0, [7])
            say(strange.prefill, body)
            wait_until(lambda: lost.state == State.FAILED)  # noqa: B023
            assert lost.failure is not None
            assert lost.failure.code == FailureCode.PROTOCOL, body
            wait_until(lambda: not lost.holds_blocks)  # noqa: B023
            wait_until(lambda: strange.prefill.stats()["links"] == 0)
        assert f"{url}: not a message of prefill" in caplog.text
        caplog.clear()
        lost = link(98)
        for message in (Failed(1, FAILURE), Drained(1), RenewRoom(1), right(1)[8]):
            say(strange.prefill, encode_message(message))
        wait_until(lambda: pair.decode.stats().get("foreign_messages") == 4)
        assert f"{url}: Failed about room 1 was refused" in caplog.text
        assert sender.state == receiver.state == State.WAITING_FOR_INPUT
        push_all(sender, pair.here, [4, 5, 6, 7])
        wait_until(lambda: receiver.state == State.SUCCESS)
        assert pair.there.has(1, range(4), [0, 1, 2, 3])
        assert not pair.there.planes[:, 4:].any()
