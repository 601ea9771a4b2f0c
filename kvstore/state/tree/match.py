"""How long a prefix is there: the longest run of a chain whose pages meet every group's need.

For groups that need every page the pages *present* (READY or WRITING) of a shard are a subtree: a
page is granted only under a present one, and what loses its head is dropped. So along one chain
presence can be bisected, and only the few pages that are being written need a look of their own. A
lookup of 2,048 keys takes a dozen steps instead of 2,048.
"""

from typing import Final, NamedTuple

from kvstore.errors import InvalidArgument
from kvstore.page import KEY_BYTES, PrefixKey
from kvstore.state.tree.prefix_tree import PrefixNode, PrefixTree

_WRITING_MAX: Final = 256
"""More pages being written than this, and looking at each key is no slower."""
WINDOWS_MAX: Final = 8
"""Different windows that one lookup may ask for: each looks at every key."""
SCAN_LOOKS_MAX: Final = 65_536
"""Keys times windows that one lookup looks at: the leading keys, whatever is behind them."""


class Match(NamedTuple):
    """The longest usable prefix.

    Attributes:
        pages: how many leading keys are a hit.
        pending: how many more would be once everything being written is READY.
        deepest: node of the last page of the hit.
    """

    pages: int
    pending: int
    deepest: PrefixNode | None


def longest_match(space: PrefixTree, shards: list[int], packed: bytes) -> Match:
    """Match a chain's keys against the pages of ``shards``.

    Args:
        space: where to look.
        shards: numbers of the shards needed; at least one.
        packed: consecutive keys of one chain, 32 bytes each; at least one.
    """
    windows = by_window(space, shards)
    if len(windows) == 1 and 0 in windows:
        return _bisect(space, windows[0], packed)
    return _scan(space, windows, packed[: SCAN_LOOKS_MAX // len(windows) * KEY_BYTES])


def by_window(space: PrefixTree, shards: list[int]) -> dict[int, int]:
    """Pages needed at the end of a prefix (0 = all) → bit mask of the shards that need so.

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
    """The first page without which ``count`` pages are no hit yet; it is being written.

    Args:
        space: where to look.
        shards: numbers of the shards needed.
        packed: what :func:`longest_match` was asked.
        count: pages and pending pages that it found.
    """
    assert count > 0
    windows = by_window(space, shards)
    needed = [(max(0, count - (of or count)), mask) for of, mask in windows.items()]
    key = PrefixKey(b"")
    for at in range(count):
        key = PrefixKey(packed[at * KEY_BYTES : (at + 1) * KEY_BYTES])
        node = space.nodes.get(key)
        ready = node.ready if node is not None else 0
        if any(at >= first and mask & ~ready for first, mask in needed):
            return key
    return key


def _bisect(space: PrefixTree, mask: int, packed: bytes) -> Match:
    nodes = space.nodes
    first = nodes.get(PrefixKey(packed[:KEY_BYTES]))
    if first is None or first.present & mask != mask:
        return Match(0, 0, None)
    low, high = 1, len(packed) // KEY_BYTES  # low pages are present; more than high are not
    last = first
    while low < high:
        middle = (low + high + 1) // 2
        node = nodes.get(PrefixKey(packed[(middle - 1) * KEY_BYTES : middle * KEY_BYTES]))
        if node is not None and node.present & mask == mask:
            low, last = middle, node
        else:
            high = middle - 1
    if last.depth - first.depth != low - 1 or len(space.writing) + len(space.holes) > _WRITING_MAX:
        # Keys that are no chain, or too much being written or leaving.
        return _scan(space, {0: mask}, packed)
    found = low
    for node, gone in space.holes.items():
        if gone & mask and _is_at(node, first, packed, low):
            low = node.depth - first.depth
    ready = low
    for node in space.writing:
        if node.ready & mask != mask and _is_at(node, first, packed, ready):
            ready = node.depth - first.depth
    if ready and ready < found:
        before = nodes.get(PrefixKey(packed[(ready - 1) * KEY_BYTES : ready * KEY_BYTES]))
        if before is None:  # no chain either: its ends only fit by their depth
            return _scan(space, {0: mask}, packed)
        last = before
    return Match(ready, low - ready, last if ready else None)


def _is_at(node: PrefixNode, first: PrefixNode, packed: bytes, below: int) -> bool:
    """Whether a node is of the first ``below`` keys of the chain that begins at ``first``."""
    at = node.depth - first.depth
    return 0 <= at < below and node.key == packed[at * KEY_BYTES : (at + 1) * KEY_BYTES]


def _scan(space: PrefixTree, windows: dict[int, int], packed: bytes) -> Match:
    found = [
        space.nodes.get(PrefixKey(packed[at : at + KEY_BYTES]))
        for at in range(0, len(packed), KEY_BYTES)
    ]
    pages = _longest([node.ready if node else 0 for node in found], windows)
    pending = _longest([node.present if node else 0 for node in found], windows) - pages
    return Match(pages, max(pending, 0), found[pages - 1] if pages else None)


def _longest(have: list[int], windows: dict[int, int]) -> int:
    """The largest n such that every group's need is met by the first n pages.

    Args:
        have: bit mask of the shards there, a page.
        windows: pages needed at the end of the prefix (0 = all) → mask of the shards that need so.
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
