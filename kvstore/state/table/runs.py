"""Which nodes the pages of a message are: requests name pages, the state keeps runs. Pure."""

from collections.abc import Generator
from typing import Final, NamedTuple

from kvstore.page import KEY_BYTES, PrefixKey
from kvstore.state.table.owners import Owners
from kvstore.state.tree import node as nodes
from kvstore.state.tree.actions import Stored
from kvstore.state.tree.columns import pack_slots
from kvstore.state.tree.match import by_window
from kvstore.state.tree.node import PrefixNode, Retention
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.sessions import Lease, Put
from kvstore.state.tree.slots import Slot

STEP_RUNS: Final = 256
"""Runs that one step of :func:`lasting_pages` looks at."""


class Leased(NamedTuple):
    """What was lent.

    Attributes:
        lease: the pages.
        digests: of each, 16 bytes.
        nodes: they are part of, the first one first.
    """

    lease: Lease
    digests: bytes
    nodes: list[PrefixNode]

    def kept(self, shard: int) -> list[Retention]:
        """How long each page of this shard stays."""
        kept: list[Retention] = []
        for node in self.nodes:
            once, memory_only = node.read_once >> shard & 1, node.memory_only >> shard & 1
            stays = Retention(node.expires.get(shard, 0), bool(once), bool(memory_only))
            kept += [stays] * node.count
        return kept

    @property
    def lasting(self) -> int:
        """Leading pages that neither expire nor are read once."""
        count = 0
        for node in self.nodes:
            if node.expires or node.read_once:
                return count
            count += node.count
        return count


def leading_in_memory(space: PrefixTree, packed: bytes, shard: int) -> list[PrefixNode]:
    """Nodes of exactly the leading pages of one shard that are READY and in memory."""
    return leading_ready(space, packed, shard, in_memory=True)


def leading_ready(
    space: PrefixTree, packed: bytes, shard: int, *, in_memory: bool = False
) -> list[PrefixNode]:
    """Nodes of exactly the leading pages of one shard that are READY, in whatever tier."""
    found: list[PrefixNode] = []
    at, index, bit = 0, space.index, 1 << shard
    while at < len(packed):
        key = PrefixKey(packed[at : at + KEY_BYTES])
        node = index.get(key)
        if node is None or not (node.ready & node.memory if in_memory else node.ready) & bit:
            break
        offset = node.position(key)
        node = space.exact(node, offset, node.matching(offset, packed, at))
        found.append(node)
        at += node.count * KEY_BYTES
    return found


def chain_keys(last: PrefixNode) -> bytes:
    """The keys of a chain from its beginning to the last page of a node, 32 bytes each."""
    parts: list[bytes] = []
    at: PrefixNode | None = last
    while at is not None and at.above is not None:
        parts.append(at.keys)
        at = at.above
    return b"".join(reversed(parts))


def lasting_pages(
    space: PrefixTree, shard: int, packed: bytes
) -> Generator[None, None, tuple[int, int]]:
    """Find the pages of one shard of a chain that other nodes may keep too, in short steps.

    They are READY, do not expire, and are not read once. Those of a KV group with ``window_pages``
    are the last ones of the chain that are there; else they are the leading ones.

    Returns:
        number of the first one, and of the one after the last.
    """
    windowed = bool(space.shards[shard].window_pages)
    at = first = stop = looked = 0
    while at < len(packed) // KEY_BYTES:
        key = PrefixKey(packed[at * KEY_BYTES : (at + 1) * KEY_BYTES])
        node = space.index.get(key)
        alike = 1
        if node is not None:
            alike = node.matching(node.position(key), packed, at * KEY_BYTES)
        if (
            node is not None
            and node.ready >> shard & 1
            and not node.read_once >> shard & 1
            and shard not in node.expires
        ):
            first = first if stop == at else at
            stop = at + alike
        elif not windowed:
            break
        at += alike
        looked += 1
        if looked % STEP_RUNS == 0:
            yield
    return first, stop


def ready_pages(space: PrefixTree, shard: int, packed: bytes) -> tuple[int, bool]:
    """How many leading pages of one shard are READY; whether some of them are not in memory."""
    at, missing, index = 0, False, space.index
    while at < len(packed):
        key = PrefixKey(packed[at : at + KEY_BYTES])
        node = index.get(key)
        if node is None or not node.ready >> shard & 1:
            break
        missing = missing or not node.memory >> shard & 1
        at += node.matching(node.position(key), packed, at) * KEY_BYTES
    return at // KEY_BYTES, missing


def missing_pages(space: PrefixTree, shards: list[int], packed: bytes, pages: int) -> int:
    """How many of the first ``pages`` pages, a hit, are not in memory for some shard."""
    windows = by_window(space, shards)
    if len(windows) == 1 and 0 in windows:
        return _missing_above(space, windows[0], packed, pages)
    needed = [(max(0, pages - (of or pages)), mask) for of, mask in windows.items()]
    at, missing = 0, 0
    while at < pages:
        key = PrefixKey(packed[at * KEY_BYTES : (at + 1) * KEY_BYTES])
        node = space.index.get(key)
        have, end = 0, at + 1  # before a window there may be none
        if node is not None:
            have = node.memory
            alike = node.matching(node.position(key), packed, at * KEY_BYTES)
            end = min(at + alike, pages)
        first = min((first for first, mask in needed if mask & ~have), default=pages)
        missing += max(0, end - max(at, first))
        at = end
    return missing


def _missing_above(space: PrefixTree, mask: int, packed: bytes, pages: int) -> int:
    """The same for shards of which every page is needed: what is above the last page is asked."""
    if not pages:
        return 0
    key = PrefixKey(packed[(pages - 1) * KEY_BYTES : pages * KEY_BYTES])
    node = space.index.get(key)
    missing, left = 0, pages
    mine = node.position(key) + 1 if node is not None else 0
    while node is not None and left > 0:
        mine = min(mine, left)
        if mask & ~node.memory:
            missing += mine
        left -= mine
        node = node.above
        mine = node.count if node is not None else 0
    return missing


def begin_pages(
    space: PrefixTree, shard: int, keys: list[PrefixKey], slots: list[Slot], parent: PrefixKey,
    tokens: bytes, *, unknown: bool = False,
) -> None:  # fmt: skip
    """Let new pages that follow each other be written, in as few nodes as can be.

    ``unknown``: no node has any of their keys.
    """
    at, packed, each = 0, b"" if unknown else b"".join(keys), len(tokens) // len(keys)
    above = space.end(parent) if parent else space.root
    if above is None:
        above = space.add(parent, space.root)
    while at < len(keys):
        node = None if unknown else space.index.get(keys[at])
        if node is None:
            run = keys[at : at + nodes.RUN_PAGES_MAX]
            node = space.add_run(run if unknown else _unknown(space, run), above)
        else:
            offset = node.position(keys[at])
            node = space.exact(node, offset, node.matching(offset, packed, at * KEY_BYTES))
            space.hang_up(node, above)
        end = at + node.count
        node.begin_all(shard, pack_slots(slots[at:end]))
        node.learn(tokens[at * each : end * each])
        at, above = end, node


def stored_actions(
    put: Put, stored: list[PrefixNode], keys_of: list[list[PrefixKey]]
) -> list[tuple[PrefixNode, Stored]]:
    """An action for each part of ``stored`` in which node follows node, and its first node."""
    if len(stored) == 1:
        return [(stored[0], _stored(put, stored, keys_of))]
    found: list[tuple[PrefixNode, Stored]] = []
    first = 0
    for at in range(1, len(stored) + 1):
        if at == len(stored) or stored[at].above is not stored[at - 1]:
            found.append((stored[first], _stored(put, stored[first:at], keys_of[first:at])))
            first = at
    return found


def _stored(put: Put, part: list[PrefixNode], keys_of: list[list[PrefixKey]]) -> Stored:
    """The action for nodes that follow each other, and their keys."""
    above = part[0].above
    assert above is not None
    if len(part) == 1:
        return Stored(put.space, put.shard, keys_of[0], above.key, part[0].tokens)
    told = [node.tokens for node in part]
    tokens = b"".join(told) if all(told) else b""
    return Stored(put.space, put.shard, [key for of in keys_of for key in of], above.key, tokens)


def nodes_of(owners: Owners, slots: list[Slot]) -> list[PrefixNode]:
    """The nodes of the pages in the slots of a lease, as far as they are in the index still."""
    found: list[PrefixNode] = []
    at = 0
    while at < len(slots):
        node = owners.run(slots[at])
        if node is not None:
            found.append(node)
        at += node.count if node is not None else 1
    return found


def shard_of(node: PrefixNode, slot: Slot) -> int:
    """Whose slot of a node's first page it is; 0 when it is none."""
    for shard in node.slot_columns:
        if node.slots_of(shard)[0] == slot:
            return shard
    return 0


def _unknown(space: PrefixTree, keys: list[PrefixKey]) -> list[PrefixKey]:
    """The leading keys that no node has; the first is one."""
    for at, key in enumerate(keys):
        if space.index.get(key) is not None:
            return keys[:at]
    return keys
