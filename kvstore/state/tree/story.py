"""What happened to pages of late, told when an assertion fails. Pure, and bounded.

Whoever changes the state adds an event: when, what, and of which run of pages. Nothing reads them
until a mistake of ours comes to light; then those of the page concerned are added to the error as a
note, so that they stand in whatever log or test reports it.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Protocol

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


class Moment(Protocol):
    """When something happens: the page table."""

    now_ns: int
    tick: int


class Story:
    """The last events of one node.

    Args:
        moment: says when each of them happened.
    """

    def __init__(self, moment: Moment) -> None:
        self._moment = moment
        #: The fields of events as plain tuples, which take half the time.
        self._events: deque[tuple[Any, ...]] = deque(maxlen=EVENTS_MAX)

    def tell(self, what: str, node: PrefixNode, shard: int, pages: int = 1) -> None:
        """Note what happened to a run of ``pages`` pages of one chain from ``node`` on."""
        at, of = self._moment, node.space.number
        self._events.append((at.now_ns, at.tick, what, of, node.key, node.depth, shard, pages))

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
