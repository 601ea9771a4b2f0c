"""What happened to pages of late, told when an assertion fails. Pure, and bounded.

Whoever changes the state adds an event: when, what, and of which run of pages. Nothing reads them
until a mistake of ours comes to light; then those of the page concerned are added to the error as a
note, so that they stand in whatever log or test reports it.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from kvstore.errors import KVStoreError
from kvstore.page import PrefixKey
from kvstore.state.tree.prefix_tree import PrefixNode

EVENTS_MAX: Final = 4096
TOLD_MAX: Final = 64
"""Events that an error tells of: the last ones of its page, or of all pages when none is known."""
_NS: Final = 1_000_000_000


class Event(NamedTuple):
    """What happened to a run of pages: to ``pages`` keys of one chain from ``key`` on.

    Attributes:
        tick: of the request before it.
        what: it was, in a few words.
        space: number of the space.
        depth: of ``key``.
    """

    now_ns: int
    tick: int
    what: str
    space: int
    key: PrefixKey
    depth: int
    shard: int
    pages: int


class Story:
    """The last events of one node.

    Attributes:
        add: notes the fields of one event, as a plain tuple: that takes half the time.
    """

    def __init__(self) -> None:
        self._events: deque[tuple[Any, ...]] = deque(maxlen=EVENTS_MAX)
        self.add = self._events.append

    def __iter__(self) -> Iterator[Event]:
        return map(Event._make, self._events)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Explain what is raised inside."""
        try:
            yield
        except Exception as error:
            self.explain(error)
            raise

    def explain(self, error: Exception) -> None:
        """Add the last events of the page that a mistake of ours was about to its error, once."""
        if isinstance(error, KVStoreError | StopIteration) or hasattr(error, "__notes__"):
            return  # it refuses something, or ends some steps; or it was explained
        node = _concerned(error)
        told = list(self) if node is None else _of(node, self)
        of = "any page" if node is None else f"page {node.key.hex()[:16]}"
        lines = [f"the last events of {of}, {len(told)} of {len(self._events)}; the last one last:"]
        for one in told[-TOLD_MAX:]:
            ago_s = (self._events[-1][0] - one.now_ns) / _NS
            lines.append(
                f"{ago_s:.6f} s before, tick {one.tick}: {one.what}: {one.key.hex()[:16]}"
                f" and {one.pages - 1} after it; space {one.space}, shard {one.shard}"
            )
        error.add_note("\n  ".join(lines))


def _concerned(error: Exception) -> PrefixNode | None:
    """The node that the innermost call with a ``node`` was about."""
    found: PrefixNode | None = None
    trace = error.__traceback__
    while trace is not None:
        node = trace.tb_frame.f_locals.get("node")
        found = node if isinstance(node, PrefixNode) else found
        trace = trace.tb_next
    return found


def _of(node: PrefixNode, events: Iterable[Event]) -> list[Event]:
    """The events of runs that the node is part of; once it left its tree, of those it begins."""
    chain: dict[PrefixKey, int] = {}
    at: PrefixNode | None = node
    while at is not None:
        chain[at.key] = node.depth - at.depth
        at = at.parent
    return [
        one
        for one in events
        if one.space == node.space.number and chain.get(one.key, EVENTS_MAX) < one.pages
    ]
