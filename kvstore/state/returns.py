"""How often do prompts come back after they left memory? Learnt from the pages that leave. Pure.

A prompt that leaves memory is **marked**: its last page and a few before it, since the end of a
prompt is often not continued exactly. When a later prompt leaves that passes a mark, the marked one
has returned; the later one has one turn more. Nothing depends on whether the pages were written, so
a refused prompt teaches as much as an admitted one.

Returns are counted for each kind of prompt: how many turns led to it and how much the last one
added (in octaves). A kind with few prompts borrows from the same turns, and those from all.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from kvstore.state.tree import Node

Kind = tuple[int, ...]

MARKS_MAX: Final = 1 << 16
"""Marks that are remembered at most; the oldest is forgotten first."""
MARKED_BEFORE_END: Final = (0, 1, 2, 4)
"""Which pages are marked, counted from the end of the prompt."""
WALK_MAX: Final = 1024
"""Pages before the end that are looked at for a mark."""
BELIEF: Final = 30.0
"""Prompts after which a kind's own rate counts as much as the more general kind's."""
RATE_UNKNOWN: Final = 0.5
HALVE_EVERY: Final = 1 << 14
"""Prompts after which all counts are halved, so that the past fades."""
TURNS_MAX: Final = 6

_MarkKey = tuple[int, int, bytes]


@dataclass(slots=True, eq=False)
class _Prompt:
    kind: Kind
    turns: int
    access: int
    returned: bool = False


class Returns:
    """What share of the prompts of each kind came back."""

    def __init__(self) -> None:
        """Start knowing nothing."""
        self._marks: OrderedDict[_MarkKey, tuple[_Prompt, int]] = OrderedDict()
        self._seen: dict[Kind, float] = {}
        self._returned: dict[Kind, float] = {}
        self._returns = 0.0
        self._exact = 0.0
        self._prompts = 0

    def leaves(self, end: Node, shard: int) -> tuple[float, float]:
        """A prompt that ends at ``end`` leaves memory; being told twice changes nothing.

        Returns:
            the share of such prompts that come back, and the share whose last page does, 0 to 1.
        """
        path = [end]
        at = end.parent
        while at is not None and at is not end.space.root and len(path) < WALK_MAX:
            path.append(at)
            at = at.parent
        turns, added = 0, end.depth
        for distance, node in enumerate(path):
            mark = self._marks.get(_name(node, shard))
            if mark is None:
                continue
            earlier, before_end = mark
            if distance == before_end == 0 and earlier.access == end.access:
                return self._rates(earlier.kind)  # asked again, not come again
            turns, added = earlier.turns + 1, distance
            self._count_return(earlier, exact=before_end == 0)
            break
        kind = (min(turns, TURNS_MAX), added.bit_length())
        self._count_prompt(kind)
        prompt = _Prompt(kind, turns, end.access)
        for before_end in MARKED_BEFORE_END:
            # The first page says little of a prompt: it is often shared.
            if before_end == 0 or before_end < len(path) - 1:
                name = _name(path[before_end], shard)
                self._marks[name] = prompt, before_end
                self._marks.move_to_end(name)
        while len(self._marks) > MARKS_MAX:
            self._marks.popitem(last=False)
        return self._rates(kind)

    @property
    def marks(self) -> int:
        """How many marks are remembered."""
        return len(self._marks)

    def _count_prompt(self, kind: Kind) -> None:
        self._prompts += 1
        if self._prompts % HALVE_EVERY == 0:
            for counts in (self._seen, self._returned):
                for known in counts:
                    counts[known] /= 2
            self._returns /= 2
            self._exact /= 2
        for general in _generalised(kind):
            self._seen[general] = self._seen.get(general, 0.0) + 1

    def _count_return(self, prompt: _Prompt, *, exact: bool) -> None:
        if prompt.returned:
            return
        prompt.returned = True
        self._returns += 1
        self._exact += exact
        for general in _generalised(prompt.kind):
            self._returned[general] = self._returned.get(general, 0.0) + 1

    def _rates(self, kind: Kind) -> tuple[float, float]:
        rate = RATE_UNKNOWN
        for general in _generalised(kind):
            returned, seen = self._returned.get(general, 0.0), self._seen.get(general, 0.0)
            rate = (returned + BELIEF * rate) / (seen + BELIEF)
        return rate, rate * (self._exact + 1) / (self._returns + 1)


def _name(node: Node, shard: int) -> _MarkKey:
    return node.space.number, shard, node.key


def _generalised(kind: Kind) -> tuple[Kind, ...]:
    """All more general kinds, the most general first, then ``kind``."""
    return (), kind[:1], kind
