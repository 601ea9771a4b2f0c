"""Whom a rank of decode asks for KV: what the registry says, and what follows from it. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.errors import PeerUnreachable
from kvstore.handoff.ranks import RANKS_MAX, RankGroup, RankPart, Share, plan_ranks
from kvstore.handoff.registry import RankRecord
from kvstore.handoff.shape import PoolShape
from kvstore.handoff.tables import LinkSource


class PeerRank(NamedTuple):
    """One rank of prefill to connect to.

    Attributes:
        record: its registration.
        share: what the link is for.
        source: the same for the core.
    """

    record: RankRecord
    share: Share
    source: LinkSource


def peer_ranks(
    records: Sequence[RankRecord], group: RankGroup, shape: PoolShape, transport: str = ""
) -> list[PeerRank]:
    """The ranks of prefill that send something to a rank of decode, or must be told.

    Args:
        records: of the registry.
        group: all ranks of decode, and which of them this is.
        shape: of the pool of this rank.
        transport: besides TCP, by which this rank can be written to; empty = none.

    Raises:
        PeerUnreachable: not all ranks are registered; perhaps they will be.
        InvalidArgument: they do not fit to those of decode; with the field that does not.
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
        for share in plan_ranks(parts, group.parts).of_decode(group.rank):
            record = there[share.prefill]
            moved = shape.share(share, parts[share.prefill])
            writes = transport in record.transports and bool(moved.planes)
            source = LinkSource(share.prefill, moved, data_rank, data_ranks, writes)
            found.append(PeerRank(record, share, source))
    return found
