"""The invariants of the columns of a node of the prefix tree. Pure."""

from kvstore.protocol.page import DIGEST_BYTES, KEY_BYTES, PrefixKey
from kvstore.state.tree.columns import PLACE_COLUMN, SLOT_COLUMN
from kvstore.state.tree.node import PrefixNode


def check_columns(node: PrefixNode) -> None:
    """Assert that each page has a key, and its part of each column."""
    index, count = node.space.index, node.count
    assert count == 1 or len(node.keys) == count * KEY_BYTES, node
    for at in range(0, len(node.keys), KEY_BYTES):
        assert index[PrefixKey(node.keys[at : at + KEY_BYTES])] is node, node
    assert not node.cold or not node.memory, node
    assert node.memory == sum(1 << shard for shard in node.slot_columns), node
    assert node.on_disk == sum(1 << shard for shard in node.place_columns), node
    assert node.ready == sum(1 << shard for shard in node.digest_columns), node
    assert all(len(one) == count * SLOT_COLUMN for one in node.slot_columns.values()), node
    assert all(len(one) == count * PLACE_COLUMN for one in node.place_columns.values()), node
    if count > 1:
        assert all(len(one) == count * DIGEST_BYTES for one in node.digest_columns.values()), node
        assert not node.pins, ("a pin is of single pages", node)
        assert not node.memory_only, ("what is kept for a time are single pages", node)
    if node.tokens:
        assert node.memory, node
        assert len(node.tokens) == count * node.space.token_bytes, node
