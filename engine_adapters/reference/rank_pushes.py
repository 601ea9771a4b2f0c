"""The pushes of all ranks of an engine as one: this engine has its ranks in one process.

The state of a request is the lowest of its ranks. When it has failed at one rank, the others give
it up; blocks are held as long as one rank holds them.
"""

from collections.abc import Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from kvstore.handoff.aux_data import AuxData
from kvstore.handoff.decode import DecodeManager, Receiver
from kvstore.handoff.prefill import PrefillManager, Sender
from kvstore.handoff.states import (
    TERMINAL,
    FailureCode,
    HandoffFailure,
    HandoffStatus,
    State,
    least,
)
from kvstore.protocol.errors import KVStoreError, ProtocolError

_One = TypeVar("_One", Sender, Receiver)


class JointProgress(NamedTuple):
    """How far the ranks are.

    Attributes:
        state: the lowest of all ranks.
        failure: of a rank that has failed by itself, if one has; None in every other state.
        seconds: how long each state has lasted that a rank has left: the longest.
        moved_bytes: of all ranks.
    """

    state: State
    failure: HandoffFailure | None
    seconds: dict[str, float]
    moved_bytes: int

    @property
    def ended(self) -> bool:
        """Whether it is in a terminal state."""
        return self.state in TERMINAL


class _Joint(Generic[_One]):
    """One handoff of each rank."""

    _ranks: list[_One]

    def __init__(self, ranks: list[_One]) -> None:
        self._ranks = ranks

    @property
    def state(self) -> State:
        """The lowest of all ranks; if it is FAILED, all ranks have ended."""
        found = least(one.state for one in self._ranks)
        if found is State.FAILED:
            self.abort()
        return found

    @property
    def failure(self) -> HandoffFailure | None:
        """Why it is FAILED; None in every other state.

        When one rank has failed, the others are aborted: that one says why.
        """
        found = [one.failure for one in self._ranks if one.failure is not None]
        causes = [one for one in found if one.code is not FailureCode.ABORTED]
        return next(iter(causes or found), None)

    @property
    def progress(self) -> JointProgress:
        """How far the ranks are."""
        state, seconds = self.state, dict[str, float]()
        for one in self._ranks:
            for name, spent in one.progress.seconds.items():
                seconds[name] = max(seconds.get(name, 0.0), spent)
        moved = sum(one.progress.moved_bytes for one in self._ranks)
        return JointProgress(state, self.failure, seconds, moved)

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks may still be read, or written to, at some rank."""
        return any(one.holds_blocks for one in self._ranks)

    def renew(self) -> None:
        """The request waits."""
        for one in self._ranks:
            one.renew()

    def abort(self) -> None:
        """Give the request up."""
        for one in self._ranks:
            if not one.progress.ended:
                one.abort()

    def close(self) -> None:
        """Ask no more."""
        for one in self._ranks:
            one.close()


class RankSenders(_Joint[Sender]):
    """The senders of one request.

    Raises:
        InvalidArgument: the room was used before.
        CapacityError: too many pushes are under way at some rank.
    """

    def __init__(self, managers: Sequence[PrefillManager], room: int, token_count: int) -> None:
        super().__init__(_begun(one.sender(room, token_count) for one in managers))

    def send(self, layers: range, positions: range, blocks: Sequence[int]) -> None:
        """Push what each rank has of some layers and positions."""
        for one in self._ranks:
            one.send(layers, positions, blocks)

    def finish(self, aux: AuxData) -> None:
        """All ranks have sent everything."""
        for one in self._ranks:
            one.finish(aux)


class RankReceivers(_Joint[Receiver]):
    """The receivers of one request.

    Raises:
        InvalidArgument: the room was used before, or the registry is no URL.
        CapacityError: too many pushes are under way at some rank.
    """

    def __init__(
        self, managers: Sequence[DecodeManager], room: int, registry: str, token_count: int
    ) -> None:
        super().__init__(_begun(one.receiver(room, registry, token_count) for one in managers))

    def announce(self, first_token: int, blocks: Sequence[int]) -> None:
        """Ask each rank of prefill for what the ranks need."""
        for one in self._ranks:
            one.announce(first_token, blocks)

    def aux(self) -> AuxData:
        """What came besides KV, the same at all ranks.

        Raises:
            ProtocolError: it is not the same, or cannot be read.
        """
        found = [one.aux() for one in self._ranks]
        if any(one != found[0] for one in found):
            raise ProtocolError("the ranks have different aux data")
        return found[0]


def joint_status(ranks: Sequence[Sequence[HandoffStatus]]) -> list[HandoffStatus]:
    """What each rank says of its handoffs, as one line for each room."""
    found: dict[int, HandoffStatus] = {}
    for one in (one for statuses in ranks for one in statuses):
        other = found.setdefault(one.room, one)
        if other is not one:
            slower, faster = sorted((one, other), key=lambda each: State[each.state])
            found[one.room] = slower._replace(
                moved_bytes=slower.moved_bytes + faster.moved_bytes,
                missing=sorted({*slower.missing, *faster.missing}),
            )
    return list(found.values())


def _begun(ranks: Iterable[_One]) -> list[_One]:
    """Begin at all ranks, or at none."""
    made: list[_One] = []
    try:
        for one in ranks:
            made.append(one)  # noqa: PERF402
    except KVStoreError:
        for one in made:
            one.close()
        raise
    return made
