"""Which page to evict when memory is needed: leaves in order, by slot size and space. Pure.

Pages of one tenant and one slot size share a queue; a space with a quota or a reservation has
queues of its own, so that its leaves can be found, or skipped, without looking at the others'.
Replicas, pages that a peer has too, have additional queues of their own.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from kvstore.protocol.page import PrefixKey
from kvstore.state.choice.aside import BELOW_LOOKS, Passed, QueuesBehind, leaves_behind
from kvstore.state.choice.former import forget_some, take_gone, take_over
from kvstore.state.choice.policies import POLICIES, new_policy
from kvstore.state.choice.policy import EvictionPolicy, LeastRecent, Looks, classes, enter, leave
from kvstore.state.choice.quotas import Quotas
from kvstore.state.choice.sources import Sources
from kvstore.state.tree.columns import last_slot
from kvstore.state.tree.node import PrefixNode, is_live
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.slots import SlotTable

GRACE_NS: Final = 10_000_000_000
"""How long a page that was not used yet is skipped if anything else can be evicted: a decode
engine usually reads what a prefill engine has just stored within a moment, whatever its chances
are later."""
GRACE_LOOKS: Final = 32
"""Maximum leaves within their grace that are skipped, over several choices, before one is
evicted."""
GRACELESS_NS: Final = GRACE_NS // 100
"""How long the grace is suspended once only young leaves are left: otherwise a node whose memory
is full of young pages would take all of them out of their queue, and put them back, for each
request."""
REPLICA_AGES: Final = 32
"""A replica is evicted before the next leaf if it was unused for this part of that leaf's time:
the peer still has it, so getting it back costs only a read. A replica that is used all the time
stays."""
TAKE_OVER_MAX: Final = 64
"""Maximum leaves that each choice moves to a new policy, so that no request waits for all of
them."""


class Eviction:
    """The choice of pages to evict.

    Args:
        slots: the slots of the host tier.
        policy: name of the policy, one of :data:`kvstore.state.choice.policies.POLICIES`.

    Raises:
        InvalidArgument: no policy has that name.
    """

    def __init__(self, slots: SlotTable, policy: str) -> None:
        new_policy(policy, 0)
        self.policy = policy
        self.quotas = Quotas(lambda space: space.host_bytes)
        #: Where replicas came from.
        self.sources = Sources()
        #: A replica was stored: only then one is looked for.
        self.has_replicas = False
        self._slots = slots
        self._queues: dict[tuple[str, int], EvictionPolicy] = {}
        #: Queues of the policy before, as far as they are not taken over yet.
        self._before: dict[tuple[str, int], EvictionPolicy] = {}
        #: Queues of replaced policies, or of tenants that are gone: no leaf, but what they learnt.
        self._replaced: list[EvictionPolicy] = []
        #: Leaves that were passed over, by queue: no choice looks at them again meanwhile.
        self._passed: dict[tuple[str, int], Passed] = {}
        #: Until when leaves within their grace go too, by queue: nothing else was found.
        self._graceless_until_ns: dict[tuple[str, int], int] = {}
        #: Replicas, by queue: the longest unused first.
        self._replicas: dict[tuple[str, int], LeastRecent] = {}
        #: Queues of which no more replicas go before others, until the end of the choice.
        self._no_replica: set[tuple[str, int]] = set()
        #: When the next leaf of a queue that is no replica was used, in this choice.
        self._others_used: dict[tuple[str, int], int] = {}
        #: Queues that have taken leaves over for this choice.
        self._took_over: set[tuple[str, int]] = set()
        #: A choice may have found no victim though there is one, until :meth:`sweep`: in these
        #: queues it has stopped at entries of dropped or pinned leaves, of which it passes few.
        self.behind = False
        self._behind = QueuesBehind()
        #: The next leaf of each queue that was asked, which no queue has until it is chosen, until
        #: another leaf comes to its queue, or the choice ends.
        self._next: dict[tuple[str, int], PrefixNode] = {}
        #: Queues that have no leaf, until one comes, or the choice ends.
        self._empty: set[tuple[str, int]] = set()
        #: Leaves of another queue that this choice has met.
        self._strays = 0
        self._looks = Looks()
        self._tick = 0
        #: The time of the message that is being carried out.
        self.now_ns = 0
        #: Pages that were used or stored since then do not go; 0 = any may.
        self.spared_since_ns = 0

    @contextmanager
    def sparing(self, since_ns: int) -> Iterator[None]:
        """During the context, evict only pages used and stored before ``since_ns``; 0 = any."""
        assert not self.spared_since_ns, "the inner context would end the outer one"
        self.spared_since_ns = since_ns
        try:
            yield
        finally:
            self.spared_since_ns = 0

    def sweep(self, most: int) -> int:
        """Remove up to ``most`` entries of queues where a choice has stopped, one after another.

        Returns:
            how many of these queues have a victim now, or are empty.
        """
        self._looks.tick = -1  # the next choices may pass as many as those of a new one
        swept = self._behind.sweep(most, (self._queues, self._before, self._replicas))
        self.behind = bool(self._behind)
        return swept

    def change_policy(self, policy: str) -> None:
        """Use another policy from now on; leaves are moved as victims are chosen.

        Raises:
            InvalidArgument: no policy has that name; nothing changed.
        """
        new_policy(policy, 0)
        while not self.settle(TAKE_OVER_MAX):
            pass
        self.policy = policy
        self._before, self._queues = self._queues, {}

    def settle(self, most: int) -> bool:
        """Move up to ``most`` leaves to the current policy, then free what the former learnt.

        Returns:
            whether all are moved, and all is freed.
        """
        for name, queue in list(self._before.items()):
            if take_over(queue, self._queue(*name), self._tick, most):
                return False
            self._replaced.append(self._before.pop(name))
        return self.forget()

    def close_queues(self, tenants: set[str]) -> None:
        """Close the queues of all tenants but these; they have no space, so no page, any more.

        A space that has, or had, limits is never closed.
        """
        self._replaced += take_gone(self._queues, tenants)
        self._replaced += take_gone(self._before, tenants)
        lines = take_gone(self._replicas, tenants)
        self._replaced += lines
        take_gone(self._passed, tenants)
        take_gone(self._graceless_until_ns, tenants)

    def forget(self) -> bool:
        """Free some of what former policies learnt; whether all is free."""
        return forget_some(self._replaced)

    def stored(self, node: PrefixNode, keys: list[PrefixKey], slot_bytes: int, tick: int) -> None:
        """The pages of ``node``, with these keys, were stored; it may be split."""
        self._tick = tick
        self._queue(self._queue_name(node.space), slot_bytes).stored(node, keys, tick)

    def mark_replicas(self, stored: Iterable[PrefixNode], shard: int, peer: str) -> None:
        """Mark pages of a shard as read from a peer; empty: a client put them, so no replicas."""
        source = self.sources.of(peer) if peer else 0
        self.has_replicas |= source > 0
        for node in stored:
            node.replica = source if node.replica or node.ready == 1 << shard else 0

    def source_gone(self, nodes: Iterable[PrefixNode], peer: str) -> None:
        """A peer no longer has these pages: those read from it are ordinary pages from now on."""
        source = self.sources.of(peer)
        for node in nodes:
            if source and node.replica == source:
                node.replica = 0
                self.add_candidate(node)

    def used(self, node: PrefixNode, tick: int) -> None:
        """A request used the prefix that ends at ``node``; call once per request."""
        assert node.ready, ("only a READY page is read", node)
        self._tick = tick
        node.uses += 1
        node.ask_depth = 0
        name = self._queue_name(node.space)
        for slot_bytes in classes(node):
            self._queue(name, slot_bytes).used(node, tick)
            if node.uses == 1 and (name, slot_bytes) in self._passed:
                self._offer_again((name, slot_bytes), [node])  # what was used has no grace

    def add_candidate(self, node: PrefixNode) -> None:
        """Report that ``node`` may have become evictable."""
        if self.evictable(node):
            name, elsewhere = self._queue_name(node.space), self._is_elsewhere(node)
            for slot_bytes in classes(node):
                if self._empty:
                    self._empty.discard((name, slot_bytes))
                if self._next and (rival := self._next.pop((name, slot_bytes), None)) is not None:
                    self.add_candidate(rival)  # the policy says which of them comes first
                if elsewhere:
                    self._replica_line(name, slot_bytes).add_candidate(node, self._tick)
                else:
                    self._queue(name, slot_bytes).add_candidate(node, self._tick)

    def offer_all(self, nodes: Iterable[PrefixNode], *, anew: bool = False) -> None:
        """Add several candidates, some of which may be gone; ``anew``: their queue has changed."""
        for node in nodes:
            if is_live(node):
                node.queued = () if anew else node.queued
                self.add_candidate(node)

    def victim(self, space: PrefixTree, slot_bytes: int) -> PrefixNode | None:
        """The leaf to evict for ``space`` and slot size; call :meth:`end_choice` after all."""
        return self._oldest(self._payers(space, slot_bytes))

    def is_behind(self, space: PrefixTree, slot_bytes: int) -> bool:
        """Whether a choice for ``space`` may have found no victim though there is one."""
        return self.behind and self._behind.has_any(self._payers(space, slot_bytes))

    def own_victim(self, space: PrefixTree) -> PrefixNode | None:
        """The leaf of a limited space to evict; call :meth:`end_choice` after all."""
        name = self._queue_name(space)
        return self._oldest([(name, size) for size in {one.slot_bytes for one in space.shards}])

    def end_choice(self) -> None:
        """End the choices of one message."""
        self._no_replica.clear()
        self._others_used.clear()
        self._took_over.clear()
        self._empty.clear()
        self._strays = 0
        while self._next:
            self.add_candidate(self._next.popitem()[1])
        if self._replaced:
            self.forget()

    def check_turn(self, now_ns: int) -> None:
        """Assert that every choice was ended, and that skipped leaves return to their queues."""
        for passed in self._passed.values():
            assert 0 < len(passed.leaves) < GRACE_LOOKS
            assert passed.until_ns <= now_ns + GRACE_NS
        latest_ns = self.now_ns + GRACELESS_NS
        assert all(until_ns <= latest_ns for until_ns in self._graceless_until_ns.values())
        assert not self._no_replica
        assert not self._others_used
        assert not self._took_over
        assert not self._empty
        assert not self._next, "leaves that no queue has"

    def evictable(self, node: PrefixNode) -> bool:
        """Whether the node's pages may be evicted from memory."""
        return not node.children_in_memory and self.releasable(node)

    def releasable(self, node: PrefixNode) -> bool:
        """Whether nothing needs the node's pages in memory, regardless of its descendants."""
        memory = node.memory
        if not memory or memory & ~node.ready or is_held(node) or not is_live(node):
            return False
        for column in node.slot_columns.values():
            if self._slots.pinned(last_slot(column)):  # of a node all are, or none
                return False
        return True

    def _payers(self, space: PrefixTree, slot_bytes: int) -> list[tuple[str, int]]:
        """The queues of the leaves that may be evicted for ``space`` and slot size."""
        if not self.quotas.limited:
            return [(space.identity.tenant, slot_bytes)]
        names = [self._queue_name(one) for one in self.quotas.payers(space, slot_bytes)]
        return [(name, slot_bytes) for name in (space.identity.tenant, *names)]

    def _queue_name(self, space: PrefixTree) -> str:
        """The name of a space's queues: its tenant's, unless the space is limited."""
        return f"\0{space.label}" if space.number in self.quotas.limited else space.identity.tenant

    def _oldest(self, queues: list[tuple[str, int]]) -> PrefixNode | None:
        """The longest unused one of the next leaves of several queues."""
        if len(queues) == 1 and not self._next:
            chosen = self._pop(queues[0])
            if chosen is None or not self._is_spared(chosen):
                return chosen
            self.add_candidate(chosen)
            return None
        for queue in queues:
            if queue not in self._next and queue not in self._empty:
                self._pop_next(queue)
        if self.behind and self._behind.hold_up(queues):
            return None  # of that one the next leaf is not known
        while True:
            first: tuple[str, int] | None = None
            chosen = None
            for queue in queues:
                node = self._next.get(queue)
                if node is not None and (chosen is None or node.access < chosen.access):
                    first, chosen = queue, node
            if first is None or chosen is None or self._is_spared(chosen):
                return None
            del self._next[first]
            if first[1] in classes(chosen) and self.evictable(chosen):
                return chosen
            self._pop_next(first)  # that one has changed meanwhile

    def _pop_next(self, queue: tuple[str, int]) -> None:
        """Note the next leaf of one of several queues, or that there is none."""
        if (node := self._pop(queue)) is not None:
            self._next[queue] = node
        elif not self._behind.has_any([queue]):
            self._empty.add(queue)

    def _is_spared(self, node: PrefixNode) -> bool:
        return 0 < self.spared_since_ns <= max(node.used_ns, node.stored_ns)

    def _pop(self, queue: tuple[str, int]) -> PrefixNode | None:
        """The next evictable leaf of a queue, a replica or not."""
        if not self.has_replicas:
            return self._pop_other(queue)
        replica = None if queue in self._no_replica else self._pop_replica(queue)
        if replica is not None:
            if queue not in self._others_used:
                other = self._pop_other(queue)
                if other is None or other is replica:
                    return replica  # it may be behind leaves that were continued, too
                self._others_used[queue] = other.access
                self.add_candidate(other)
            unused = self._tick - replica.access
            if unused * REPLICA_AGES >= self._tick - self._others_used[queue]:
                return replica
            self.add_candidate(replica)
            self._no_replica.add(queue)
        # Replicas of which none goes first do go when there is nothing else.
        return self._pop_other(queue) or self._pop_replica(queue)

    def _pop_replica(self, queue: tuple[str, int]) -> PrefixNode | None:
        """The replica of a queue that was unused for longest."""
        name, slot_bytes = queue
        line, looked = self._replicas.get(queue), 0
        while line is not None and len(line) > 0:
            if self._strays >= TAKE_OVER_MAX:
                self._stop_at(queue)
                return None
            node = line.pop(self._tick)
            if node is None:
                if line.behind:
                    self._stop_at(queue)
                return None
            if not (slot_bytes in classes(node) and self.evictable(node)):
                looked += 1
                if not self._looks.take(self._tick, looked):
                    self._stop_at(queue)
                    return None
                continue
            if self._is_elsewhere(node) and self._queue_name(node.space) == name:
                return node
            # A client has stored it since, its source is gone, or its space has limits now.
            self.add_candidate(node)
            self._strays += 1
        return None

    def _pop_other(self, queue: tuple[str, int]) -> PrefixNode | None:
        """The next evictable leaf of a queue of the policy."""
        name, slot_bytes = queue
        leaves = self._queue(name, slot_bytes)
        if self._before and queue not in self._took_over:
            self._took_over.add(queue)
            self._take_more(queue)
        if self._passed:
            self._end_grace(queue)
        continued: list[PrefixNode] = []
        looked = 0
        node = leaves.pop(self._tick)
        while node is not None or self._look_further(queue):
            if node is None:
                pass
            elif self._queue_name(node.space) != name:
                self.add_candidate(node)  # its space has limits now, so queues of its own
                self._strays += 1
                if self._strays >= TAKE_OVER_MAX:
                    self._stop_at(queue)  # of many that follow it nobody is to wait for all
                    return None
            elif not (slot_bytes in classes(node) and self.evictable(node)):
                looked += 1
                if len(continued) < BELOW_LOOKS:
                    continued.append(node)
                if not self._looks.take(self._tick, looked):
                    leaf = self._leaf_behind(continued, slot_bytes)
                    if leaf is None:
                        self._stop_at(queue)
                    return leaf
            elif not self._passes_over(queue, node):
                return node
            node = leaves.pop(self._tick)
        return None

    def _stop_at(self, queue: tuple[str, int]) -> None:
        """A choice stops at entries of dropped or pinned leaves, or of those of another queue."""
        self.behind = True
        self._behind.add(queue)

    def _leaf_behind(self, continued: list[PrefixNode], slot_bytes: int) -> PrefixNode | None:
        """The longest unused of the leaves behind these, which are leaves no more; None if none.

        Nobody is to wait until a choice has passed all those that were continued, or are read.
        """
        leaves = [leaf for leaf in leaves_behind(continued) if slot_bytes in classes(leaf)]
        found = [leaf for leaf in leaves if self.evictable(leaf)]
        if not found:
            return None
        chosen = min(found, key=lambda leaf: (self._has_grace(leaf), leaf.access))
        leave(chosen, slot_bytes)  # a former entry of it may be there still, and is passed over
        return chosen

    def _passes_over(self, queue: tuple[str, int], node: PrefixNode) -> bool:
        """Whether to skip ``node`` because it is young, and evict another one instead."""
        if not self._has_grace(node) or self.now_ns < self._graceless_until_ns.get(queue, 0):
            return False
        assert queue[1] not in node.queued, ("it is still in the queue", node)
        passed = self._passed.setdefault(queue, Passed())
        passed.add(node, GRACE_NS)
        enter(node, queue[1])  # it comes again by itself
        if len(passed.leaves) == GRACE_LOOKS:
            gone = [leaf for leaf in passed.leaves if not is_live(leaf)]
            if gone:
                self._offer_again(queue, gone)
            else:
                self._lift_grace(queue)
        assert len(passed.leaves) < GRACE_LOOKS, node
        return True

    def _end_grace(self, queue: tuple[str, int]) -> None:
        """Return skipped leaves that are no longer young to their queue."""
        passed = self._passed.get(queue)
        if passed is not None and self.now_ns >= passed.until_ns:
            self._offer_again(queue, [leaf for leaf in passed.leaves if not self._has_grace(leaf)])

    def _look_further(self, queue: tuple[str, int]) -> bool:
        """The queue is empty: add leaves of the previous policy, or skipped ones; False if none."""
        more = not self._queue(*queue).behind and self._take_more(queue)
        before = self._before.get(queue)
        if self._queue(*queue).behind or (before is not None and before.behind):
            self._stop_at(queue)
            return False
        return more or self._lift_grace(queue)

    def _take_more(self, queue: tuple[str, int]) -> bool:
        """Move leaves from the previous policy; False if it has none left."""
        before = self._before.get(queue)
        if before is None:
            return False
        if take_over(before, self._queue(*queue), self._tick, TAKE_OVER_MAX):
            return True
        self._replaced.append(self._before.pop(queue))
        return False

    def _lift_grace(self, queue: tuple[str, int]) -> bool:
        """Make skipped leaves evictable, in the policy's order; False if there are none."""
        self._graceless_until_ns[queue] = self.now_ns + GRACELESS_NS
        passed = self._passed.get(queue)
        if passed is not None:
            self._offer_again(queue, list(passed.leaves))
        assert queue not in self._passed
        return passed is not None

    def _offer_again(self, queue: tuple[str, int], leaves: list[PrefixNode]) -> None:
        """Return leaves that were skipped to their queue."""
        passed = self._passed[queue]
        assert passed.leaves
        for leaf in passed.take(leaves, GRACE_NS):
            leave(leaf, queue[1])
            if is_live(leaf):
                self.add_candidate(leaf)
        if not passed.leaves:
            del self._passed[queue]

    def _is_elsewhere(self, node: PrefixNode) -> bool:
        """Whether the node is a replica, and its source probably still has it."""
        return node.replica > 0 and node.replica in self.sources.reachable

    def _has_grace(self, node: PrefixNode) -> bool:
        young = 0 < self.now_ns - node.stored_ns < GRACE_NS
        return young and not node.uses and not node.replica

    def _replica_line(self, name: str, slot_bytes: int) -> LeastRecent:
        line = self._replicas.get((name, slot_bytes))
        if line is None:
            line = self._replicas[name, slot_bytes] = LeastRecent(slot_bytes, self._looks)
        return line

    def _queue(self, name: str, slot_bytes: int) -> EvictionPolicy:
        queue = self._queues.get((name, slot_bytes))
        if queue is None:
            policy = POLICIES[self.policy]
            queue = self._queues[name, slot_bytes] = policy(slot_bytes, self._looks)
        return queue


def is_held(node: PrefixNode) -> bool:
    """Whether an operator's pin keeps the node's pages in memory; on disk, until they are there."""
    return node.memory_pins > 0 or (node.disk_pins > 0 and node.memory & ~node.on_disk > 0)
