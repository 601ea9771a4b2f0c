"""Applies the effects that the disk side reports, in one loop. Pure.

The disk side changes only its own state: its ledger, its jobs, and where pages are on disk. It
reports everything else as effects, and calls nothing back: pages were loaded, were lost, or no
longer need their slots. Effects are applied after it has returned, so that no page is dropped in
the middle of a change.
"""

from collections.abc import Iterable, Sequence

from kvstore.protocol.errors import KVStoreError, PageCorrupt
from kvstore.protocol.page import DIGEST_BYTES, KEY_BYTES, PrefixKey
from kvstore.state.disk.jobs import (
    CorruptRecord,
    DiskEffect,
    Durable,
    LeftDisk,
    PageLoad,
    UnpinSlots,
)
from kvstore.state.table.residents import Residents
from kvstore.state.tree.actions import TierStored
from kvstore.state.tree.columns import pack_slots
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.slots import Slot


class Tiers:
    """Pages of one node on their way between memory and disk.

    Args:
        residents: the pages, and where they are.
    """

    def __init__(self, residents: Residents) -> None:
        self._held = residents

    def completed(
        self, job: int, error: KVStoreError | None, tokens: bytes = b"",
        failed: tuple[int, ...] = (), *, last: bool = True,
    ) -> bool:  # fmt: skip
        """Process the end of a job; see :meth:`kvstore.state.disk.pages.DiskPages.completed`.

        ``last``: no other job's end follows at once; else :meth:`go_on` is left to that one.

        Returns:
            whether there may be more room than before.
        """
        more = self._held.disk.completed(job, error, tokens, failed)
        apply_effects(self._held)
        if last:
            self.go_on()
        return more

    def go_on(self) -> None:
        """Write, sync and check pending pages, as far as possible now."""
        self._held.disk.go_on()
        apply_effects(self._held)

    def advance(self, now_ns: int) -> None:
        """Advance the clock to ``now_ns``."""
        self._held.disk.advance(now_ns)
        apply_effects(self._held)
        self.go_on()

    def make_durable(
        self, nodes: Sequence[PrefixNode], shard: int, deadline_ns: int = 0
    ) -> Durable:
        """See :meth:`kvstore.state.disk.pages.DiskPages.make_durable`."""
        try:
            return self._held.disk.make_durable(nodes, shard, deadline_ns)
        finally:
            apply_effects(self._held)

    def ensure_written(self, node: PrefixNode, shard: int) -> bool:
        """See :meth:`kvstore.state.disk.pages.DiskPages.ensure_written`."""
        try:
            return self._held.disk.ensure_written(node, shard)
        finally:
            apply_effects(self._held)

    def ensure_all_written(self, nodes: Sequence[PrefixNode]) -> int:
        """See :meth:`kvstore.state.disk.pages.DiskPages.ensure_all_written`."""
        written = self._held.disk.ensure_all_written(nodes)
        apply_effects(self._held)
        return written

    def write_out(self, spaces: Iterable[PrefixTree]) -> None:
        """See :meth:`kvstore.state.disk.pages.DiskPages.write_out`."""
        self._held.disk.write_out(spaces)
        apply_effects(self._held)

    def shrink(self, space: PrefixTree, pages_max: int) -> bool:
        """Remove leaves of a space from the disk; returns whether it is within its quota there."""
        kept = self._held.disk.limits.shrink(space, pages_max)
        apply_effects(self._held)
        return kept


def apply_effects(held: Residents) -> None:
    """Apply the disk side's effects until there are none left."""
    disk = held.disk
    while disk.effects:
        effects = list(disk.effects)
        disk.effects.clear()
        for effect in effects:
            _apply(held, effect)
        disk.applied()


def _apply(held: Residents, effect: DiskEffect) -> None:
    match effect:
        case UnpinSlots():
            held.unpin(effect.slots)
        case PageLoad():
            _arrive(held, effect)
        case LeftDisk():
            _lose(held, effect)
        case CorruptRecord():
            node = effect.space.index.get(effect.key)
            if node is not None:
                page = effect.space.exact(node, node.position(effect.key), 1)
                held.drop(page, effect.shard, "corrupt")
        case TierStored():
            held.actions.append(effect)


def _arrive(held: Residents, load: PageLoad) -> None:
    """Make the pages of a load READY that were read and are still wanted."""
    shard, at, came = load.shard, 0, False
    waiters = [fetch for fetch in load.waiters if not fetch.ended]
    while at < len(load.slots):
        node = _wanted(load, at)
        if node is None:
            held.slots.abort(load.slots[at : at + 1])
            at += 1
            continue
        end = at + node.count
        slots, error = load.slots[at:end], load.errors.get(at)
        if error is not None:
            held.slots.abort(slots)
            held.drop(node, shard, "corrupt" if isinstance(error, PageCorrupt) else "unreadable")
        else:
            came = True
            token_ids = load.tokens[at:end]
            _promote(held, node, shard, slots, b"".join(token_ids) if all(token_ids) else b"")
            for fetch in waiters:
                held.fetches.keep(fetch, slots)
            held.add_candidate(node)
        at = end
    if came:
        held.meter.disk_load.observe(held.moment.now_ns - load.since_ns)
    held.fetches.came(waiters)


def _promote(
    held: Residents, node: PrefixNode, shard: int, slots: list[Slot], tokens: bytes
) -> None:
    """Pages that were only on disk have been loaded to ``slots``, which are WRITING."""
    held.slots.commit(slots, held.moment.tick)
    node.promote(shard, pack_slots(slots))
    node.learn(tokens)
    held.owners.add(slots, node.key_list(), node.space)
    held.counts["promoted_pages"] += len(slots)
    held.emit(TierStored, node, shard, "host")


def _wanted(load: PageLoad, at: int) -> PrefixNode | None:
    """A node with pages of a load, from ``at`` on, that had the same result and are still on disk.

    None if the page was dropped meanwhile, is already in memory, or has other bytes.
    """
    space, shard = load.space, load.shard
    key = PrefixKey(load.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES])
    node = space.index.get(key)
    if node is None or not node.on_disk & ~node.memory & 1 << shard:
        return None
    offset = node.position(key)
    pages = min(node.matching(offset, load.keys, at * KEY_BYTES), load.alike(at))
    mine = node.digest_columns[shard][offset * DIGEST_BYTES : (offset + pages) * DIGEST_BYTES]
    if not load.digests.startswith(mine, at * DIGEST_BYTES):
        pages = 1
        if not load.digests.startswith(mine[:DIGEST_BYTES], at * DIGEST_BYTES):
            return None
    return space.exact(node, offset, pages)


def _lose(held: Residents, lost: LeftDisk) -> None:
    """Pages and their descendants leave the disk; those not in memory are dropped."""
    space, shard, at = lost.space, lost.shard, 0
    while at < len(lost.keys):
        key = PrefixKey(lost.keys[at : at + KEY_BYTES])
        node = space.index.get(key)
        if node is None or not node.on_disk >> shard & 1:
            at += KEY_BYTES  # it has left with a page before it
            continue
        offset = node.position(key)
        node = space.exact(node, offset, node.matching(offset, lost.keys, at))
        at += node.count * KEY_BYTES
        if not held.lose_records(node, shard, lost.cause):
            return  # the other pages continue these
