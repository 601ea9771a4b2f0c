"""Goal: one rank among several that dies, stops or gives up ends its requests at all ranks, in
every state, and costs no other request anything."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import count
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import pytest

from kvstore.handoff.registry import HandoffRegistry
from kvstore.handoff.states import State
from tests.conftest import Process, Spawn, wait_for
from tests.handoff.pair import SECRET
from tests.handoff.rank_process import PROMPT_BLOCKS, blocks_of, patience_of
from tests.handoff.ranked import Ranked, ranked, whole_of
from tests.handoff.test_unequal_ranks import split

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
NOTICED = {KILL: "peer_closed", STOP: "peer_silent"}
STATES = ["no link", "bootstrapping", "waiting", "transferring", "before aux", "success"]
STRUCK = [*STATES[1:], STATES[0]]
"""The first at last: what was struck before has left no link."""
SIDES = ["prefill", "decode"]
VICTIM = 1
SILENCE_S, PATIENT_S = 1.0, 8.0
"""Of ranks where one stops, and where none does: a busy machine may keep each from its pings."""
REDUCE = 4
"""A rank that does not take part in a step for so many silences has failed all; managers notice
before."""
ENDED_S = 15.0
"""Until a request has ended; the deadline of BOOTSTRAPPING and a busy machine."""


class RankChild:
    """A rank in a process of its own."""

    def __init__(self, scene: "RankScene", side: str, rank: int) -> None:
        self.side, self.rank = side, rank
        self.process: Process = scene.spawn(
            [sys.executable, "-m", "tests.handoff.rank_process", side, str(rank),
             scene.registry.url, str(scene.port), str(scene.silence_s)]
        )  # fmt: skip
        self._reduce_s = REDUCE * scene.silence_s
        self.away = False  # it does not answer
        self.in_step = False

    def tell(self, connection: Connection) -> None:
        self._connection = connection

    def leave(self) -> None:
        """It ends by itself."""
        self._connection.close()

    def call(self, name: str, *arguments: Any) -> Any:
        self._connection.send((name, arguments))
        assert self._connection.poll(30), f"{self.side} {self.rank} does not answer"
        return self._connection.recv()

    def states(self) -> list[int] | None:
        """What it tells in a step; None if it is dead, or silent."""
        try:
            if not self.away and self._connection.poll(self._reduce_s):
                return list(self._connection.recv())
        except (EOFError, OSError):
            pass
        self.away = True
        return None

    def begin_step(self) -> None:
        if not self.away:
            try:
                self._connection.send(("step", ()))
                self.in_step = True
            except OSError:
                self.away = True

    def end_step(self, lowest: list[int]) -> dict[int, tuple[str, str | None, bool]]:
        self._connection.send(lowest)
        self.in_step = False
        assert self._connection.poll(30)
        return dict(self._connection.recv())

    def threads_and_descriptors(self) -> tuple[int, int]:
        place = Path(f"/proc/{self.process.pid}")
        return len(list((place / "task").iterdir())), len(list((place / "fd").iterdir()))


Told = dict[int, tuple[str, str | None, bool]]


class RankScene:
    """Two ranks of prefill and two of decode as processes, and other engines in this one."""

    def __init__(self, spawn: Spawn, silence_s: float) -> None:
        self.spawn = spawn
        self.silence_s = silence_s
        self.registry = HandoffRegistry("127.0.0.1", 0, SECRET)
        self._listener = Listener(("127.0.0.1", 0), authkey=SECRET)
        self.port = self._listener.address[1]
        self.ranks = {side: [RankChild(self, side, rank) for rank in range(2)] for side in SIDES}
        self.rooms = count(1)
        self._accept(4)

    def _accept(self, count: int) -> None:
        for _ in range(count):
            connection = self._listener.accept()
            side, rank = connection.recv()
            self.ranks[side][rank].tell(connection)

    def restart(self, side: str, rank: int) -> None:
        self.ranks[side][rank].leave()
        self.ranks[side][rank] = RankChild(self, side, rank)
        self._accept(1)

    def close(self) -> None:
        for one in (one for ranks in self.ranks.values() for one in ranks):
            one.leave()
        self._listener.close()
        self.registry.close()

    def all(self, side: str, name: str, *arguments: Any) -> list[Any]:
        """Tell all ranks of a side that answer."""
        return [one.call(name, *arguments) for one in self.ranks[side] if not one.away]

    def step(self, side: str) -> list[Told]:
        """One step of an engine: one reduce; who does not take part has failed everything."""
        ranks = self.ranks[side]
        for one in ranks:
            one.begin_step()
        told = [one.states() for one in ranks]
        there = [states for states in told if states is not None]
        lowest = [min(each) for each in zip(*there, strict=True)]
        if len(there) < len(ranks):
            lowest = [int(State.FAILED)] * len(lowest)
        return [
            one.end_step(lowest)
            for one, states in zip(ranks, told, strict=True)
            if states is not None
        ]

    def until(self, room: int, met: Callable[[str, str | None, bool], bool], *sides: str) -> None:
        """Step until all ranks that answer, of all sides or of these, say so of a request."""
        last: list[Told] = []

        def seen() -> bool:
            last[:] = [told for side in sides or SIDES for told in self.step(side)]
            return all(met(*told[room]) for told in last)

        assert wait_for(seen, ENDED_S), last


@pytest.fixture
def scene(spawn: Spawn, request: pytest.FixtureRequest) -> Iterator[RankScene]:
    made = RankScene(spawn, getattr(request, "param", PATIENT_S))
    yield made
    made.close()


def advance(scene: RankScene, room: int, state: str) -> None:
    """Bring a request into a state at all ranks."""
    at = STATES.index(state)
    scene.all("prefill", "open", room)
    if at >= 1:
        scene.all("decode", "open", room)
        met = lambda: not any(told[room] for told in scene.all("prefill", "missing"))  # noqa: E731
        assert wait_for(met), "all have spoken of it"
    if at >= 2:
        scene.all("decode", "announce", room)
        scene.until(room, lambda now, *_: now == "WAITING_FOR_INPUT", "prefill")
    if at >= 3:
        scene.all("prefill", "push", room, 0, 1)
        scene.until(room, lambda now, *_: now == "TRANSFERRING", "decode")
    if at >= 4:
        scene.all("prefill", "push", room, 1, 2)
    if at >= 5:
        scene.all("prefill", "finish", room)
        scene.until(room, lambda now, *_: now == "SUCCESS")


class Bystander:
    """A request that other engines in this process exchange with those of the scene."""

    def __init__(self, scene: RankScene, victim: str, other: Ranked, room: int) -> None:
        self._scene, self._other, self._room = scene, other, room
        self._side = "decode" if victim == "prefill" else "prefill"  # those that go on
        tokens = PROMPT_BLOCKS * 8
        if self._side == "decode":
            self._mine = other.prefill[0].sender(room, tokens)
            scene.all("decode", "open", room, other.registry.url)
            scene.all("decode", "announce", room)
        else:
            self._mine = other.decode[0].receiver(room, scene.registry.url, tokens)
            self._mine.announce(0, blocks_of(room))
            scene.all("prefill", "open", room)
            scene.until(room, lambda now, *_: now == "WAITING_FOR_INPUT", "prefill")
            scene.all("prefill", "push", room, 0, 1)

    def check(self) -> None:
        """It goes on, and ends as if nothing had been."""
        room, whole = self._room, whole_of(self._room, PROMPT_BLOCKS)
        if self._side == "decode":
            self._other.push([self._mine], whole, blocks_of(room))
        else:
            self._scene.all("prefill", "push", room, 1, 2)
            self._scene.all("prefill", "finish", room)
        self._scene.until(room, lambda now, *_: now == "SUCCESS", self._side)
        assert wait_for(lambda: self._mine.state == State.SUCCESS)
        if self._side == "decode":
            assert self._scene.all("decode", "is_right", room) == [True, True]
        else:
            assert self._other.wrong(whole, blocks_of(room)) == []
        self._scene.all(self._side, "close", room)
        self._mine.close()


def check_codes(
    number: signal.Signals | None, side: str, victim: str, state: str, codes: set[str | None]
) -> None:
    """The causes that the ranks of a side tell of a request that was struck.

    One rank notices it. The reduce may tell the other, which then gives the request up; or a rank
    of the other side, to which the first has closed its link.
    """
    where = side, state, codes
    if state == "success":
        assert codes == {None}, where
    elif number is None or (state == "no link" and (side, victim) != ("decode", "prefill")):
        assert codes == {"aborted"}, where
    elif side == victim:
        assert codes <= {NOTICED[number], "peer_closed", "aborted"}, where
    else:
        noticed = "unreachable" if state == "no link" else NOTICED[number]
        assert codes <= {noticed, "peer_closed", "aborted"}, where
        # Of one that was killed the other ranks of its side may tell before its links are closed.
        assert noticed in codes or (number is KILL and state != "no link"), where


def strike(
    scene: RankScene, number: signal.Signals | None, side: str, state: str, other: Ranked
) -> None:
    """Kill or stop a rank in a state, or let it give up; see that the others end the request."""
    room = 1 + next(scene.rooms)
    victim = scene.ranks[side][VICTIM]
    bystander = Bystander(scene, side, other, 1_000 + room)
    advance(scene, room, state)
    if number is None:
        victim.call("abort", room)
    else:
        os.kill(victim.process.pid, number)
    if state == "no link":
        victim.away = number is not None
        scene.all("decode", "open", room)
        scene.all("decode", "announce", room)
    wanted = "SUCCESS" if state == "success" else "FAILED"
    scene.until(room, lambda now, _, holds: now == wanted and not holds)
    for one in SIDES:
        codes = {told[room][1] for told in scene.step(one)}
        check_codes(number, one, side, state, codes)
    if state == "success":
        assert set(scene.all("decode", "is_right", room)) == {True}
    bystander.check()
    if number is STOP:
        go_on(scene, victim, room, state)
    for one in SIDES:
        scene.all(one, "close", room)
    assert wait_for(
        lambda: not any(scene.all("prefill", "missing") + scene.all("decode", "missing"))
    )
    for stats in scene.all("decode", "stats"):
        assert stats["limbo_blocks"] == stats["aux_slots"] == 0


def go_on(scene: RankScene, victim: RankChild, room: int, state: str) -> None:
    """The rank that stood goes on: it learns that the others have given the request up."""
    os.kill(victim.process.pid, signal.SIGCONT)
    victim.away = False
    if victim.in_step:
        states = victim.states()
        assert states is not None
        victim.end_step([int(State.FAILED)] * len(states))
    elif victim.side == "decode":  # it has not heard of the request
        victim.call("open", room)
    scene.until(room, lambda *told: told[0] in ("FAILED", "SUCCESS") and not told[2])


def run(scene: RankScene, number: signal.Signals | None, side: str) -> None:
    """All states, one after another; afterwards survivors have what they had before."""
    with ranked(split(), split(), patience_of(scene.silence_s)) as other:
        room = next(scene.rooms)
        bystander = Bystander(scene, side, other, 1_000 + room)
        advance(scene, room, "success")
        for one in SIDES:
            scene.all(one, "close", room)
        bystander.check()
        victim = scene.ranks[side][VICTIM]
        survivors = [one for ranks in scene.ranks.values() for one in ranks if one is not victim]
        before = [one.threads_and_descriptors() for one in survivors]
        for state in STRUCK if number is not None else STATES[1:]:
            strike(scene, number, side, state, other)
            if number is KILL:
                scene.restart(side, VICTIM)

            def as_before() -> bool:
                now = [one.threads_and_descriptors() for one in survivors]
                return all(
                    max(map(int.__sub__, *both)) <= 0 for both in zip(now, before, strict=True)
                )

            assert wait_for(as_before), (state, before)
        room = 1 + next(scene.rooms)
        advance(scene, room, "success")
        assert scene.all("decode", "is_right", room) == [True, True]


@pytest.mark.parametrize("side", SIDES)
def test_a_rank_that_is_killed_in_any_state_ends_its_requests_and_no_others(
    scene: RankScene, side: str
) -> None:
    run(scene, KILL, side)


@pytest.mark.soak("handoff", minutes=1)
@pytest.mark.parametrize("scene", [SILENCE_S], indirect=True)
@pytest.mark.parametrize("side", SIDES)
def test_a_rank_that_stops_in_any_state_ends_its_requests_and_no_others(
    scene: RankScene, side: str
) -> None:
    run(scene, STOP, side)


@pytest.mark.soak("handoff", minutes=1)
@pytest.mark.parametrize("side", SIDES)
def test_a_request_that_one_rank_gives_up_in_any_state_ends_at_all(
    scene: RankScene, side: str
) -> None:
    run(scene, None, side)
