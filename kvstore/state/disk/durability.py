"""Which pages a durable put has to write, and whether they are there in the end. Pure."""

from collections.abc import Sequence

from kvstore.protocol.page import DIGEST_BYTES, KEY_BYTES, PrefixKey
from kvstore.state.disk.jobs import DiskWrite, Durable, RecordOf
from kvstore.state.tree.columns import PLACE_COLUMN
from kvstore.state.tree.node import PrefixNode


def unwritten(nodes: Sequence[PrefixNode], shard: int) -> list[PrefixNode]:
    """Those of these pages, and of the pages needed before them, that are not on disk, in order.

    Pages before them that are being written are left out.
    """
    rest = [one for one in nodes if not one.on_disk >> shard & 1]
    if not rest or rest[0].space.shards[shard].window_pages:
        return rest
    heads: list[PrefixNode] = []
    at = rest[0].above
    while at is not None and at.depth and not (at.on_disk | at.to_disk) >> shard & 1:
        heads.append(at)
        at = at.above
    return heads[::-1] + rest


def places_of(durable: Durable) -> bytes | None:
    """Where the pages of a durable put are on disk, as a column; None if not all are there.

    They are there with the same bytes, and none of them is departing.
    """
    found: list[bytes] = []
    for space, shard, keys, digests in durable.pages:
        for number in range(len(keys) // KEY_BYTES):
            key = PrefixKey(keys[number * KEY_BYTES : (number + 1) * KEY_BYTES])
            node = space.index.get(key)
            if node is None or not node.on_disk & ~space.departing.get(node, 0) & 1 << shard:
                return None
            position = node.position(key)
            digest = digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
            if node.digest_at(shard, position) != digest:
                return None
            at = position * PLACE_COLUMN
            found.append(node.place_columns[shard][at : at + PLACE_COLUMN])
    return b"".join(found)


def pages_of(durable: Durable) -> int:
    """The number of pages of a durable put; 0 of a removal."""
    return sum([len(keys) // KEY_BYTES for _, _, keys, _ in durable.pages])


def is_in_slot(job: DiskWrite, of: RecordOf) -> bool:
    """Whether the page that a job should write is still in that slot."""
    key, shard, node = job.page.key, of.shard, of.space.index.get(job.page.key)
    if node is None or not node.memory >> shard & 1:
        return False
    return node.slots_of(shard)[node.position(key)] == job.slot
