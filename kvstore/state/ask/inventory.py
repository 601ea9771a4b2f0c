"""Lists the pages of a node: all, some chosen at random, or those with given keys. Pure.

A walk over all pages is **fuzzy**: pages are added and removed between two of its steps. Together
with the events it is still exact. A follower clears its state, adds what the walk shows, and then
applies, in order, every batch of events that was published after the walk began:

* The last of these events of a page gives its final state, whatever the walk has shown.
* A page without such an event is where it was when the walk began. It is in the order of creation
  during the whole walk, which shows it once, whatever node it is part of; and no page is shown that
  is not there.

So the follower is exact once it has applied all batches that were published before the walk ended.
Until then it may list pages that were removed, and miss pages that were added.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from kvstore.protocol.page import KEY_BYTES, PrefixKey
from kvstore.state.table.pages import PageTable
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.places import Tier
from kvstore.state.tree.prefix_tree import PrefixTree

HOST: Final = 1
SSD: Final = 2
_STEP_SHARDS: Final = 16
"""Shards of one step, which examines 256 nodes: some 30 microseconds per shard."""
_STEP_KEYS: Final = 256
_SAMPLED_MIN: Final = 1 / 16
"""If a chunk of nodes is sampled at all, at least this share of its nodes is."""


class HeldPages(NamedTuple):
    """Pages of one shard in one tier.

    Their keys are packed, mostly parents before children: an object per key would keep Python's
    garbage collector busy.
    """

    space: PrefixTree
    shard: int
    tier: Tier
    packed: bytes


def walk(table: PageTable) -> Iterator[list[HeldPages]]:
    """Every page, once for each of its tiers; one list per step, which may be empty."""
    for space in list(table.spaces):
        for number in space.by_creation.numbers(0):
            pages = [(node, node.keys) for node in space.by_creation.nodes(number)]
            for first in range(0, len(space.shards), _STEP_SHARDS):
                yield _held(space, pages, range(first, first + _STEP_SHARDS))


def sample(
    table: PageTable, pages: int, below: Callable[[int], int], chance: Callable[[], float]
) -> Iterator[list[HeldPages]]:
    """Pages of about ``pages`` keys, each key with equal probability; one list per step.

    Args:
        table: the page table.
        pages: wanted keys, 1 or more; fewer if the node has fewer.
        below: a random integer from 0 up to its argument, exclusive.
        chance: a random number from 0 to 1.
    """
    counts = [(space, len(space.index)) for space in table.spaces if len(space.index)]
    keys = sum(count for _, count in counts)
    for space, count in counts:  # which may have changed before the turn of a space comes
        wanted = int(pages * count / keys + chance())
        rate = max(_SAMPLED_MIN, min(1.0, 2 * wanted / max(1, len(space.index))))
        numbers = space.by_creation.numbers(0) if wanted else []
        while wanted > 0 and numbers:
            at = below(len(numbers))
            numbers[at], numbers[-1] = numbers[-1], numbers[at]
            nodes = space.by_creation.nodes(numbers.pop())
            chosen: list[tuple[PrefixNode, bytes]] = []
            for node in nodes:
                some = [key for key in node.key_list() if chance() < rate][:wanted]
                wanted -= len(some)
                chosen.append((node, b"".join(some)))
            for first in range(0, len(space.shards), _STEP_SHARDS):
                yield _held(space, chosen, range(first, first + _STEP_SHARDS))


def tiers_of(space: PrefixTree, shard: int, packed: bytes) -> Iterator[bytes]:
    """Where the pages of some keys are READY, one byte per key: :data:`HOST` + :data:`SSD`.

    Args:
        space: the space.
        shard: number of the shard.
        packed: the keys, 32 bytes each; each step takes some keys.
    """
    bit = 1 << shard
    for start in range(0, len(packed), _STEP_KEYS * KEY_BYTES):
        some = packed[start : start + _STEP_KEYS * KEY_BYTES]
        nodes = [
            space.index.get(PrefixKey(some[at : at + KEY_BYTES]))
            for at in range(0, len(some), KEY_BYTES)
        ]
        yield bytes(
            0
            if node is None or not node.ready & bit
            else HOST * bool(node.memory & bit) + SSD * bool(node.on_disk & bit)
            for node in nodes
        )


def shard_of(table: PageTable, space_label: str, shard_label: str) -> tuple[PrefixTree, int] | None:
    """The space and shard number for the names in events; None if there are none."""
    for space in table.spaces:
        if space.label == space_label:
            for number, shard in enumerate(space.shards):
                if shard.event_label == shard_label:
                    return space, number
    return None


def _held(
    space: PrefixTree,
    pages: Sequence[tuple[PrefixNode, bytes]],
    shards: Sequence[int],
) -> list[HeldPages]:
    """The READY pages among some pages of nodes, packed; removed nodes have none."""
    found: list[HeldPages] = []
    for shard in shards[: len(space.shards) - shards[0]]:
        bit = 1 << shard
        packed = b"".join([some for node, some in pages if node.ready & node.memory & bit])
        if packed:
            found.append(HeldPages(space, shard, "host", packed))
        packed = b"".join([some for node, some in pages if node.ready & node.on_disk & bit])
        if packed:
            found.append(HeldPages(space, shard, "ssd", packed))
    return found
