"""The states of a handoff at one rank, their deadlines, and why one failed. Pure."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final, NamedTuple

import msgspec

from kvstore.protocol.errors import InvalidArgument

SILENCE_S_MIN: Final = 1.0


class State(IntEnum):
    """Where a handoff is; the state of several ranks together is the lowest of theirs."""

    FAILED = 0
    BOOTSTRAPPING = 1
    """The two sides do not know each other yet, or decode has no memory for the request yet."""
    WAITING_FOR_INPUT = 2
    """Decode has announced its blocks; nothing has been sent."""
    TRANSFERRING = 3
    SUCCESS = 4
    """Everything has arrived and was verified."""


TERMINAL: Final = frozenset((State.FAILED, State.SUCCESS))


def least(states: Iterable[int]) -> State:
    """The state of a request: the lowest of its ranks, of which there is at least one."""
    return State(min(states))


Reduce = Callable[[list[int]], list[int]]
"""Gets the states of some handoffs at this rank, returns for each the lowest among all ranks."""


def agreed(states: list[State], reduce: Reduce | None) -> list[State]:
    """The states of requests, given those of this rank; ``reduce`` asks the other ranks."""
    if reduce is None:
        return states
    reduced = reduce([int(state) for state in states])
    return [least(pair) for pair in zip(states, reduced, strict=True)]


class HandoffSide(StrEnum):
    """The side that noticed a failure."""

    PREFILL = "prefill"
    DECODE = "decode"


class Layer(StrEnum):
    """The part that failed: the transport, or one of the sides."""

    TRANSPORT = "transport"
    PROTOCOL = "protocol"


class FailureCode(StrEnum):
    """Why a handoff failed; stable, the same in logs and metrics."""

    ABORTED = "aborted"
    """An engine gave the request up."""
    BLOCKS_REUSED = "blocks_reused"
    """Prefill's engine gave a block away before its bytes had been sent."""
    CLOSED = "closed"
    """The manager of this side was closed."""
    DEADLINE = "deadline"
    """The other side said nothing for as long as the state allows, or the whole took too long."""
    DEVICE = "device"
    """A copy to or from the device of a pool has failed, or was late, or there was no staging."""
    DIGEST = "digest"
    """Bytes that arrived do not match their digest."""
    ENGINE_ENDED = "engine_ended"
    """Decode's transfer engine has ended while KV were written to it."""
    PEER_CLOSED = "peer_closed"
    """A connection to the other side was closed or broke."""
    PEER_SILENT = "peer_silent"
    """The other side sent nothing, no ping either: it is stopped, or the network is cut."""
    PROTOCOL = "protocol"
    """The other side violated the protocol."""
    REFUSED = "refused"
    """The other side refuses this request: its fields do not match."""
    WRONG_PROMPT = "wrong_prompt"
    """Everything has arrived, but it is the KV of another prompt, or it is not said of which."""
    WRITE = "write"
    """A write over a transport other than TCP has failed, or was late."""
    UNREACHABLE = "unreachable"
    """The registry or the other side's port is unreachable, or does not know the secret."""


class HandoffFailure(msgspec.Struct, frozen=True, array_like=True):
    """Why a handoff failed.

    Attributes:
        code: one of :class:`FailureCode`, or a code of a later version.
        side: the side that noticed it.
        rank: rank, of the side that noticed it.
        layer: the part that failed.
        message: for the log; at most 200 characters.
    """

    code: str
    side: HandoffSide
    rank: int
    layer: Layer
    message: str

    @property
    def counted(self) -> str:
        """The code for counts, of which a peer must not make ever more: ``other`` if unknown."""
        return self.code if self.code in frozenset(FailureCode) else "other"

    def __str__(self) -> str:
        return f"{self.code} ({self.side} rank {self.rank}, {self.layer}): {self.message}"


@dataclass(frozen=True, slots=True)
class Patience:
    """Maximum duration of each state without a message about the handoff, in seconds.

    Attributes:
        bootstrapping_s: BOOTSTRAPPING; decode renews it while it waits for its memory.
        waiting_s: WAITING_FOR_INPUT; prefill renews it while the request is in its queue.
        transferring_s: TRANSFERRING.
        total_s: the whole handoff, regardless of renewals.
        silence_s: a connection without data for this long is closed, with all handoffs that use it;
            at least 1 s, because the other side may write only every half second, and at most
            ``transferring_s``, which would end a handoff before. Use more for engines that pause
            for seconds, less to notice a suspended one sooner.

    Raises:
        InvalidArgument: ``silence_s`` is too short or too long.
    """

    bootstrapping_s: float = 30.0
    waiting_s: float = 60.0
    transferring_s: float = 15.0
    total_s: float = 300.0
    silence_s: float = 2.0

    def __post_init__(self) -> None:
        """Check the silence."""
        if not SILENCE_S_MIN <= self.silence_s < math.inf:
            raise InvalidArgument("silence_s", f"{self.silence_s} is less than {SILENCE_S_MIN}")
        if self.silence_s > self.transferring_s:
            what = f"{self.silence_s} is more than transferring_s, {self.transferring_s}"
            raise InvalidArgument("silence_s", what)

    @classmethod
    def of_silence(cls, silence_s: float) -> "Patience":
        """The usual deadlines, and none that ends a handoff before this silence.

        Raises:
            InvalidArgument: it is too short, or not shorter than the whole handoff may be.
        """
        usual = cls()
        if silence_s >= usual.total_s:
            raise InvalidArgument("silence_s", f"{silence_s} is not less than {usual.total_s}")
        bootstrapping_s = max(usual.bootstrapping_s, silence_s)
        waiting_s = max(usual.waiting_s, silence_s)
        transferring_s = max(usual.transferring_s, silence_s)
        return cls(bootstrapping_s, waiting_s, transferring_s, usual.total_s, silence_s)

    def silence_ns(self, state: State) -> int:
        """Nanoseconds of silence that a state allows."""
        seconds = {
            State.BOOTSTRAPPING: self.bootstrapping_s,
            State.WAITING_FOR_INPUT: self.waiting_s,
            State.TRANSFERRING: self.transferring_s,
        }
        return int(seconds[state] * 1e9)


class HandoffStatus(NamedTuple):
    """One handoff at one rank, for people.

    Attributes:
        room: of the request.
        state: name of its state.
        seconds: for how long it is in that state.
        moved_bytes: bytes of KV and aux data that were sent, or that arrived and were verified.
        missing: ranks of the other side that have said nothing of it yet.
    """

    room: int
    state: str
    seconds: float
    moved_bytes: int
    missing: list[int]


class HandoffProgress:
    """The state of one handoff at one rank: it only goes forward, and stays where it ended.

    Attributes:
        state: now.
        failure: why it is FAILED; None in every other state.
        since_ns: since when it is in this state.
        seconds: how long each state has lasted that it was in and has left, by its name; another
            dict each time, so that any thread may read it.
        moved_bytes: bytes of KV and aux data that were sent, or that arrived and were verified.
    """

    __slots__ = (
        "_heard_ns", "_opened_ns", "_patience", "failure", "moved_bytes", "seconds", "since_ns",
        "state",
    )  # fmt: skip

    def __init__(self, patience: Patience, now_ns: int) -> None:
        self._patience = patience
        self._opened_ns = self._heard_ns = self.since_ns = now_ns
        self.state = State.BOOTSTRAPPING
        self.failure: HandoffFailure | None = None
        self.seconds: dict[str, float] = {}
        self.moved_bytes = 0

    @property
    def ended(self) -> bool:
        """Whether it is in a terminal state."""
        return self.state in TERMINAL

    def advance(self, state: State, now_ns: int) -> bool:
        """Advance to a state; returns False if it has been reached, or the handoff has ended."""
        assert state is not State.FAILED, "a failure has a cause: call fail"
        if self.ended or state <= self.state:
            return False
        self._leave(now_ns)
        self.state, self._heard_ns = state, now_ns
        return True

    def fail(self, failure: HandoffFailure, now_ns: int) -> bool:
        """End as FAILED; returns False if it has ended already."""
        if self.ended:
            return False
        self._leave(now_ns)
        self.failure = failure  # first: who reads the state without a lock finds the cause
        self.state = State.FAILED
        return True

    def status(self, room: int, missing: list[int], now_ns: int) -> HandoffStatus:
        """A description for people."""
        seconds = (now_ns - self.since_ns) / 1e9
        return HandoffStatus(room, self.state.name, seconds, self.moved_bytes, missing)

    def _leave(self, now_ns: int) -> None:
        spent = (now_ns - self.since_ns) / 1e9
        self.seconds = {**self.seconds, self.state.name: spent}  # the engine may read the old one
        self.since_ns = now_ns

    def heard(self, now_ns: int) -> None:
        """The other side, or the own engine, said that this handoff is alive."""
        self._heard_ns = now_ns

    def expired(self, now_ns: int) -> str:
        """Which deadline has passed, in words; empty = none, or it has ended."""
        if self.ended:
            return ""
        silence_ns = now_ns - self._heard_ns
        if silence_ns >= self._patience.silence_ns(self.state):
            return f"nothing was heard in {self.state.name} for {silence_ns / 1e9:.1f} s"
        total_ns = now_ns - self._opened_ns
        if total_ns >= self._patience.total_s * 1e9:
            return f"it was not complete after {total_ns / 1e9:.1f} s, in {self.state.name}"
        return ""
