"""The last events of pages, shown when an assertion fails. Pure and bounded.

Code that changes the state adds an event: when, what, and to which run of pages. The events are
read only when a bug is detected: those of the page concerned are added to the error as a note, so
that every log and every test that reports the error shows them.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, Protocol, TypeVar

from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.page import KEY_BYTES, PrefixKey
from kvstore.state.tree.node import PrefixNode

EVENTS_MAX: Final = 4096
SHOWN_MAX: Final = 64
"""Maximum events in a note: the last ones of the page, or of all pages if the page is unknown."""
_READ_FROM: Final = "read from "
"""Prefix of the event of pages that were read from a peer; its name follows."""
_NS: Final = 1_000_000_000


class Event(NamedTuple):
    """An event of a run of pages: ``pages`` keys of one chain, the first is ``key``.

    Attributes:
        tick: number of the last request before it.
        what: the event, in a few words.
        space: number of the space.
        depth: of ``key``; 0 = unknown.
    """

    now_ns: int
    tick: int
    what: str
    space: int
    key: PrefixKey
    depth: int
    shard: int
    pages: int


class Moment:
    """The current time of the state.

    Attributes:
        now_ns: the time of the message that is being processed.
        tick: number of requests so far; orders uses.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.tick = 0


class Story:
    """The last events of one node.

    Args:
        moment: the current time.
    """

    def __init__(self, moment: Moment) -> None:
        self._moment = moment
        #: Fields of events, as plain tuples: they take half the time.
        self._events: deque[tuple[Any, ...]] = deque(maxlen=EVENTS_MAX)

    def tell(self, what: str, node: PrefixNode, shard: int, pages: int = 1) -> None:
        """Add an event of ``pages`` pages of one chain, starting with the node's first page."""
        at, of = self._moment, node.space.number
        key, depth = PrefixKey(node.keys), node.depth
        if node.count > 1:
            key, depth = node.first, node.first_depth
        self._events.append((at.now_ns, at.tick, what, of, key, depth, shard, pages))

    def tell_page(self, what: str, space: int, key: PrefixKey, shard: int) -> None:
        """Add an event of one page, which may have been removed from its tree."""
        at = self._moment
        self._events.append((at.now_ns, at.tick, what, space, key, 0, shard, 1))

    def stored(self, node: PrefixNode, shard: int, pages: int, peer: str) -> None:
        """Add that pages were stored; ``peer``: their source, empty = a client."""
        self.tell(f"{_READ_FROM}{peer}" if peer else "stored", node, shard, pages)

    def tell_last(self, what: str, node: PrefixNode, shard: int, pages: int) -> None:
        """Add an event of the last ``pages`` pages of a node."""
        at, of, first = self._moment, node.space.number, node.count - pages
        key = PrefixKey(node.keys[first * KEY_BYTES : (first + 1) * KEY_BYTES])
        depth = node.first_depth + first
        self._events.append((at.now_ns, at.tick, what, of, key, depth, shard, pages))

    def source(self, node: PrefixNode) -> str:
        """The peer that the last page of a node was read from; empty if no event says so."""
        for one in reversed(_of(node, self)):
            if one.what.startswith(_READ_FROM):
                return one.what.removeprefix(_READ_FROM)
        return ""

    def __iter__(self) -> Iterator[Event]:
        return map(Event._make, self._events)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Add the events to any exception raised inside."""
        try:
            yield
        except Exception as error:
            self.explain(error)
            raise

    def explain(self, error: Exception) -> None:
        """Add the last events of the page that an error is about, once, unless it is a refusal."""
        if isinstance(error, KVStoreError | StopIteration) or hasattr(error, "__notes__"):
            return  # a refusal, the end of an iterator, or it has the events already
        node = _concerned(error)
        last = list(self) if node is None else _of(node, self)
        of = "any page" if node is None else f"page {node.key.hex()[:16]}"
        lines = [f"the last events of {of}, {len(last)} of {len(self._events)}; the last one last:"]
        for one in last[-SHOWN_MAX:]:
            ago_s = (self._events[-1][0] - one.now_ns) / _NS
            lines.append(
                f"{ago_s:.6f} s before, tick {one.tick}: {one.what}: {one.key.hex()[:16]}"
                f" and {one.pages - 1} after it; space {one.space}, shard {one.shard}"
            )
        error.add_note("\n  ".join(lines))


def _concerned(error: Exception) -> PrefixNode | None:
    """The node that the failed assertion names, else ``node`` of the innermost frame with one.

    Assertions about a page name its node, ``assert CONDITION, node``: frames of the compiled core
    have no variables.
    """
    found: PrefixNode | None = None
    for named in error.args:
        for one in named if isinstance(named, tuple) else (named,):
            found = one if isinstance(one, PrefixNode) else found
    if found is not None:
        return found
    trace = error.__traceback__
    while trace is not None:
        node = trace.tb_frame.f_locals.get("node")
        found = node if isinstance(node, PrefixNode) else found
        trace = trace.tb_next
    return found


def _of(node: PrefixNode, events: Iterable[Event]) -> list[Event]:
    """The events of runs that contain the node; after its removal, of those that start with it."""
    chain: dict[bytes, int] = {}
    at: PrefixNode | None = node
    while at is not None:
        for number in range(at.count):
            key = at.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
            chain[key] = node.depth - at.first_depth - number
        at = at.above
    return [
        one
        for one in events
        if one.space == node.space.number and chain.get(one.key, EVENTS_MAX) < one.pages
    ]


class Storied(Protocol):
    """What has a story."""

    story: Story


P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound=Storied)


def explained(call: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Add the last events of the page concerned to any error that is a bug of the node."""

    @wraps(call)
    def explaining(one: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(one, *args, **kwargs)
        except Exception as error:
            one.story.explain(error)
            raise

    return explaining
