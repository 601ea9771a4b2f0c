"""Which pages of a put are new, and may come where it says: looked at before anything changes."""

from kvstore.page import PrefixKey
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.prefix_tree import PrefixTree


def known_page(space: PrefixTree, shard: int, key: PrefixKey, tick: int) -> PageStatus | None:
    """What a put is told of a page that is there, or is being written; None for no page."""
    node = space.nodes.get(key)
    if node is None or not node.present >> shard & 1:
        return None
    node.access = tick
    return PageStatus.EXISTS if node.ready >> shard & 1 else PageStatus.PENDING


def new_pages(
    space: PrefixTree, shard: int, keys: list[PrefixKey], parent: PrefixKey
) -> tuple[int, PageStatus | None, bool]:
    """How many leading ``keys`` are of no page yet and may follow each other.

    Args:
        space: where.
        shard: whose pages.
        keys: consecutive, as the put says.
        parent: what the first follows; empty at the start of a chain.

    Returns:
        how many; why no more, None when the next is there or there is none; and whether the next
        is known to follow another key than the put says.
    """
    if not follows(space, shard, parent):
        return 0, PageStatus.NO_PARENT, False
    head, seen = space.node_of(parent), set[PrefixKey]()
    for new, key in enumerate(keys):
        known = space.nodes.get(key)
        if key in seen or (known is not None and known.present >> shard & 1):
            return new, None, False
        if known is not None and space.holes.get(known, 0) >> shard & 1:
            return new, PageStatus.NO_ROOM, False  # it may come when what followed it has left
        if known is not None and space.contradicts(known, parent, head):
            return new, PageStatus.NO_PARENT, True
        seen.add(key)
        parent = key
    return len(keys), None, False


def follows(space: PrefixTree, shard: int, parent: PrefixKey) -> bool:
    """Whether a page behind that of ``parent`` can be reached."""
    if not parent or space.shards[shard].window_pages:
        return True
    head = space.nodes.get(parent)
    return head is not None and bool(head.present >> shard & 1)
