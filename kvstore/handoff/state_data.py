"""State data: data of a request other than KV, in buffers with blocks of their own. Pure.

Three kinds: one block for the whole request (the state of a recurrent layer, as Mamba's), blocks of
the last positions (KV of layers with a sliding window, in a pool of their own), and a block for
every position (an index, as that of NSA).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.handoff.places import PLANES_MAX
from kvstore.handoff.ranks import Span
from kvstore.protocol.errors import InvalidArgument

STATES_MAX: Final = 16
"""State buffers of an engine."""
_NAME: Final = re.compile(r"[a-z0-9_]{1,32}", re.ASCII)
_BLOCK_BYTES_MAX: Final = 1 << 30


class StateKind(StrEnum):
    """Which blocks a request has in a state buffer."""

    SLOT = "slot"
    """One."""
    LAST = "last"
    """One for each of its last positions."""
    EVERY = "every"
    """One for each position."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """The numbers of a state buffer at one rank.

    Both sides have the same but for ``block_count``, and the planes if the buffer ``is_alike``.

    Attributes:
        name: 1 to 32 of ``a-z0-9_``.
        kind: which blocks a request has.
        plane_count: planes, all layers of this rank together.
        block_bytes: bytes of one block in one plane; 0 = nothing is moved.
        block_count: blocks of the buffer.
        last: of kind ``last``, how many positions at the end of the prompt; otherwise 0.
        first_plane: number of the rank's first plane among the planes of all ranks.
        is_alike: ranks that have the same planes have the same bytes in them.
    """

    name: str
    kind: StateKind
    plane_count: int
    block_bytes: int
    block_count: int
    last: int = 0
    first_plane: int = 0
    is_alike: bool = False

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            InvalidArgument: one is outside what messages can name.
        """
        if not _NAME.fullmatch(self.name):
            raise InvalidArgument("states", f"{self.name[:40]!r} is not 1 to 32 of a-z0-9_")
        for field, number, least, most in (
            ("plane_count", self.plane_count, 1, PLANES_MAX),
            ("block_bytes", self.block_bytes, 0, _BLOCK_BYTES_MAX),
            ("block_count", self.block_count, 1, (1 << 32) - 1),
            ("last", self.last, int(self.kind is StateKind.LAST), (1 << 20)),
            ("first_plane", self.first_plane, 0, PLANES_MAX - self.plane_count),
        ):
            if not least <= number <= most:
                what = f"{number} is not {least} to {most}"
                raise InvalidArgument(f"states.{self.name}.{field}", what)
        if self.last and self.kind is not StateKind.LAST:
            raise InvalidArgument(f"states.{self.name}.last", f"{self.kind} has none")

    @property
    def planes(self) -> Span:
        """The first plane of this rank, and the one after the last."""
        return self.first_plane, self.first_plane + self.plane_count

    def positions(self, blocks: int, first: int) -> range:
        """The positions that are moved for a request.

        Args:
            blocks: positions of the request.
            first: position from which KV is needed; for the kinds ``slot`` and ``last`` all are
                moved in any case.
        """
        match self.kind:
            case StateKind.SLOT:
                return range(1)
            case StateKind.LAST:
                return range(max(blocks - self.last, 0), blocks)
            case StateKind.EVERY:
                return range(first, blocks)


class StateBuffer(NamedTuple):
    """Memory of an engine for one kind of state data, at one rank.

    Attributes:
        name: 1 to 32 of ``a-z0-9_``; the same at both sides.
        kind: which blocks a request has.
        planes: address of each plane, all layers of this rank together; the blocks of a plane are
            adjacent. The engine owns the memory and keeps it until its manager was closed.
        block_bytes: bytes of one block in one plane.
        block_count: blocks of the buffer; they are numbered for themselves, from 0.
        last: of kind ``last``, how many positions at the end of the prompt.
        generations: generations of these blocks, as of
            :class:`~kvstore.handoff.memory.HandoffPool`.
        first_plane: number of the first plane among the planes that all ranks of the engine have
            of this buffer; 0 if this rank has the first layer that has such data. None = all ranks
            have the same layers, or the buffer is not alike.
        is_alike: ranks that have the same planes have the same bytes in them: nothing in this
            buffer is split by heads. Only then may prefill and decode have other ranks.
    """

    name: str
    kind: StateKind
    planes: tuple[int, ...]
    block_bytes: int
    block_count: int
    last: int = 0
    generations: npt.NDArray[np.uint64] | None = None
    first_plane: int | None = None
    is_alike: bool = False

    @property
    def shape(self) -> StateShape:
        """Its numbers.

        Raises:
            InvalidArgument: one is wrong.
        """
        count = len(self.planes)
        size = self.block_bytes
        return StateShape(
            self.name, self.kind, count, size, self.block_count, self.last, self.first_plane or 0,
            self.is_alike,
        )  # fmt: skip


class StatePart(NamedTuple):
    """Blocks of a request in one state buffer.

    Attributes:
        first: position of the first.
        blocks: block of each position from there on.
    """

    first: int
    blocks: list[int]


def check_names(states: Sequence[StateShape]) -> None:
    """Refuse state buffers that cannot be distinguished.

    Raises:
        InvalidArgument: there are too many, or two have the same name.
    """
    names = {state.name for state in states}
    if len(states) > STATES_MAX or len(names) != len(states):
        raise InvalidArgument(
            "states", f"{len(states)} of {len(names)} names; {STATES_MAX} at most"
        )


def check_alike(prefill: Sequence[StateShape], decode: Sequence[StateShape]) -> None:
    """Refuse a decode engine whose state data is not that of prefill.

    Raises:
        InvalidArgument: with the field, for example ``states.mamba.block_bytes``.
    """
    if [state.name for state in prefill] != [state.name for state in decode]:
        names = [
            ", ".join(state.name for state in states) or "none" for states in (prefill, decode)
        ]
        raise InvalidArgument("states", f"prefill has {names[0]}, decode has {names[1]}"[:200])
    for here, there in zip(prefill, decode, strict=True):
        free = {"block_count"} | ({"plane_count", "first_plane"} if here.is_alike else set())
        for field in (one.name for one in fields(StateShape) if one.name not in free):
            numbers = getattr(here, field), getattr(there, field)
            if numbers[0] != numbers[1]:
                what = f"{numbers[0]} of prefill, {numbers[1]} of decode"
                raise InvalidArgument(f"states.{here.name}.{field}", what)


def wanted_states(
    states: Sequence[StateShape], given: Mapping[str, Sequence[int]], blocks: int, first: int
) -> list[StatePart]:
    """The blocks of an announcement, in the order of the buffers.

    Args:
        states: of the own pool.
        given: blocks of the request by name of the buffer.
        blocks: positions of the request.
        first: position from which KV is needed.

    Raises:
        InvalidArgument: they are not the right number of distinct blocks of each buffer.
    """
    unknown = given.keys() - {state.name for state in states}
    if unknown:
        raise InvalidArgument("states", f"{min(unknown)[:40]!r} is not a state buffer")
    found: list[StatePart] = []
    for state in states:
        wanted = state.positions(blocks, first)
        numbers = [int(block) for block in given.get(state.name, ())]
        if len(numbers) != len(wanted) or len(set(numbers)) != len(numbers):
            what = f"{len(numbers)} blocks, {len(wanted)} different ones are needed"
            raise InvalidArgument(f"states.{state.name}", what)
        if numbers and not 0 <= min(numbers) <= max(numbers) < state.block_count:
            raise InvalidArgument(f"states.{state.name}", "a block is not in the buffer")
        found.append(StatePart(wanted.start, numbers))
    return found
