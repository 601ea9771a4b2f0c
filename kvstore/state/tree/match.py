"""How long a stored prefix is: the longest run of a chain that satisfies every KV group.

For groups that need every page, the pages of a shard that are *present* (READY or WRITING) form a
subtree: a page is granted only under a present one, and descendants of a dropped page are dropped.
So presence along one chain can be bisected, and only the few pages that are being written are
looked up one by one. A lookup of 2,048 keys takes a dozen steps instead of 2,048.
"""

from typing import Final, NamedTuple

from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.page import KEY_BYTES, PrefixKey
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.prefix_tree import PrefixTree

_WRITING_MAX: Final = 256
"""With more pages being written than this, looking up each key is as fast."""
WINDOWS_MAX: Final = 8
"""Maximum different windows of one lookup: each requires a look at every key."""
SCAN_LOOKS_MAX: Final = 65_536
"""Maximum keys times windows that one lookup examines: leading keys only, the rest is ignored."""


class Match(NamedTuple):
    """The longest usable prefix.

    Attributes:
        pages: number of leading keys that are a hit.
        pending: how many more would be once everything being written is READY.
        deepest: the node that contains the last page of the hit.
    """

    pages: int
    pending: int
    deepest: PrefixNode | None


def longest_match(space: PrefixTree, shards: list[int], packed: bytes) -> Match:
    """Match a chain's keys against the pages of ``shards``.

    Args:
        space: the space.
        shards: numbers of the required shards; at least one.
        packed: consecutive keys of one chain, 32 bytes each; at least one.
    """
    windows = by_window(space, shards)
    if len(windows) == 1 and 0 in windows:
        return _bisect(space, windows[0], packed)
    return _scan(space, windows, packed[: SCAN_LOOKS_MAX // len(windows) * KEY_BYTES])


def by_window(space: PrefixTree, shards: list[int]) -> dict[int, int]:
    """Number of last pages that are needed (0 = all) → bit mask of the shards with this need.

    Raises:
        InvalidArgument: there are more than :data:`WINDOWS_MAX` different needs.
    """
    windows: dict[int, int] = {}
    for number in shards:
        window = space.shards[number].window_pages
        windows[window] = windows.get(window, 0) | 1 << number
    if len(windows) > WINDOWS_MAX:
        raise InvalidArgument(
            "shards", f"they have {len(windows)} different windows; {WINDOWS_MAX} may be at once"
        )
    return windows


def awaited_key(space: PrefixTree, shards: list[int], packed: bytes, count: int) -> PrefixKey:
    """The first page that is being written and without which ``count`` pages are no hit yet.

    Args:
        space: the space.
        shards: numbers of the required shards.
        packed: the keys passed to :func:`longest_match`.
        count: pages and pending pages that it found.
    """
    assert count > 0
    windows = by_window(space, shards)
    needed = [(max(0, count - (of or count)), mask) for of, mask in windows.items()]
    key = PrefixKey(b"")
    for at in range(count):
        key = PrefixKey(packed[at * KEY_BYTES : (at + 1) * KEY_BYTES])
        node = space.index.get(key)
        ready = node.ready if node is not None else 0
        if any(at >= first and mask & ~ready for first, mask in needed):
            return key
    return key


def _bisect(space: PrefixTree, mask: int, packed: bytes) -> Match:
    nodes = space.index
    first = nodes.get(PrefixKey(packed[:KEY_BYTES]))
    if first is None or first.present & mask != mask:
        return Match(0, 0, None)
    start = first.position(PrefixKey(packed[:KEY_BYTES]))
    low, last = _present(space, mask, packed, first, start)
    before = first.first_depth + start - 1
    if (
        _depth(last, packed, low) - before != low
        or len(space.writing) + len(space.holes) > _WRITING_MAX
    ):
        # Keys that are no chain, or too much being written or leaving.
        return _scan(space, {0: mask}, packed)
    found = low
    for node, gone in space.holes.items():
        at = node.depth - before - 1
        if gone & mask and 0 <= at < low and _begins(node.key, packed, at):
            low = at
    if low < found:  # of two holes the first may be filled already, with pages behind it gone
        low, last = _present(space, mask, packed[: low * KEY_BYTES], first, start)
    ready = low
    for node in space.writing:
        if node.ready & mask != mask:
            ready = min(ready, _meets(node, packed, before, ready))
    if ready and ready < found:
        end = nodes.get(PrefixKey(packed[(ready - 1) * KEY_BYTES : ready * KEY_BYTES]))
        if end is None:  # no chain either: its ends only fit by their depth
            return _scan(space, {0: mask}, packed)
        last = end
    return Match(ready, low - ready, last if ready else None)


def _present(
    space: PrefixTree, mask: int, packed: bytes, first: PrefixNode, start: int
) -> tuple[int, PrefixNode]:
    """How many pages of a chain are present, and the node that contains the last one.

    ``first``: the node that contains the first page, at ``start``.
    """
    low, high, last = first.matching(start, packed, 0), len(packed) // KEY_BYTES, first
    while low < high:
        middle = (low + high + 1) // 2
        node = space.index.get(PrefixKey(packed[(middle - 1) * KEY_BYTES : middle * KEY_BYTES]))
        if node is not None and node.present & mask == mask:
            low, last = middle, node
        else:
            high = middle - 1
    return low, last


def _meets(node: PrefixNode, packed: bytes, before: int, below: int) -> int:
    """The index of the key, among the first ``below``, that a node starts with; ``below`` if none.

    Args:
        node: of any chain.
        packed: keys of one chain.
        before: the depth of the page before the first key.
        below: number of keys to examine.
    """
    at = max(0, node.first_depth - before - 1)
    if at < min(below, node.depth - before):
        key = PrefixKey(packed[at * KEY_BYTES : (at + 1) * KEY_BYTES])
        return at if node.space.index.get(key) is node else below
    return below


def _begins(key: PrefixKey, packed: bytes, at: int) -> bool:
    """Whether a key equals the one with index ``at``."""
    return packed.startswith(key, at * KEY_BYTES)


def _depth(node: PrefixNode, packed: bytes, pages: int) -> int:
    """The depth of the last of ``pages`` keys; ``node`` contains its page."""
    if node.count == 1:
        return node.depth
    key = PrefixKey(packed[(pages - 1) * KEY_BYTES : pages * KEY_BYTES])
    return node.first_depth + node.position(key)


def _scan(space: PrefixTree, windows: dict[int, int], packed: bytes) -> Match:
    found = [
        space.index.get(PrefixKey(packed[at : at + KEY_BYTES]))
        for at in range(0, len(packed), KEY_BYTES)
    ]
    pages = _longest([node.ready if node else 0 for node in found], windows)
    pending = _longest([node.present if node else 0 for node in found], windows) - pages
    return Match(pages, max(pending, 0), found[pages - 1] if pages else None)


def _longest(have: list[int], windows: dict[int, int]) -> int:
    """The largest n such that the first n pages satisfy every group.

    Args:
        have: for each page, a bit mask of the shards that have it.
        windows: number of last pages that are needed (0 = all) → mask of the shards with this need.
    """
    full = windows.get(0, 0)
    best = next((at for at, mask in enumerate(have) if mask & full != full), len(have))
    partial = {window: mask for window, mask in windows.items() if window}
    if not partial:
        return best
    runs = dict.fromkeys(partial, 0)
    longest = 0
    for at in range(best):
        for window, mask in partial.items():
            runs[window] = runs[window] + 1 if have[at] & mask == mask else 0
        if all(runs[window] >= min(window, at + 1) for window in partial):
            longest = at + 1
    return longest
