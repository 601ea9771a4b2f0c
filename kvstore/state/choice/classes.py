"""What a node is to a choice: the classes of its slots, and whether it is held. Pure."""

from kvstore.state.tree.node import PrefixNode


def is_held(node: PrefixNode) -> bool:
    """Whether an operator's pin keeps the node's pages in memory; on disk, until they are there."""
    return node.memory_pins > 0 or (node.disk_pins > 0 and node.memory & ~node.on_disk > 0)


def classes(node: PrefixNode) -> list[int]:
    """The slot sizes of the node's pages, each once."""
    shards = node.space.shards
    found = [shards[shard].slot_bytes for shard in node.slot_columns]
    return found if len(found) < 2 else sorted(set(found))
