"""Copies of this node's pages at other nodes: whom to ask, and for which pages next.

A node is asked to fetch a few pages at a time, parents first, until it has all, or cannot get more.
Nodes are chosen by an order that depends on the start of the chain (:func:`preference`), so that
the copies of a conversation are at the same nodes.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from typing import Final, NamedTuple

from kvstore.protocol.counts import CopyCounts
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.page import KEY_BYTES, ShardSpec, SpaceIdentity
from kvstore.state.remote.jobs import BringEnd, PeerBring, Spread, SpreadEnd

STEP_PAGES: Final = 512
"""Maximum pages of one request."""
STEP_BYTES: Final = 32 << 20
"""Maximum bytes of one request, but at least one page."""
STEP_NS: Final = 4_000_000_000
"""A request has ended by then: the other node fetches for 2 s at most."""


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """Pages of one shard that one other node should have.

    Attributes:
        peer: its name.
        keys: of the chain from its beginning, 32 bytes each.
        first: index of the first wanted page.
        idle_ms: for these pages the other node evicts only pages unused for this long; 0 = as for a
            put.
        deadline_ns: it has ended by then.
        gone: see :class:`~kvstore.state.remote.jobs.PeerBring`; such an order copies nothing.
    """

    peer: str
    identity: SpaceIdentity
    shard: ShardSpec
    keys: bytes
    first: int
    idle_ms: int
    deadline_ns: int
    gone: bool = False


class CopyEnd(NamedTuple):
    """An order has ended.

    Attributes:
        pages: how many consecutive pages from the first wanted one on the other node has.
        complete: whether these pages are all wanted pages.
        error: why not all; None = the other node has no room for more, or cannot get them.
    """

    pages: int
    complete: bool
    error: KVStoreError | None


@dataclass(slots=True, eq=False)
class _Copy:
    order: CopyOrder
    on_end: Callable[[CopyEnd], None]
    pages: int = 0


class Copier:
    """Carries out orders and spreads; all on one thread.

    Args:
        ask: asks a peer to fetch pages; its end is passed to :meth:`brought`, perhaps during the
            call.
        up: the nodes with a session: name → whether it is draining; draining ones are not asked.
        now_ns: the time.
    """

    def __init__(
        self, ask: Callable[[PeerBring], None], up: Callable[[], Mapping[str, bool]],
        now_ns: Callable[[], int],
    ) -> None:  # fmt: skip
        self._copied_pages = 0
        self._failures = 0
        self._ask = ask
        self._up = up
        self._now_ns = now_ns
        self._number = count(1)
        self._asked: dict[int, _Copy] = {}

    def stats(self) -> CopyCounts:
        """Orders in progress, pages that other nodes reported, and failed orders."""
        return CopyCounts(
            running=len(self._asked), copied_pages=self._copied_pages, failed=self._failures
        )

    def peers(self, key: bytes) -> list[str]:
        """The nodes that can be asked, in order of preference for a chain's first key."""
        return preference([name for name, leaves in self._up().items() if not leaves], key)

    def draining(self) -> list[str]:
        """Names of the nodes that are not asked because they are draining."""
        return sorted(name for name, leaves in self._up().items() if leaves)

    def copy(self, order: CopyOrder, on_end: Callable[[CopyEnd], None]) -> None:
        """Copy pages to one node; ``on_end`` is called once, perhaps during this call."""
        self._next(_Copy(order, on_end))

    def spread(self, asked: Spread, on_end: Callable[[SpreadEnd], None]) -> None:
        """Copy pages to several nodes; ``on_end`` is called once, perhaps during this call."""
        _Round(self, asked, on_end, self.peers(asked.keys[:KEY_BYTES])).go_on()

    def is_over(self, deadline_ns: int) -> bool:
        """Whether a deadline has passed."""
        return self._now_ns() >= deadline_ns

    def brought(self, end: BringEnd) -> None:
        """A peer has answered, or failed to."""
        copy = self._asked.pop(end.number)
        order = copy.order
        wanted = len(order.keys) // KEY_BYTES - order.first
        went_on = end.pages > copy.pages
        if end.error is None:
            self._copied_pages += max(0, end.pages - copy.pages) if not order.gone else 0
            copy.pages = end.pages
            if went_on and copy.pages < wanted and not self.is_over(order.deadline_ns):
                self._next(copy)
                return
        complete = end.error is None and copy.pages >= wanted
        self._failures += not complete and not order.gone
        copy.on_end(CopyEnd(copy.pages, complete, end.error))

    def _next(self, copy: _Copy) -> None:
        order, number = copy.order, next(self._number)
        self._asked[number] = copy
        page_bytes = order.shard.page_bytes(order.identity)
        pages = max(1, min(STEP_PAGES, STEP_BYTES // page_bytes))
        stop = order.first + copy.pages + pages
        deadline_ns = min(order.deadline_ns, self._now_ns() + STEP_NS)
        self._ask(
            PeerBring(
                number, order.peer, order.identity, order.shard, order.keys[: stop * KEY_BYTES],
                order.first, order.idle_ms, deadline_ns, order.gone,
            )
        )  # fmt: skip


class _Round:
    """A spread: asks as many nodes at a time as are wanted; for a failed one, the next."""

    def __init__(
        self, copier: Copier, asked: Spread, on_end: Callable[[SpreadEnd], None], peers: list[str]
    ) -> None:  # fmt: skip
        self._copier = copier
        self._asked = asked
        self._on_end = on_end
        self._left = peers
        self._running = 0
        self._found = 0
        self._asking = False

    def go_on(self) -> None:
        """Ask as many nodes as are wanted; report the end once no request is in progress."""
        asked, self._asking = self._asked, True
        first = asked.first if asked.shard.window_pages else 0
        while (
            self._left
            and self._running + self._found < asked.peers
            and not self._copier.is_over(asked.deadline_ns)
        ):
            self._running += 1
            order = CopyOrder(
                self._left.pop(0), asked.identity, asked.shard, asked.keys, first, 0,
                asked.deadline_ns,
            )  # fmt: skip
            self._copier.copy(order, self._ended)
        self._asking = False
        if not self._running:
            self._on_end(SpreadEnd(asked.number, self._found, len(self._copier.draining())))

    def _ended(self, end: CopyEnd) -> None:
        self._running -= 1
        self._found += end.complete
        if not self._asking:
            self.go_on()


def preference(nodes: Iterable[str], key: bytes) -> list[str]:
    """Names of nodes in an order that depends only on the key, for every subset of them."""
    return sorted(nodes, key=lambda node: sha256(key + node.encode()).digest())
