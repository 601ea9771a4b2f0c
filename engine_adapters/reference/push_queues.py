"""Queues of pushed requests, and when decode takes memory for one. Pure: no torch, clock or I/O.

Prefill::

    bootstrap ──► (scheduler: waiting ──► running) ──► inflight

A request starts when decode has announced its blocks, or at once if the store takes its pages. When
it is computed it gives up its place and keeps its blocks until its push has ended.

Decode::

    prealloc ──► transfer ──► received ──► (scheduler: running)

A request gets blocks for its prompt and one token when two checks find that all that hold blocks
can go on (:func:`may_take`). Requests that were retracted, and those that arrived before, come
first.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from engine_adapters.reference.request import Request, State
from engine_adapters.reference.scheduler import Scheduler


class Holding(NamedTuple):
    """A request that holds blocks.

    Attributes:
        missing: blocks that it may still need until its end.
        retractable: blocks that are free when it is retracted; 0 = it cannot be now.
    """

    missing: int
    retractable: int


def may_take(
    needed: int, longest: int, available: int, holders: Sequence[Holding], reserve: int
) -> bool:
    """Whether decode may take blocks for one more request.

    Two checks: what is needed now must be there besides a reserve for each request that holds
    blocks; and each of them, and this one, must be able to grow to its end when all others are
    retracted that can be. A request alone in an empty pool always passes.

    Args:
        needed: blocks that the request needs now.
        longest: blocks that it may need until its end, at least ``needed``.
        available: blocks that are free, or can be.
        holders: all requests that hold blocks.
        reserve: blocks for the growth of each.
    """
    now = min(needed + reserve, longest)
    if now + sum(min(reserve, one.missing) for one in holders) > available:
        return False
    left = available - needed
    retractable = sum(one.retractable for one in holders)
    return all(
        one.missing <= left + retractable - one.retractable
        for one in (*holders, Holding(longest - needed, 0))
    )


class PrefillQueues:
    """Pushed requests of a prefill engine that the scheduler does not have.

    Attributes:
        bootstrap: requests that may not start yet, in order of arrival.
        inflight: requests that are computed, or given up, and whose push has not ended.
    """

    def __init__(self, scheduler: Scheduler, waiting_max: int) -> None:
        self._scheduler = scheduler
        self._waiting_max = waiting_max
        self.bootstrap: list[Request] = []
        self.inflight: list[Request] = []

    def add(self, request: Request) -> bool:
        """Queue a request; returns False if too many wait."""
        if len(self.bootstrap) + self._scheduler.waiting >= self._waiting_max:
            return False
        request.state = State.BOOTSTRAP
        request.pushes = True
        self.bootstrap.append(request)
        return True

    def start(self, is_announced: Callable[[Request], bool], *, anyhow: bool) -> None:
        """Let requests wait for memory that decode has announced, or all of them."""
        for request in list(self.bootstrap):
            if (anyhow or is_announced(request)) and self._scheduler.add(request):
                self.bootstrap.remove(request)

    def computed(self, request: Request) -> None:
        """A running request is computed: others may have its place."""
        self._scheduler.leave(request, State.INFLIGHT)
        self.inflight.append(request)

    def stop(self, request: Request) -> None:
        """Compute no more of a request; it has no blocks afterwards."""
        if request.state is State.BOOTSTRAP:
            self.bootstrap.remove(request)
        elif request.state is State.INFLIGHT:
            self.inflight.remove(request)
        self._scheduler.finish(request)
        request.state = State.INFLIGHT
        self.inflight.append(request)

    def remove(self, request: Request) -> None:
        """Remove a request in any state, with its references to blocks."""
        if request in self.bootstrap:
            self.bootstrap.remove(request)
        if request in self.inflight:
            self.inflight.remove(request)
        self._scheduler.finish(request)

    def to_give_up(self, is_unannounced: Callable[[Request], bool]) -> Request | None:
        """The request whose push must be given up so that others get memory; None = no one.

        Decode may wait for memory that it holds for a request that waits here for the memory of
        those that decode has not announced. So these give way, the youngest first, if nothing else
        here will free any.
        """
        if self._scheduler.next_waiting is None or self._scheduler.running:
            return None
        if not all(is_unannounced(request) for request in self.inflight):
            return None
        return next((one for one in reversed(self.inflight) if one.blocks), None)

    def requests(self) -> Iterator[Request]:
        """Every request in these queues."""
        yield from self.bootstrap
        yield from self.inflight

    def check(self) -> None:
        """Assert the invariants."""
        for request in self.bootstrap:
            assert request.state is State.BOOTSTRAP
            assert not request.blocks, "a request that has not started holds blocks"
        for request in self.inflight:
            assert request.state in (State.INFLIGHT, State.FLUSHING)


class DecodeQueues:
    """Pushed requests of a decode engine that the scheduler does not have.

    Args:
        scheduler: of the engine.
        waiting_max: requests that wait for memory, the scheduler's among them.
        held_max: requests in ``transfer`` and ``received`` together.
        page_tokens: for so many tokens the checks leave each request room to grow.

    Attributes:
        prealloc: requests without memory, in order of arrival.
        transfer: requests into whose blocks K/V are pushed.
        received: requests whose push has ended, waiting for a place.
    """

    def __init__(
        self, scheduler: Scheduler, *, waiting_max: int, held_max: int, page_tokens: int
    ) -> None:
        self._scheduler = scheduler
        self._waiting_max = waiting_max
        self._held_max = held_max
        self._reserve = scheduler.blocks_of(page_tokens)
        self.prealloc: deque[Request] = deque()
        self.transfer: list[Request] = []
        self.received: deque[Request] = deque()

    def add(self, request: Request) -> bool:
        """Queue a request; returns False if too many wait."""
        if len(self.prealloc) + self._scheduler.waiting >= self._waiting_max:
            return False
        request.state = State.PREALLOC
        self.prealloc.append(request)
        return True

    @property
    def until(self) -> float:
        """Arrival of the request that gets memory next; who arrived later does not overtake it."""
        return self.prealloc[0].arrived if self.prealloc and not self._is_full else math.inf

    def preallocate(self) -> Request | None:
        """Give the first request its blocks, if it may have them; returns it."""
        if not self.prealloc or self._is_full:
            return None
        request, first = self.prealloc[0], self._scheduler.next_waiting
        if first is not None and (first.retracted or first.arrived <= request.arrived):
            return None
        longest = self._scheduler.blocks_of(request.prompt_tokens + request.max_tokens)
        all_of_it = self._scheduler.blocks_of(len(request.tokens) + 1)

        def allows(needed: int) -> bool:
            shared = all_of_it - needed
            available = self._scheduler.available
            return may_take(needed, longest - shared, available, self._holders(), self._reserve)

        if not self._scheduler.hold(request, len(request.tokens) + 1, allows):
            return None
        self.prealloc.popleft()
        request.state = State.TRANSFER
        self.transfer.append(request)
        return request

    def end_transfer(self, request: Request) -> None:
        """The push of a request has ended, and nothing arrives in its blocks any more."""
        self.transfer.remove(request)
        request.state = State.RECEIVED
        self.received.append(request)

    def run(self) -> list[Request]:
        """Give received requests their places, in order; returns those."""
        entered: list[Request] = []
        while self.received and self._scheduler.places:
            request = self.received.popleft()
            self._scheduler.enter(request)
            entered.append(request)
        return entered

    def remove(self, request: Request) -> None:
        """Remove a request in any state, with its references to blocks."""
        for queue in (self.prealloc, self.transfer, self.received):
            if request in queue:
                queue.remove(request)
        self._scheduler.finish(request)

    def requests(self) -> Iterator[Request]:
        """Every request in these queues."""
        yield from self.prealloc
        yield from self.transfer
        yield from self.received

    def check(self) -> None:
        """Assert the invariants."""
        assert len(self.transfer) + len(self.received) <= self._held_max
        for request in self.prealloc:
            assert request.state is State.PREALLOC
            assert not request.blocks, "a request without memory holds blocks"
        for request in (*self.transfer, *self.received):
            assert request.state in (State.TRANSFER, State.RECEIVED)
            assert len(request.blocks) == self._scheduler.blocks_of(request.prompt_tokens + 1)

    @property
    def _is_full(self) -> bool:
        return len(self.transfer) + len(self.received) >= self._held_max

    def _holders(self) -> list[Holding]:
        """Every request that holds blocks."""
        running = list(self._scheduler.in_place())
        everyone = [*running, *self.transfer, *self.received]
        owners = Counter(block for request in everyone for block in request.blocks)
        found = []
        for request in everyone:
            end = self._scheduler.blocks_of(request.prompt_tokens + request.max_tokens)
            is_running = request.state is State.RUNNING and not request.pushes
            own = sum(owners[block] == 1 for block in request.blocks) if is_running else 0
            found.append(Holding(max(end - len(request.blocks), 0), own))
        return found
