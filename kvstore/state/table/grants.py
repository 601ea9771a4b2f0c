"""Which pages of a put are new, and may come where it says: looked at before anything changes."""

from typing import NamedTuple

from kvstore.page import KEY_BYTES, PrefixKey
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.prefix_tree import PrefixTree


class NewPages(NamedTuple):
    """What may be granted.

    Attributes:
        pages: leading keys that are of no page yet and may follow each other.
        refusal: why no more; None when the next is there or there is none.
        contradicts: the next is known to follow another key than the put says.
        unknown: the tree has no node with any of them.
    """

    pages: int
    refusal: PageStatus | None = None
    contradicts: bool = False
    unknown: bool = False


def known_pages(
    space: PrefixTree, shard: int, packed: bytes, at: int, tick: int
) -> tuple[PageStatus, int] | None:
    """What a put is told of pages that are there, or are being written.

    Args:
        space: where.
        shard: whose pages.
        packed: keys, 32 bytes each.
        at: the byte where the key of the first page begins.
        tick: they are used now.

    Returns:
        that, and of how many pages; None when the first is not there.
    """
    key = PrefixKey(packed[at : at + KEY_BYTES])
    node = space.index.get(key)
    if node is None or not node.present >> shard & 1:
        return None
    offset = node.position(key)
    node = space.exact(node, offset, node.matching(offset, packed, at))
    node.access = tick
    return PageStatus.EXISTS if node.ready >> shard & 1 else PageStatus.PENDING, node.count


def new_pages(space: PrefixTree, shard: int, keys: list[PrefixKey], parent: PrefixKey) -> NewPages:
    """How many leading ``keys`` are of no page yet and may follow each other.

    Args:
        space: where.
        shard: whose pages.
        keys: consecutive, as the put says.
        parent: what the first follows; empty at the start of a chain.
    """
    if not follows(space, shard, parent):
        return NewPages(0, PageStatus.NO_PARENT)
    head, index = space.node_of(parent), space.index
    if len(set(keys)) < len(keys):
        keys = keys[: _distinct(keys)]
    before: PrefixNode | None = None
    following, unknown = 0, True
    for new, key in enumerate(keys):
        known = index.get(key)
        if known is not None and known is before and known.keys.startswith(key, following):
            following += KEY_BYTES  # as the page before it in its node
        elif known is not None:
            unknown = False
            if known.present >> shard & 1:
                return NewPages(new)
            if space.holes.get(known, 0) >> shard & 1:
                # It may come when what followed it has left.
                return NewPages(new, PageStatus.NO_ROOM)
            if space.contradicts(known, key, parent, head):
                return NewPages(new, PageStatus.NO_PARENT, contradicts=True)
            before, following = known, (known.position(key) + 1) * KEY_BYTES
        parent = key
    return NewPages(len(keys), unknown=unknown)


def follows(space: PrefixTree, shard: int, parent: PrefixKey) -> bool:
    """Whether a page behind that of ``parent`` can be reached."""
    if not parent or space.shards[shard].window_pages:
        return True
    head = space.index.get(parent)
    return head is not None and bool(head.present >> shard & 1)


def _distinct(keys: list[PrefixKey]) -> int:
    """How many leading keys differ from each other."""
    seen = set[PrefixKey]()
    for at, key in enumerate(keys):
        if key in seen:
            return at
        seen.add(key)
    return len(keys)
