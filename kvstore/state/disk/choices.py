"""Examines a segment that may be reclaimed, a stretch of its pages at a time. Pure.

Pages leave meanwhile, and nodes are split: what is found are records, which stay where they are.
Whoever removes or copies them looks again whether their pages still have them, and are not pinned.
"""

from collections.abc import Iterator

from kvstore.state.disk.limits import DiskLimits, is_pinned
from kvstore.state.disk.log import Segment, SegmentLog, SegmentState
from kvstore.state.disk.plans import STEP_PAGES, NodePart, Reclaim, parts_of
from kvstore.state.tree.places import footer_bytes
from kvstore.state.tree.prefix_tree import PrefixTree

GAIN_MIN = 1 / 8
"""A segment is not reclaimed if less than this part of it, or less than a page, would be freed: it
would only be copied again and again."""


class SegmentLook:
    """A look at one segment.

    Args:
        victim: the segment.
        log: its log.
        limits: which pages must not be removed.
        must: it is reclaimed even if little is freed.

    Attributes:
        pages: pages in it, when the look began.
        there: the spaces of these, and what each had on disk then, in bytes.
        kept: offset of each record that must not be removed → its size.
        plan: what to do with its pages; None = not known yet, or it is not worth reclaiming.
    """

    def __init__(self, victim: Segment, log: SegmentLog, limits: DiskLimits, must: bool) -> None:  # noqa: FBT001
        assert victim.state is SegmentState.SEALED
        self.victim = victim
        self.pages = len(victim.pages)
        spaces = {one.space.number: one.space for one in victim.pages.stretches}
        self.there: list[tuple[PrefixTree, int]] = [
            (space, limits.there_bytes(space)) for space in spaces.values()
        ]
        self.kept: dict[int, int] = {}
        self.plan: Reclaim | None = None
        self._log = log
        self._limits = limits
        self._must = must

    def steps(self, tick: int, carry_from: float) -> Iterator[None]:
        """Find what must be kept, and plan what to do with the others if it is worth it.

        Args:
            tick: the current tick.
            carry_from: see :meth:`kvstore.state.disk.log.SegmentLog.plan`.
        """
        victim, parts = self.victim, list[NodePart]()
        if any(self._limits.quotas.get(space).reserved_bytes for space, _ in self.there):
            kept, parts = self._limits.kept(victim)  # all of a space are compared with each other
            for node, shard in kept:
                self.kept[node.place(shard).offset] = node.space.shards[shard].record_bytes
        else:
            for looked, one in enumerate(parts_of(victim.pages), 1):
                parts.append(one)
                if is_pinned(one.node, one.part.shard):
                    assert one.part.pages == 1, "only single pages are pinned"
                    self.kept[one.part.offset] = one.part.each
                if looked % STEP_PAGES == 0:
                    yield
        assert victim.state is SegmentState.SEALED
        room = victim.size_bytes - footer_bytes(victim.records + 1)
        gain = max([room * GAIN_MIN, *self.kept.values()])
        if self._must or victim.failed or sum(self.kept.values()) + gain <= room:
            for plan in self._log.plan(victim, tick, carry_from, self.kept, parts):
                if plan is None:
                    yield
                self.plan = plan
