"""Which prefill ranks a decode rank asks for KV, based on the registry's answer. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.handoff.ranks import RANKS_MAX, RankGroup, RankPart, Share, Span, plan_ranks
from kvstore.handoff.registry import RankRecord
from kvstore.handoff.shape import PoolShape
from kvstore.handoff.state_data import StateShape, check_alike
from kvstore.handoff.tables import LinkSource
from kvstore.protocol.errors import InvalidArgument, PeerUnreachable


class PeerRank(NamedTuple):
    """One prefill rank to connect to.

    Attributes:
        record: its registration.
        share: the part of the KV that the link moves.
        source: the same for the core.
        states: planes of each state buffer that are sent over the link.
    """

    record: RankRecord
    share: Share
    source: LinkSource
    states: tuple[Span, ...] = ()


def peer_ranks(
    records: Sequence[RankRecord], group: RankGroup, shape: PoolShape, transport: str = ""
) -> list[PeerRank]:
    """The prefill ranks that send something to a decode rank, or must be notified.

    Args:
        records: records of the registry.
        group: all ranks of decode, and the number of this rank.
        shape: shape of the pool of this rank.
        transport: in addition to TCP, a transport through which this rank can be written to; empty
            = none.

    Raises:
        PeerUnreachable: not all ranks are registered; they may be later.
        InvalidArgument: they do not match those of decode; with the field that does not.
    """
    sizes = {(record.ranks, record.data_ranks) for record in records}
    if len(sizes) != 1:
        what = f"{len(records)} ranks of prefill are registered, of {len(sizes)} different numbers"
        raise PeerUnreachable(what)
    ((ranks, data_ranks),) = sizes
    if ranks * data_ranks > RANKS_MAX:
        raise PeerUnreachable(f"{ranks} x {data_ranks} ranks of prefill, at most {RANKS_MAX}")
    by_number = {(record.data_rank, record.rank): record for record in records}
    wanted = [(data_rank, rank) for data_rank in range(data_ranks) for rank in range(ranks)]
    missing = [number for number in wanted if number not in by_number]
    if missing:
        data_rank, rank = missing[0]
        what = f"{len(missing)} ranks of prefill are not registered, rank {rank} of {data_rank} too"
        raise PeerUnreachable(what)
    found: list[PeerRank] = []
    for data_rank in range(data_ranks):
        there = [by_number[data_rank, rank] for rank in range(ranks)]
        parts = [RankPart(record.layers, record.heads) for record in there]
        shares = plan_ranks(parts, group.parts).of_decode(group.rank)
        states = _states_of(shape, group, there, shares)
        for share, planes in zip(shares, states, strict=True):
            record = there[share.prefill]
            moved = shape.share(share, parts[share.prefill], planes)
            writes = transport in record.transports and bool(moved.planes)
            source = LinkSource(share.prefill, moved, data_rank, data_ranks, writes)
            found.append(PeerRank(record, share, source, planes))
    return found


def _states_of(
    shape: PoolShape, group: RankGroup, there: Sequence[RankRecord], shares: Sequence[Share]
) -> list[tuple[Span, ...]]:
    """The planes of each state buffer that are sent over each link: each plane over one.

    Raises:
        InvalidArgument: the state data of prefill does not match this rank's, or no rank that sends
            KV to it has a plane; with the field.
    """
    if not shape.states and not any(record.shape.states for record in there):
        return [()] * len(shares)
    found: list[list[Span]] = [[(0, 0)] * len(shape.states) for _ in shares]
    senders = [at for at, share in enumerate(shares) if share.part is not None]
    for at in senders:
        check_alike(there[shares[at].prefill].shape.states, shape.states)
    alike = [RankPart(record.layers, record.heads) for record in there] == list(group.parts)
    for index, state in enumerate(shape.states):
        if not state.is_alike:
            if not alike:
                what = "the ranks are not those of prefill, and the buffer is not alike on them"
                raise InvalidArgument(f"states.{state.name}", what)
            (own,) = [at for at in senders if shares[at].prefill == group.rank]
            found[own][index] = state.planes
            continue
        held = [there[shares[at].prefill].shape.states[index].planes for at in senders]
        for at, planes in _covered(state, held):
            found[senders[at]][index] = planes
    return [tuple(planes) if at in senders else () for at, planes in enumerate(found)]


def _covered(state: StateShape, held: Sequence[Span]) -> list[tuple[int, Span]]:
    """Which rank sends which planes of a buffer that several ranks hold.

    Args:
        state: at this rank.
        held: the planes of each rank that can send them.

    Returns:
        Index of the sender, and its planes: each plane of the buffer once.

    Raises:
        InvalidArgument: no rank has a plane.
    """
    found: list[tuple[int, Span]] = []
    first, last = state.planes
    for (start, stop), at in sorted((planes, at) for at, planes in enumerate(held)):
        if start <= first < min(stop, last):
            found.append((at, (first, min(stop, last))))
            first = min(stop, last)
    if first < last:
        what = f"no rank of prefill that sends KV to this one has plane {first}"
        raise InvalidArgument(f"states.{state.name}.planes", what)
    return found
