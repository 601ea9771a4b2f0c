"""Maps the pages of a request to tree nodes and slots. Pure.

It also finds the page in a slot, and which pages of a put are new and may follow the page that the
put names. Both are read before anything changes.
"""

from collections.abc import Generator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.protocol.page import KEY_BYTES, PrefixKey
from kvstore.state.tree import node as nodes
from kvstore.state.tree.actions import NO_PARENT, NO_ROOM, PageStatus, Stored
from kvstore.state.tree.columns import pack_slots
from kvstore.state.tree.match import by_window
from kvstore.state.tree.node import PrefixNode, Retention, is_live
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.sessions import Lease, Put
from kvstore.state.tree.slots import INDEX_BITS, INDEX_MASK, Slot, SlotTable

_Keys = npt.NDArray[Any]
"""A key or None, for each slot of an extent."""
_NO_KEYS: Final[_Keys] = np.empty(0, dtype=np.object_)
_NO_SPACES: Final[list[PrefixTree | None]] = []


class Owners:
    """All and only the slots of pages in the trees, and those pages.

    Each extent has two columns, whose growth blocks no request. They name a page by its key, so
    that nothing changes here when a node is split. The keys are in numpy arrays of objects, because
    Python's garbage collector does not traverse those: otherwise it would visit every key of an
    extent while that is young.

    Args:
        slots: the slots.
    """

    def __init__(self, slots: SlotTable) -> None:
        self._slots = slots
        #: For each extent that ever held a page, the key and the space of each slot's page, or
        #: None.
        self._keys: dict[int, _Keys] = {}
        self._spaces: dict[int, list[PrefixTree | None]] = {}

    def run(self, slot: Slot) -> PrefixNode | None:
        """The node of the page in a slot; None if the slot holds no page."""
        position, index = self._slots.position(slot), self._slots.index(slot)
        keys = self._keys.get(position)
        if keys is None or index >= len(keys):
            return None
        key: PrefixKey | None = keys[index]
        space = self._spaces[position][index]
        return None if key is None or space is None else space.index[key]

    def get(self, slot: Slot) -> PrefixNode | None:
        """The page in a slot, as a node of its own; None if the slot holds no page."""
        found = self.run(slot)
        if found is None or found.count == 1:
            return found
        key: PrefixKey | None = self._keys[self._slots.position(slot)][self._slots.index(slot)]
        return found.space.nodes.get(key) if key is not None else None

    def add(self, slots: list[Slot], keys: list[PrefixKey], space: PrefixTree) -> None:
        """Record that the pages of these keys are in these slots."""
        last, known, spaces = -1, _NO_KEYS, _NO_SPACES
        assert len(slots) == len(keys)
        for number, slot in enumerate(slots):
            position, index = slot >> INDEX_BITS, slot & INDEX_MASK
            if position != last:
                last, known = position, self._grown(position)
                spaces = self._spaces[position]
            assert spaces[index] is None
            known[index], spaces[index] = keys[number], space

    def remove(self, slots: list[Slot]) -> None:
        """The pages in these slots were evicted or dropped."""
        last, known, spaces = -1, _NO_KEYS, _NO_SPACES
        for slot in slots:
            position, index = slot >> INDEX_BITS, slot & INDEX_MASK
            if position != last:
                last, known, spaces = position, self._keys[position], self._spaces[position]
            assert spaces[index] is not None
            known[index] = spaces[index] = None

    def _grown(self, position: int) -> "_Keys":
        """The keys of an extent that is new, or that may now have more slots than before."""
        keys, spaces = self._keys.get(position, _NO_KEYS), self._spaces.get(position, _NO_SPACES)
        more = self._slots.extents[position].count - len(spaces)
        if more > 0:
            keys = self._keys[position] = np.append(keys, np.full(more, None))
            self._spaces.setdefault(position, []).extend([None] * more)
        return keys


STEP_RUNS: Final = 256
"""Runs that one step of :func:`lasting_pages` examines."""


class Leased(NamedTuple):
    """The pages of a lease, as they were before their use was counted, which may split runs.

    Attributes:
        lease: the lease.
        digests: of each page, 16 bytes.
        lasting: leading pages that neither expire nor are read once.
        kept: how long each page is kept, if another node asked; otherwise empty.
    """

    lease: Lease
    digests: bytes
    lasting: int
    kept: list[Retention]


def lent(lease: Lease, run: Sequence[PrefixNode], shard: int, *, remote: bool) -> Leased:
    """Read the pages of these nodes for a lease; ``remote``: of another node."""
    digests = b"".join([node.digest_columns[shard] for node in run])
    return Leased(lease, digests, _lasting(run), _kept(run, shard) if remote else [])


def _kept(run: Sequence[PrefixNode], shard: int) -> list[Retention]:
    kept: list[Retention] = []
    for node in run:
        once, memory_only = node.read_once >> shard & 1, node.memory_only >> shard & 1
        stays = Retention(node.expires.get(shard, 0), bool(once), bool(memory_only))
        kept += [stays] * node.count
    return kept


def _lasting(run: Sequence[PrefixNode]) -> int:
    count = 0
    for node in run:
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
    """Nodes of exactly the leading pages of one shard that are READY, in any tier."""
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
    """Find the pages of a chain, of one shard, that other nodes may keep too; in short steps.

    They are READY, do not expire, and are not read-once. For a KV group with ``window_pages`` they
    are the last stored pages of the chain, otherwise the leading ones.

    Returns:
        the index of the first page, and the index behind the last one.
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
    """The same for shards that need every page: walks up from the last page."""
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
    tokens: bytes, above: PrefixNode | None = None, *, unknown: bool = False,
) -> None:  # fmt: skip
    """Start to write new consecutive pages, in as few nodes as possible.

    ``above``: the node that ends with ``parent``, if it is known; ``unknown``: no node has any of
    their keys.
    """
    at, packed, each = 0, b"" if unknown else b"".join(keys), len(tokens) // len(keys)
    if above is None or above is space.root or not is_live(above):
        above = (space.end(parent) or space.add(parent, space.root)) if parent else space.root
    assert not parent or above.keys.endswith(parent), above
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
        if tokens:
            node.learn(tokens[at * each : end * each])
        at, above = end, node


def stored_actions(
    put: Put, stored: list[PrefixNode], keys_of: list[list[PrefixKey]]
) -> list[tuple[PrefixNode, Stored]]:
    """One action for each run of consecutive nodes in ``stored``, with its first node."""
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
    """The action for consecutive nodes and their keys."""
    above = part[0].above
    assert above is not None
    if len(part) == 1:
        return Stored(put.space, put.shard, keys_of[0], above.key, part[0].tokens)
    token_ids = [node.tokens for node in part]
    tokens = b"".join(token_ids) if all(token_ids) else b""
    return Stored(put.space, put.shard, [key for of in keys_of for key in of], above.key, tokens)


def nodes_of(owners: Owners, slots: list[Slot]) -> list[PrefixNode]:
    """The nodes of the pages in the slots of a lease that are still in the index."""
    found: list[PrefixNode] = []
    at = 0
    while at < len(slots):
        node = owners.run(slots[at])
        if node is not None:
            found.append(node)
        at += node.count if node is not None else 1
    assert at == len(slots), "of a node all slots are given, or none"
    return found


def shard_of(node: PrefixNode, slot: Slot) -> int:
    """The shard whose slot of a node's first page this is; 0 if none."""
    for shard in node.slot_columns:
        if node.slots_of(shard)[0] == slot:
            return shard
    return 0


def _unknown(space: PrefixTree, keys: list[PrefixKey]) -> list[PrefixKey]:
    """The leading keys that no node has; the first key is one of them."""
    for at, key in enumerate(keys):
        if space.index.get(key) is not None:
            return keys[:at]
    return keys


class NewPages:
    """Which pages of a put may be granted.

    Args:
        pages: number of leading keys that have no page yet and may follow each other.
        refusal: why the next one may not be granted; None if it is there or there is none.
        contradicts: the next page is known to have another parent than the put says.
        unknown: the tree has no node with any of these keys.
        head: the node that ends with the page before them; None = nobody has looked for it.
    """

    __slots__ = ("contradicts", "head", "pages", "refusal", "unknown")

    def __init__(
        self, pages: int, refusal: PageStatus | None = None, head: PrefixNode | None = None, *,
        contradicts: bool = False, unknown: bool = False,
    ) -> None:  # fmt: skip
        self.pages = pages
        self.refusal = refusal
        self.head = head
        self.contradicts = contradicts
        self.unknown = unknown


def known_pages(
    space: PrefixTree, shard: int, packed: bytes, at: int, tick: int
) -> tuple[PageStatus, int] | None:
    """The answer to a put for pages that are stored, or are being written.

    Args:
        space: the space.
        shard: the shard of the pages.
        packed: keys, 32 bytes each.
        at: offset of the first page's key.
        tick: the current tick; the pages count as used.

    Returns:
        the answer, and for how many pages; None if the first page is missing.
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
    """How many leading ``keys`` have no page yet and may follow each other.

    Args:
        space: the space.
        shard: the shard of the pages.
        keys: consecutive keys, according to the put.
        parent: the key before the first one; empty at the start of a chain.
    """
    if not follows(space, shard, parent):
        return NewPages(0, NO_PARENT)
    head, index = space.node_of(parent), space.index
    if len(set(keys)) < len(keys):
        keys = keys[: _distinct(keys)]
    before: PrefixNode | None = None
    following, unknown = 0, True
    for new, key in enumerate(keys):
        known = index.get(key)
        if known is None:
            before = None
        elif known is before and known.keys.startswith(key, following):
            following += KEY_BYTES  # as the page before it in its node
        else:
            unknown = False
            if known.present >> shard & 1:
                return NewPages(new, None, head)
            if space.holes.get(known, 0) >> shard & 1:
                # It may come when what followed it has left.
                return NewPages(new, NO_ROOM, head)
            if space.contradicts(known, key, parent, head):
                return NewPages(new, NO_PARENT, head, contradicts=True)
            before, following = known, (known.position(key) + 1) * KEY_BYTES
        parent = key
    return NewPages(len(keys), None, head, unknown=unknown)


def follows(space: PrefixTree, shard: int, parent: PrefixKey) -> bool:
    """Whether a lookup can reach a page behind ``parent``."""
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
