"""Conversations whose pages are kept for a time, whatever the eviction policy thinks. Pure.

An agent or a user comes back to a conversation after minutes, when its pages have long been the
least recently used ones. An engine that knows the conversation of a request says so; its pages are
then kept until a time, up to a number of bytes, from the start of the prompt on. They cost nobody
more than the budget: what does not fit is left to the policy as before, and the cause is counted.

A page that several conversations share is charged once.
"""

from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple, get_args

from kvstore.page import PrefixKey
from kvstore.state.tree.node import PrefixNode, is_live
from kvstore.state.tree.places import Tier
from kvstore.state.tree.prefix_tree import PrefixTree

CONVERSATIONS_MAX = 4096
RELEASE_PAGES = 256
"""Pages that one step lets go."""
_ENDED_NS: Final = 1

KeepCause = Literal["", "missing", "bytes", "budget", "quota", "conversations", "disk"]
"""Why further pages are not kept: not stored (yet), beyond the conversation's bytes, the node's
budget, the space's quota or :data:`CONVERSATIONS_MAX`, or the disk takes no more now; empty = all
are."""


_ALL: Final[KeepCause] = ""
KEEP_CAUSES: Final = get_args(KeepCause)


class KeepOutcome(NamedTuple):
    """The answer of :meth:`Conversations.keep`.

    Attributes:
        pages: how many of the leading keys are kept.
        cause: why the others are not.
        added: the nodes that were not kept before, heads first.
    """

    pages: int
    cause: KeepCause
    added: list[PrefixNode]


class Conversation:
    """One conversation in one space.

    Attributes:
        name: as the engine calls it.
        tier: where its pages are kept.
        expires_ns: when they are left to the policy again.
        nodes: key → its page, heads first.
        size_bytes: what they take in the tier.
    """

    __slots__ = ("expires_ns", "name", "nodes", "size_bytes", "space", "tier")

    def __init__(self, space: PrefixTree, name: str, tier: Tier) -> None:
        self.space = space
        self.name = name
        self.tier = tier
        self.expires_ns = 0
        self.nodes: dict[PrefixKey, PrefixNode] = {}
        self.size_bytes = 0


class Conversations:
    """All conversations whose pages one node keeps.

    Attributes:
        budget_bytes: what they may take in memory together.
        disk_budget_bytes: what they may take on disk together.
        used_bytes: what they take in memory.
        disk_used_bytes: what they take on disk.
    """

    def __init__(self, budget_bytes: int = 0, disk_budget_bytes: int = 0) -> None:
        self.budget_bytes = budget_bytes
        self.disk_budget_bytes = disk_budget_bytes
        self.used_bytes = 0
        self.disk_used_bytes = 0
        self._all: dict[tuple[int, str], Conversation] = {}
        #: Page → (bytes it was charged with, conversations that keep it).
        self._charged: dict[PrefixNode, tuple[int, int]] = {}
        self._space_bytes: dict[int, int] = {}
        #: No conversation ends before; 0 = none ends.
        self._next_ns = 0

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self._all.values())

    def __len__(self) -> int:
        return len(self._all)

    def keep(
        self, space: PrefixTree, name: str, keys: Sequence[PrefixKey], expires_ns: int,
        bytes_max: int, tier: Tier, quota_bytes: int,
    ) -> KeepOutcome:  # fmt: skip
        """Keep pages of a conversation until ``expires_ns``, and those that are kept already.

        Args:
            space: where the pages are.
            name: of the conversation.
            keys: consecutive keys; the first is the chain's first, or follows a kept one.
            expires_ns: on the node's clock.
            bytes_max: what the whole conversation may take; 0 = no limit of its own.
            tier: where its pages are kept, if it is new.
            quota_bytes: what all conversations of the space may take; 0 = no limit.
        """
        place = space.number, name
        found = self._all.get(place) or Conversation(space, name, tier)
        if place not in self._all and len(self._all) >= CONVERSATIONS_MAX:
            return KeepOutcome(0, "conversations", [])
        added: list[PrefixNode] = []
        pages, cause = 0, _ALL
        for key in keys:
            cause = self._keep_page(found, key, bytes_max, quota_bytes, added)
            if cause:
                break
            pages += 1
        if pages:
            self._all[place] = found
            found.expires_ns = expires_ns
            self._next_ns = min(self._next_ns or expires_ns, expires_ns)
        return KeepOutcome(pages, cause, added)

    def of(self, node: PrefixNode) -> list[Conversation]:
        """The conversations that keep a page; looks at each of them."""
        if node not in self._charged:
            return []
        return [one for one in self._all.values() if one.nodes.get(node.key) is node]

    def end(self, space: PrefixTree, name: str) -> int:
        """Let :meth:`expire` let a conversation go; returns its pages, 0 if none is kept."""
        found = self._all.get((space.number, name))
        if found is None or found.expires_ns == _ENDED_NS:
            return 0
        found.expires_ns = self._next_ns = _ENDED_NS
        return len(found.nodes)

    def give_back(self, space: PrefixTree, name: str, nodes: Sequence[PrefixNode]) -> None:
        """Do not keep these pages of a conversation after all."""
        found = self._all[space.number, name]
        for node in nodes:
            if found.nodes.get(node.key) is node:
                self._let_go(found, node.key)

    def expire(self, now_ns: int) -> list[PrefixNode]:
        """Let some pages of conversations go whose time is up; returns these pages, tails first."""
        if not 0 < self._next_ns <= now_ns:
            return []
        gone: list[PrefixNode] = []
        for place, one in list(self._all.items()):
            if one.expires_ns > now_ns:
                continue
            while one.nodes and len(gone) < RELEASE_PAGES:
                key = next(reversed(one.nodes))
                gone.append(one.nodes[key])
                self._let_go(one, key)
            if one.nodes:
                return gone
            del self._all[place]
        self._next_ns = min((one.expires_ns for one in self._all.values()), default=0)
        return gone

    def next_deadline_ns(self) -> int:
        """When :meth:`expire` should be called; 0 = need not be."""
        return self._next_ns

    def check(self) -> None:
        """Assert that what is charged, counted and kept agree."""
        counts: dict[PrefixNode, int] = {}
        for one in self._all.values():
            assert one.size_bytes == sum(self._charged[node][0] for node in one.nodes.values())
            assert 0 < self._next_ns <= one.expires_ns
            for node in one.nodes.values():
                counts[node] = counts.get(node, 0) + 1
        assert counts == {node: count for node, (_, count) in self._charged.items()}
        charged = sum(size for size, _ in self._charged.values())
        assert self.used_bytes + self.disk_used_bytes == charged == sum(self._space_bytes.values())

    # ---- inside -----------------------------------------------------------------------------

    def _keep_page(
        self, found: Conversation, key: PrefixKey, bytes_max: int, quota_bytes: int,
        added: list[PrefixNode],
    ) -> KeepCause:  # fmt: skip
        """Keep one page if nothing forbids it."""
        known = found.nodes.get(key)
        if known is not None and is_live(known):
            return ""
        if known is not None:
            self._let_go(found, key)
        node = found.space.nodes.get(key)
        if node is None or not node.ready or not self._follows(found, node):
            return "missing"
        charged = self._charged.get(node)
        size = charged[0] if charged is not None else _size(found, node)
        if bytes_max and found.size_bytes + size > bytes_max:
            return "bytes"
        cause = self._exceeded(found, size, quota_bytes) if charged is None else _ALL
        if not cause:
            self._take(found, key, node)
            added.append(node)
        return cause

    def _follows(self, found: Conversation, node: PrefixNode) -> bool:
        """Whether the page before is kept: it stays with this one, and must be charged too."""
        parent = node.parent
        return parent is found.space.root or (parent is not None and parent.key in found.nodes)

    def _exceeded(self, found: Conversation, size: int, quota_bytes: int) -> KeepCause:
        """Which limit of all conversations so many more bytes would exceed."""
        on_disk = found.tier == "ssd"
        used = self.disk_used_bytes if on_disk else self.used_bytes
        if used + size > (self.disk_budget_bytes if on_disk else self.budget_bytes):
            return "budget"
        if quota_bytes and self._space_bytes.get(found.space.number, 0) + size > quota_bytes:
            return "quota"
        return ""

    def _take(self, found: Conversation, key: PrefixKey, node: PrefixNode) -> None:
        size, count = self._charged.get(node, (0, 0))
        if not count:
            size = _size(found, node)
            self._charge(found, node, size, 1)
        self._charged[node] = size, count + 1
        found.nodes[key] = node
        found.size_bytes += size

    def _let_go(self, found: Conversation, key: PrefixKey) -> None:
        node = found.nodes.pop(key)
        size, count = self._charged.pop(node)
        found.size_bytes -= size
        assert count > 0
        if count > 1:
            self._charged[node] = size, count - 1
        else:
            self._charge(found, node, size, -1)

    def _charge(self, found: Conversation, node: PrefixNode, size: int, sign: int) -> None:
        number = found.space.number
        self._space_bytes[number] = self._space_bytes.get(number, 0) + sign * size
        if not self._space_bytes[number]:
            del self._space_bytes[number]
        if found.tier == "ssd":
            self.disk_used_bytes += sign * size
            node.disk_pins += sign
            assert node.disk_pins >= 0
        else:
            self.used_bytes += sign * size
            node.memory_pins += sign
            assert node.memory_pins >= 0


def _size(found: Conversation, node: PrefixNode) -> int:
    """What a page takes in the tier of a conversation, all shards together."""
    shards = [found.space.shards[one] for one in {*node.slot_columns, *node.place_columns}]
    return sum(of.record_bytes if found.tier == "ssd" else of.slot_bytes for of in shards)
