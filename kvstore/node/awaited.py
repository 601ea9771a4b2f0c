"""What requests wait for; those for the same room share a queue. Pure."""

from collections.abc import Hashable
from typing import NamedTuple

from kvstore.protocol import wire
from kvstore.protocol.errors import TransferTimeout
from kvstore.state.disk.jobs import NOBODY_WAITS_NS, Durable
from kvstore.state.table.pages import PageTable
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.sessions import Fetch, Process

Outcome = tuple[wire.Answer, Hashable]
"""An answer, and what to wait for to get a better one; None = nothing."""


class RoomFor(NamedTuple):
    """What a request waits for while memory or space on disk is being freed.

    Requests for the same room want the same slots under the same quotas: where the first one finds
    none, those behind it do not either.

    Attributes:
        use: what for: ``put``, ``load`` or ``disk``.
        tenant: of the space.
        slot_bytes: size of the slots.
        session: token of the session.
        space: number of the space.
    """

    use: str
    tenant: str
    slot_bytes: int
    session: bytes
    space: int


def room_is_coming(pages: PageTable) -> bool:
    """Whether there will be more room without a further request."""
    held = pages.residents
    return pages.draining.now is not None or pages.disk.busy or held.eviction.behind


def room_for(use: str, process: Process, space: PrefixTree, shard: int) -> RoomFor:
    """What to wait for until there is room for pages of a shard."""
    tenant, slot_bytes = space.identity.tenant, space.shards[shard].slot_bytes
    return RoomFor(use, tenant, slot_bytes, process.session.token, space.number)


def acknowledge(request: wire.Persist, durable: Durable) -> wire.Answer:
    """The answer to a Persist after its sync or its deadline.

    Raises:
        KVStoreError: the pages are not durable; they may be later.
    """
    if durable.error is not None:
        raise durable.error
    if not durable.ended:
        durable.deadline_ns = NOBODY_WAITS_NS
        raise TransferTimeout("the pages are not synced yet; they may be later")
    return wire.Persisted(request.id)


def give_up(pages: PageTable, process: Process, awaited: Hashable) -> None:
    """A request does not wait any more: nothing further begins for it."""
    match awaited:
        case Fetch():
            pages.end_fetch(process, awaited)
        case Durable():
            awaited.deadline_ns = NOBODY_WAITS_NS
