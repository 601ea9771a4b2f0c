"""Conversations whose pages are kept for a time, whatever the eviction policy says. Pure.

An agent or a user returns to a conversation after minutes, when its pages have long been the least
recently used ones. An engine that knows the conversation of a request names it; its pages are then
kept until a time, up to a number of bytes, from the start of the prompt. They cost others no more
than the budget: pages that do not fit are left to the eviction policy, and the cause is counted.

A page that several conversations share is charged once. All tenants share the budget: one may fill
it, and gives way to those that keep less (:mod:`kvstore.state.choice.shares`), starting with the
last pages of the conversation that was renewed longest ago.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal, NamedTuple, get_args

from kvstore.protocol.page import PrefixKey
from kvstore.state.choice.shares import Shares
from kvstore.state.tree.node import PrefixNode, is_live
from kvstore.state.tree.places import Tier
from kvstore.state.tree.prefix_tree import PrefixTree

CONVERSATIONS_MAX = 4096
KEPT_MAX = 1 << 20
"""Maximum pages of all conversations; one that several share counts for each, for each remembers
it: some 90 bytes of the node's own memory, while the budget is charged once."""
RELEASE_PAGES = 256
"""Maximum pages that one step releases."""
GAVE_WAY_MAX = 4096
"""Maximum pages that are remembered for ``explain`` because they gave way to another tenant or
space."""
_CHECKED_PAGES: Final = 256
_ENDED_NS: Final = 1

KeepCause = Literal["", "missing", "bytes", "budget", "quota", "conversations", "disk"]
"""Why further pages are not kept: not stored (yet), beyond the conversation's bytes, the node's
budget, the space's quota, or :data:`CONVERSATIONS_MAX` or :data:`KEPT_MAX`, or the disk accepts no
more now; empty = all are kept."""


_ALL: Final[KeepCause] = ""
KEEP_CAUSES: Final = get_args(KeepCause)


class KeepOutcome(NamedTuple):
    """The result of :meth:`Conversations.keep`.

    Attributes:
        pages: number of leading keys that are kept.
        cause: why the others are not.
        newly_kept: the nodes that were not kept before, parents first.
        lost: the nodes of other conversations that gave way.
    """

    pages: int
    cause: KeepCause
    newly_kept: list[PrefixNode]
    lost: list[PrefixNode]


class GaveWay(NamedTuple):
    """A page that a conversation no longer keeps: a space that keeps less needed the budget.

    Attributes:
        name: of the conversation.
        space: label of the space that needed the budget.
        at_ns: when.
    """

    name: str
    space: str
    at_ns: int


class Conversation:
    """One conversation in one space.

    Attributes:
        name: the engine's name for it.
        tier: where its pages are kept.
        expires_ns: when they are left to the eviction policy again.
        bytes_max: its maximum size, as last requested; 0 = no limit of its own.
        nodes: key → its page, parents first.
        size_bytes: size of its pages in the tier.
        gave_way: number of pages that gave way to others.
    """

    __slots__ = (
        "bytes_max",
        "expires_ns",
        "gave_way",
        "name",
        "nodes",
        "size_bytes",
        "space",
        "tier",
    )

    def __init__(self, space: PrefixTree, name: str, tier: Tier) -> None:
        self.space = space
        self.name = name
        self.tier = tier
        self.expires_ns = self.gave_way = self.bytes_max = 0
        self.nodes: dict[PrefixKey, PrefixNode] = {}
        self.size_bytes = 0


class _Charge:
    """The charged size of one page, and the conversations that keep it: usually one."""

    __slots__ = ("first", "others", "size_bytes")

    def __init__(self, size_bytes: int, first: Conversation) -> None:
        self.size_bytes = size_bytes
        self.first = first
        self.others: set[Conversation] | None = None

    def keepers(self) -> list[Conversation]:
        return [self.first, *(self.others or ())]

    def is_of(self, one: Conversation) -> bool:
        return one is self.first or (self.others is not None and one in self.others)

    def add(self, one: Conversation) -> None:
        assert not self.is_of(one), "it keeps a page once"
        if self.others is None:
            self.others = set()
        self.others.add(one)

    def remove(self, one: Conversation) -> bool:
        """Remove a conversation; returns whether none is left."""
        if one is not self.first:
            assert self.others is not None
            self.others.remove(one)
            return False
        if not self.others:
            return True
        self.first = self.others.pop()
        return False


class Conversations:
    """All conversations whose pages one node keeps, in one tier.

    Attributes:
        budget_bytes: their maximum size in memory, together.
        disk_budget_bytes: their maximum size on disk, together.
        used_bytes: their size in memory.
        disk_used_bytes: their size on disk.
        gave_way: (number of a space, key) → why a page is no longer kept; the last ones.
    """

    def __init__(self, budget_bytes: int = 0, disk_budget_bytes: int = 0) -> None:
        self.budget_bytes = budget_bytes
        self.disk_budget_bytes = disk_budget_bytes
        self.used_bytes = 0
        self.disk_used_bytes = 0
        self.gave_way: OrderedDict[tuple[int, PrefixKey], GaveWay] = OrderedDict()
        self._all: dict[tuple[int, str], Conversation] = {}
        self._charged: dict[PrefixNode, _Charge] = {}
        #: Pages of all conversations, see :data:`KEPT_MAX`.
        self._kept = 0
        self._shares: Shares[Conversation] = Shares()
        #: No conversation ends before; 0 = none ends.
        self._next_ns = 0

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self._all.values())

    def __len__(self) -> int:
        return len(self._all)

    def keep(
        self, space: PrefixTree, name: str, keys: Sequence[PrefixKey], now_ns: int,
        expires_ns: int, bytes_max: int, tier: Tier, quota_bytes: int,
    ) -> KeepOutcome:  # fmt: skip
        """Keep pages of a conversation until ``expires_ns``, together with those already kept.

        Dropped pages must have been reported to :meth:`changed` before.

        Args:
            space: the space of the pages.
            name: of the conversation.
            keys: consecutive keys; the first is the chain's first, or follows a kept one.
            now_ns: current time of the node's clock.
            expires_ns: end, on the same clock.
            bytes_max: maximum size of the whole conversation; 0 = no limit of its own.
            tier: where its pages are kept; the same for all conversations.
            quota_bytes: maximum size of all conversations of the space; 0 = no limit.
        """
        place = space.number, name
        found = self._all.get(place) or Conversation(space, name, tier)
        step = _Keep(found, now_ns, quota_bytes)
        self._shares.begin()
        if place not in self._all and not self._has_place(step):
            return step.outcome("conversations")
        found.bytes_max = bytes_max
        cause = _ALL
        for key in keys:
            cause = self._keep_page(step, key)
            if cause:
                break
            step.pages += 1
        if step.pages:
            assert found.nodes
            self._all[place] = found
            self._shares.renew(space, name, found)
            found.expires_ns = expires_ns
            self._next_ns = min(self._next_ns or expires_ns, expires_ns)
        return step.outcome(cause)

    def of(self, node: PrefixNode) -> list[Conversation]:
        """The conversations that keep a page."""
        charge = self._charged.get(node)
        return charge.keepers() if charge is not None else []

    def end(self, space: PrefixTree, name: str) -> int:
        """Mark a conversation as expired, for :meth:`expire`; returns its pages, 0 if none."""
        found = self._all.get((space.number, name))
        if found is None or found.expires_ns == _ENDED_NS:
            return 0
        self._end(found)
        return len(found.nodes)

    def give_back(self, space: PrefixTree, name: str, nodes: Sequence[PrefixNode]) -> None:
        """Stop keeping these pages of a conversation."""
        found = self._all[space.number, name]
        for node in nodes:
            if found.nodes.get(node.key) is node:
                self._let_go(found, node.key)
        if not found.nodes:
            self._remove(found)

    def changed(self, nodes: Iterable[PrefixNode]) -> list[PrefixNode]:
        """Pages of shards of these nodes were added or dropped: charge their present size.

        A dropped page is not charged any more. Pages beyond a limit are released, last pages first.

        Returns:
            the nodes that are not kept any more.
        """
        gone: list[PrefixNode] = []
        for node in nodes:
            charge = self._charged.get(node)
            if charge is None:
                continue
            size = _size(node, charge.first.tier) if is_live(node) else 0
            if not size:
                for one in charge.keepers():
                    self._let_go(one, node.key)
                    if not one.nodes:
                        self._remove(one)
                gone.append(node)
            elif size != charge.size_bytes:
                self._charge_anew(charge, size)
                self._shrink(charge, gone)
        return gone

    def expire(self, now_ns: int) -> list[PrefixNode]:
        """Release some pages of expired conversations; returns these pages, last pages first."""
        if not 0 < self._next_ns <= now_ns:
            return []
        gone: list[PrefixNode] = []
        for one in list(self._all.values()):
            if one.expires_ns > now_ns:
                continue
            while one.nodes and len(gone) < RELEASE_PAGES:
                gone.append(self._let_go_last(one)[1])
            assert len(gone) <= RELEASE_PAGES
            if one.nodes:
                return gone
            self._remove(one)
        self._next_ns = min((one.expires_ns for one in self._all.values()), default=0)
        return gone

    def next_deadline_ns(self) -> int:
        """When :meth:`expire` should be called; 0 = not needed."""
        return self._next_ns

    def checks(self) -> Iterator[int]:
        """Assert that charges, counts and kept pages agree, one stretch at a time.

        Yields:
            the number of pages checked in each stretch.
        """
        total = self._shares.check()
        assert self.used_bytes + self.disk_used_bytes == total
        for one in list(self._all.values()):
            pages = list(one.nodes.values())
            if len(pages) <= _CHECKED_PAGES:  # else it may change meanwhile
                sizes = [self._charged[node].size_bytes for node in pages]
                assert one.size_bytes == sum(sizes)
            for start in range(0, len(pages), _CHECKED_PAGES):
                if self._all.get((one.space.number, one.name)) is not one:
                    break
                assert 0 < self._next_ns <= one.expires_ns
                some = pages[start : start + _CHECKED_PAGES]
                for node in some:
                    charge = self._charged.get(node)
                    kept = one.nodes.get(node.key) is node
                    assert kept == (charge is not None and charge.is_of(one)), node
                    assert not kept or node.pins, node
                yield len(some)

    def check(self) -> None:
        """Assert all of this at once."""
        for _ in self.checks():
            pass
        counts: dict[PrefixNode, int] = {}
        for one in self._all.values():
            assert one.nodes
            nodes = one.nodes.values()
            assert one.size_bytes == sum(self._charged[node].size_bytes for node in nodes)
            for node in nodes:
                counts[node] = counts.get(node, 0) + 1
        assert counts == {node: len(charge.keepers()) for node, charge in self._charged.items()}
        assert self._kept == sum(counts.values())
        charged = sum(charge.size_bytes for charge in self._charged.values())
        assert self.used_bytes + self.disk_used_bytes == charged
        assert self._shares.members() == len(self._all)

    # ---- inside -----------------------------------------------------------------------------

    def _has_place(self, step: "_Keep") -> bool:
        """Whether one more conversation fits; one of a space that has more may be ended for it."""
        if len(self._all) < CONVERSATIONS_MAX:
            return True
        share = self._shares.most_members(step.found.space)
        if share is None:
            return False
        oldest = next(iter(share.members.values()))
        while oldest.nodes and step.left > 0:
            self._lose_page(step, oldest)
        if oldest.nodes:
            self._end(oldest)  # it is too long for one step
        return not oldest.nodes

    def _keep_page(self, step: "_Keep", key: PrefixKey) -> KeepCause:
        """Keep one page if no limit forbids it."""
        found = step.found
        if key in found.nodes:
            assert is_live(found.nodes[key])
            return ""
        node = found.space.nodes.get(key)
        if node is None or not node.ready or not self._follows(found, node):
            return "missing"
        if self._kept >= KEPT_MAX:
            return "conversations"
        charge = self._charged.get(node)
        size = charge.size_bytes if charge is not None else _size(node, found.tier)
        if 0 < found.bytes_max < found.size_bytes + size:
            return "bytes"
        if charge is None and (cause := self._refusal(step, size)):
            return cause
        self._take(found, node.key, node, size)  # no second object for the key
        step.newly_kept.append(node)
        return ""

    def _refusal(self, step: "_Keep", size: int) -> KeepCause:
        """Why ``size`` bytes more are not kept: the space's quota, or the budget."""
        if 0 < step.quota_bytes < self._shares.size_bytes(step.found.space) + size:
            return "quota"
        return "" if self._make_room(step, size) else "budget"

    def _follows(self, found: Conversation, node: PrefixNode) -> bool:
        """Whether this conversation keeps the preceding page, or the page is the chain's first."""
        parent = node.parent
        if parent is None or parent is found.space.root:
            return parent is not None
        return found.nodes.get(parent.key) is parent

    def _make_room(self, step: "_Keep", size: int) -> bool:
        """Whether the budget has room for ``size`` bytes; the space that keeps most gives way."""
        found = step.found
        while self._over_budget(found, size):
            share = self._shares.most_bytes(found.space, size) if step.left > 0 else None
            if share is None:
                return False
            self._lose_page(step, next(iter(share.members.values())))
        return True

    def _over_budget(self, found: Conversation, more: int) -> bool:
        if found.tier == "ssd":
            return self.disk_used_bytes + more > self.disk_budget_bytes
        return self.used_bytes + more > self.budget_bytes

    def _lose_page(self, step: "_Keep", one: Conversation) -> None:
        """Release the last page of a conversation for another one."""
        assert one.space is not step.found.space, "it would make room for itself"
        key, node = self._let_go_last(one)
        one.gave_way += 1
        step.left -= 1
        if node not in self._charged:
            step.lost.append(node)
            place = one.space.number, key
            self.gave_way[place] = GaveWay(one.name, step.found.space.label, step.now_ns)
            self.gave_way.move_to_end(place)
            if len(self.gave_way) > GAVE_WAY_MAX:
                self.gave_way.popitem(last=False)
        if not one.nodes:
            self._remove(one)

    def _take(self, found: Conversation, key: PrefixKey, node: PrefixNode, size: int) -> None:
        assert key not in found.nodes, node
        charge = self._charged.get(node)
        if charge is None:
            self._charged[node] = _Charge(size, found)
            self._count(found, size)
            _pin(node, found.tier, 1)
            if self.gave_way:
                self.gave_way.pop((found.space.number, key), None)
        else:
            charge.add(found)
        found.nodes[key] = node
        found.size_bytes += size
        self._kept += 1

    def _let_go(self, found: Conversation, key: PrefixKey) -> None:
        self._discharge(found, found.nodes.pop(key))

    def _let_go_last(self, one: Conversation) -> tuple[PrefixKey, PrefixNode]:
        """Release the last page of a conversation; it."""
        key, node = one.nodes.popitem()  # to look for the last key passes all that were deleted
        self._discharge(one, node)
        return key, node

    def _discharge(self, found: Conversation, node: PrefixNode) -> None:
        charge = self._charged[node]
        self._kept -= 1
        found.size_bytes -= charge.size_bytes
        assert found.size_bytes >= 0 <= self._kept, node
        if charge.remove(found):
            del self._charged[node]
            self._count(found, -charge.size_bytes)
            _pin(node, found.tier, -1)

    def _charge_anew(self, charge: _Charge, size: int) -> None:
        """Change the charged size of a page."""
        more = size - charge.size_bytes
        charge.size_bytes = size
        for one in charge.keepers():
            one.size_bytes += more
        self._count(charge.first, more)

    def _shrink(self, charge: _Charge, gone: list[PrefixNode]) -> None:
        """A kept page has grown: release pages of its conversations until no limit is exceeded."""
        for one in charge.keepers():
            while one.nodes and len(gone) < RELEASE_PAGES and self._exceeds(one):
                gone.append(self._let_go_last(one)[1])
            if not one.nodes:
                self._remove(one)
            elif self._exceeds(one):
                self._end(one)  # the rest goes in turns

    def _exceeds(self, one: Conversation) -> bool:
        return 0 < one.bytes_max < one.size_bytes or self._over_budget(one, 0)

    def _count(self, found: Conversation, more: int) -> None:
        self._shares.charge(found.space, more)
        if found.tier == "ssd":
            self.disk_used_bytes += more
            assert self.disk_used_bytes >= 0
        else:
            self.used_bytes += more
            assert self.used_bytes >= 0

    def _end(self, one: Conversation) -> None:
        assert one.nodes, "nothing is left to release"
        one.expires_ns = self._next_ns = _ENDED_NS

    def _remove(self, one: Conversation) -> None:
        assert not one.nodes
        if self._all.pop((one.space.number, one.name), None) is not None:
            self._shares.remove(one.space, one.name)


class _Keep:
    """One call of :meth:`Conversations.keep`."""

    __slots__ = ("found", "left", "lost", "newly_kept", "now_ns", "pages", "quota_bytes")

    def __init__(self, found: Conversation, now_ns: int, quota_bytes: int) -> None:
        self.found = found
        self.now_ns = now_ns
        self.quota_bytes = quota_bytes
        self.pages = 0
        self.newly_kept: list[PrefixNode] = []
        self.lost: list[PrefixNode] = []
        self.left = RELEASE_PAGES

    def outcome(self, cause: KeepCause) -> KeepOutcome:
        return KeepOutcome(self.pages, cause, self.newly_kept, self.lost)


def _pin(node: PrefixNode, tier: Tier, change: int) -> None:
    if tier == "ssd":
        node.disk_pins += change
        assert node.disk_pins >= 0, node
    else:
        node.memory_pins += change
        assert node.memory_pins >= 0, node


def _size(node: PrefixNode, tier: Tier) -> int:
    """Size of the READY pages of a node in a tier, all shards together."""
    size, shards = 0, node.space.shards
    for shard, of in enumerate(shards):
        if node.ready >> shard & 1:
            size += of.record_bytes if tier == "ssd" else of.slot_bytes
    return size
