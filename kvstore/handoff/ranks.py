"""Ranks: which part of a request's KV each holds, and which rank sends what to which. Pure.

A rank holds some adjacent **layers** and, of each, some adjacent KV **heads**. A pool of latents
has no heads: all ranks hold its one head 0. Ranks that hold exactly the same are **alike**; all
others hold nothing in common. Together the ranks of prefill hold what those of decode hold.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

from kvstore.protocol.errors import InvalidArgument

RANKS_MAX: Final = 1_024
"""Ranks of one side, and of a registry."""
NUMBER_MAX: Final = 1 << 16
"""Of a layer, and of a head."""

INSTANCE_BYTES: Final = 16

Span = tuple[int, int]
"""First, and the one after the last."""


class RankPart(msgspec.Struct, frozen=True, array_like=True):
    """The part of the KV that one rank holds.

    Attributes:
        layers: first layer of the model, and the one after the last.
        heads: first KV head, and the one after the last; (0, 1) for latents.
    """

    layers: Span
    heads: Span

    def common(self, other: "RankPart") -> "RankPart | None":
        """The part that both hold; None = nothing."""
        layers, heads = _common(self.layers, other.layers), _common(self.heads, other.heads)
        return RankPart(layers, heads) if layers[0] < layers[1] and heads[0] < heads[1] else None

    @property
    def size(self) -> int:
        """Layers x heads."""
        return (self.layers[1] - self.layers[0]) * (self.heads[1] - self.heads[0])


class Share(NamedTuple):
    """The transfer from one prefill rank to one decode rank.

    Attributes:
        prefill: number of the rank.
        decode: number of the rank.
        part: the part of the KV that it sends; None = nothing.
        has_aux: it sends the aux data.
    """

    prefill: int
    decode: int
    part: RankPart | None
    has_aux: bool

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to send: decode only says so, and waits for nothing."""
        return self.part is None and not self.has_aux


class RankPlan(NamedTuple):
    """Which rank sends what to which.

    Attributes:
        shares: at most one for each pair of ranks; each layer and head of each decode rank, and its
            aux data, is in exactly one. A prefill rank that sends nothing has one idle share.
        idle: prefill ranks that send nothing.
    """

    shares: list[Share]
    idle: list[int]

    def of_prefill(self, rank: int) -> list[Share]:
        """The shares that a rank of prefill sends."""
        return [share for share in self.shares if share.prefill == rank]

    def of_decode(self, rank: int) -> list[Share]:
        """The shares that a rank of decode gets."""
        return [share for share in self.shares if share.decode == rank]


def check_parts(parts: Sequence[RankPart]) -> None:
    """Refuse invalid ranks.

    Raises:
        InvalidArgument: ``ranks``: there are none or too many; ``layers`` or ``heads``: of a rank.
    """
    if not 0 < len(parts) <= RANKS_MAX:
        raise InvalidArgument("ranks", f"{len(parts)} is not 1 to {RANKS_MAX}")
    for rank, part in enumerate(parts):
        for field, (first, stop) in (("layers", part.layers), ("heads", part.heads)):
            if not 0 <= first < stop <= NUMBER_MAX:
                raise InvalidArgument(field, f"rank {rank} has {first} to {stop}")


def plan_ranks(prefill: Sequence[RankPart], decode: Sequence[RankPart]) -> RankPlan:
    """Plan which rank sends what to which.

    If several prefill ranks are alike, one of them sends to each decode rank; they take turns. The
    aux data is sent by a rank with the last layer, if possible one that sends KV to that decode
    rank.

    Args:
        prefill: the part of each prefill rank, in the order of their numbers.
        decode: the part of each decode rank, likewise.

    Raises:
        InvalidArgument: ``ranks``, ``layers`` or ``heads`` do not match: the message says why.
    """
    check_parts(prefill)
    check_parts(decode)
    groups, wanted = _alike(prefill), _alike(decode)
    _check_apart(list(groups), "prefill")
    _check_apart(list(wanted), "decode")
    _check_covered(wanted, groups, "prefill")
    _check_covered(groups, wanted, "decode")
    found: dict[tuple[int, int], RankPart | None] = {}
    turns = dict.fromkeys(groups, 0)
    for number, part in enumerate(decode):
        for held, ranks in groups.items():
            both = part.common(held)
            if both is not None:
                found[ranks[turns[held] % len(ranks)], number] = both
                turns[held] += 1
    stop = max(part.layers[1] for part in prefill)
    last = [rank for rank, part in enumerate(prefill) if part.layers[1] == stop]
    aux: set[tuple[int, int]] = set()
    for number in range(len(decode)):
        sending = [rank for rank in last if (rank, number) in found]
        pair = (sending[0] if sending else last[number % len(last)], number)
        found.setdefault(pair, None)
        aux.add(pair)
    busy = {rank for rank, _ in found}
    idle = [rank for rank in range(len(prefill)) if rank not in busy]
    for at, rank in enumerate(idle):
        found[rank, at % len(decode)] = None
    shares = [Share(*pair, part, pair in aux) for pair, part in sorted(found.items(), key=_pair)]
    return RankPlan(shares, idle)


def data_rank_of(room: int, data_ranks: int) -> int:
    """The data-parallel rank of prefill, of ``data_ranks``, that serves a room."""
    return room % data_ranks


def _pair(item: tuple[tuple[int, int], RankPart | None]) -> tuple[int, int]:
    return item[0]


def _common(one: Span, other: Span) -> Span:
    return max(one[0], other[0]), min(one[1], other[1])


def _alike(parts: Sequence[RankPart]) -> dict[RankPart, list[int]]:
    """The ranks that hold each part."""
    found: defaultdict[RankPart, list[int]] = defaultdict(list)
    for rank, part in enumerate(parts):
        found[part].append(rank)
    return dict(found)


def _check_apart(parts: Sequence[RankPart], side: str) -> None:
    """Refuse different parts of one side that share some layers and heads.

    Raises:
        InvalidArgument: ``heads``.
    """
    bounds = np.array([(*part.layers, *part.heads) for part in parts])
    shared = np.ones((len(parts), len(parts)), dtype=np.bool_)
    for first, stop in ((0, 1), (2, 3)):
        begins = np.maximum.outer(bounds[:, first], bounds[:, first])
        shared &= begins < np.minimum.outer(bounds[:, stop], bounds[:, stop])
    np.fill_diagonal(shared, val=False)
    if shared.any():
        one, other = (parts[int(at[0])] for at in np.nonzero(shared))
        what = f"layers {one.layers} of heads {one.heads}, {other.layers} of {other.heads}"
        raise InvalidArgument("heads", f"different ranks of {side} share heads: {what}")


def _check_covered(parts: Iterable[RankPart], by: dict[RankPart, list[int]], side: str) -> None:
    """Refuse parts of one side of which the other, ``side``, does not hold all.

    Args:
        parts: parts of one side.
        by: parts of the other side; no two share anything, so sizes can be added.
        side: name of the other.

    Raises:
        InvalidArgument: with the field that does not fit.
    """
    for part in parts:
        shared = [both for held in by if (both := part.common(held)) is not None]
        if sum(both.size for both in shared) == part.size:
            continue
        across = {at for both in shared for at in range(*both.layers)}
        field = "layers" if len(across) < part.layers[1] - part.layers[0] else "heads"
        what = f"layers {part.layers} of heads {part.heads}"
        raise InvalidArgument(field, f"{side} does not have all {what}")


class RankGroup(msgspec.Struct, frozen=True):
    """The ranks of one engine, as one of them knows them.

    Attributes:
        rank: number of this rank.
        parts: what each rank holds, in the order of their numbers; the same at all ranks.
        instance: 16 random bytes, drawn once at the start of the engine, the same at all ranks.
        data_rank: which data-parallel rank of prefill this group is; 0 at decode.
        data_ranks: how many there are.
    """

    rank: int
    parts: tuple[RankPart, ...]
    instance: bytes
    data_rank: int = 0
    data_ranks: int = 1

    @classmethod
    def alone(cls, part: RankPart, instance: bytes) -> "RankGroup":
        """An engine of one rank."""
        return cls(0, (part,), instance)

    @property
    def part(self) -> RankPart:
        """The part that this rank holds."""
        return self.parts[self.rank]

    def check(self, layers: int) -> None:
        """Refuse an invalid group, or one whose rank does not hold ``layers`` layers.

        Raises:
            InvalidArgument: with the field that is wrong.
        """
        check_parts(self.parts)
        if not 0 <= self.rank < len(self.parts):
            raise InvalidArgument("rank", f"{self.rank} of {len(self.parts)}")
        if self.part.layers[1] - self.part.layers[0] != layers:
            raise InvalidArgument("layers", f"rank {self.rank} has other layers than its pool")
        if len(self.instance) != INSTANCE_BYTES:
            raise InvalidArgument("instance", f"{len(self.instance)} bytes, not 16")
        if not 0 <= self.data_rank < self.data_ranks <= RANKS_MAX:
            raise InvalidArgument("data_rank", f"{self.data_rank} of {self.data_ranks}")
