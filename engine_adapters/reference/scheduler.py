"""Chooses the tokens to compute next. Pure: no torch, no clock, no I/O.

A step computes at most ``token_budget`` tokens: first one token of every decoding request (so that
a long prompt delays the next token of others by at most one step), then chunks of prompts in order
of admission. If blocks run out, the youngest request is preempted and recomputed later; its K/V
will be bit-equal.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from engine_adapters.reference.prefix_tree import BlockAllocator, PrefixTree
from engine_adapters.reference.request import Request, State
from kvstore.engine.chain import Chain
from kvstore.engine.load_choice import PromptsAhead


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a scheduler.

    Attributes:
        token_budget: maximum tokens computed in one step, at least 1; up to running_max are
            decodes.
        running_max: maximum requests with blocks.
        waiting_max: maximum requests waiting for admission.
    """

    token_budget: int = 512
    running_max: int = 8
    waiting_max: int = 256


@dataclass(slots=True)
class Plan:
    """The work of one step.

    Attributes:
        work: requests with the number of next tokens, at least 1.
        preempted: requests that lost their blocks and wait again.
    """

    work: list[tuple[Request, int]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)


class Scheduler:
    """Waiting and running requests, block tables and the plan of each step.

    Args:
        limits: limits.
        allocator: allocator of the pool; shared with the tree and the store adapter.
        tree: local prefix cache; None = compute every prompt.
        page_tokens: a multiple of ``block_tokens``.
        block_tokens: tokens in a block.
    """

    def __init__(
        self,
        limits: Limits,
        allocator: BlockAllocator,
        tree: PrefixTree | None,
        *,
        page_tokens: int,
        block_tokens: int,
    ) -> None:
        self._limits = limits
        self._allocator = allocator
        self._tree = tree
        self._page_tokens = page_tokens
        self._page_blocks = page_tokens // block_tokens
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in order of admission; RESTORING, RUNNING or FLUSHING

    @property
    def waiting(self) -> int:
        """Requests without blocks."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests with blocks."""
        return len(self._running)

    @property
    def places(self) -> int:
        """Requests that may still be admitted."""
        return self._limits.running_max - len(self._running)

    @property
    def available(self) -> int:
        """Blocks that are free, or only in the prefix tree."""
        return self._allocator.free + (self._tree.evictable if self._tree is not None else 0)

    def prompts_before(self, until: Request) -> PromptsAhead:
        """The prompts that are computed before that of a request with a place."""
        found = PromptsAhead()
        for request in self._running:
            if request is until:
                break
            if request.state is State.RUNNING:
                found.joins(request.id, request.uncomputed, request.computed)
        return found

    @property
    def next_waiting(self) -> Request | None:
        """The request that gets blocks next."""
        return self._waiting[0] if self._waiting else None

    def in_place(self) -> Iterator[Request]:
        """The requests that have a place."""
        return iter(self._running)

    def blocks_of(self, tokens: int) -> int:
        """Blocks for so many tokens, whole pages."""
        return self._pages(tokens) * self._page_blocks

    def requests(self) -> Iterator[Request]:
        """Every request that waits or has a place."""
        yield from self._running
        yield from self._waiting

    @property
    def tokens_max(self) -> int:
        """Tokens of the longest request, prompt and output, that could run alone."""
        return self._allocator.count // self._page_blocks * self._page_tokens

    def add(self, request: Request) -> bool:
        """Queue a request; returns False if the queue is full."""
        if len(self._waiting) >= self._limits.waiting_max:
            return False
        request.state = State.WAITING
        self._waiting.append(request)
        return True

    def admit(self, until: float = math.inf) -> list[Request]:
        """Admit waiting requests, in order, while there are free blocks.

        Each gets blocks for all its tokens.

        Args:
            until: latest arrival of a request that has never had blocks; later ones are not
                admitted.
        """
        admitted: list[Request] = []
        while self._waiting and self.places:
            request = self._waiting[0]
            if not request.retracted and request.arrived > until:
                break
            if not self.hold(request, len(request.tokens)):
                break
            self._waiting.popleft()
            request.retracted = False
            self.enter(request)
            admitted.append(request)
        return admitted

    def hold(
        self, request: Request, tokens: int, allows: Callable[[int], bool] | None = None
    ) -> bool:
        """Give a request blocks for so many tokens; returns False if there are too few.

        Pages in the prefix tree are shared and count as computed, but at least one token of the
        request is always left to compute.

        Args:
            request: has no blocks.
            tokens: number of tokens; at least the tokens of the request.
            allows: asked with the number of blocks that are not shared; False = too few.
        """
        assert not request.blocks
        self.extend_keys(request)
        reusable = request.keys[: (len(request.tokens) - 1) // self._page_tokens]
        shared = self._tree.match(reusable) if self._tree is not None else []
        missing = self.blocks_of(tokens) - len(shared)
        fresh = self._allocate(missing) if allows is None or allows(missing) else None
        if fresh is None:
            self._allocator.release(shared)
            return False
        request.blocks = shared + fresh
        request.computed = len(shared) // self._page_blocks * self._page_tokens
        return True

    def enter(self, request: Request) -> None:
        """A request with blocks takes a place among those that are computed."""
        assert self.places > 0
        assert request.blocks
        request.state = State.RUNNING
        self._running.append(request)

    def leave(self, request: Request, state: State) -> None:
        """A running request keeps its blocks and gives up its place."""
        self._running.remove(request)
        request.state = state

    def restored(self, request: Request, tokens: int) -> None:
        """K/V of the positions ``0..tokens-1`` of a RESTORING request are restored."""
        assert request.state is State.RESTORING
        assert request.computed <= tokens < len(request.tokens), "one token must be left to compute"
        request.state = State.RUNNING
        self.computed(request, tokens - request.computed)

    def plan(self) -> Plan:
        """Choose the work of the next step; may preempt requests for free blocks.

        The chosen work must be computed and reported with :meth:`computed`.
        """
        plan = Plan()
        budget = self._limits.token_budget
        runnable = [request for request in self._running if request.state is State.RUNNING]
        for request in runnable:
            if request.state is not State.RUNNING or request.uncomputed != 1 or not budget:
                continue  # preempted by an older one just now, or still in its prompt
            if self._make_room(request, plan):
                plan.work.append((request, 1))
                budget -= 1
        for request in runnable:
            if request.state is State.RUNNING and request.uncomputed > 1 and budget:
                count = self._piece(request, budget)
                plan.work.append((request, count))
                budget -= count
        return plan

    def computed(self, request: Request, count: int) -> None:
        """The K/V of the next ``count`` tokens of ``request`` are in the pool."""
        before = request.computed // self._page_tokens
        request.computed += count
        pages = request.computed // self._page_tokens
        if self._tree is not None and pages > before:
            self.extend_keys(request)
            self._tree.insert(request.keys[:pages], request.blocks[: pages * self._page_blocks])

    def finish(self, request: Request) -> None:
        """Remove a request in any state, with its references to blocks."""
        if request.state is State.WAITING:
            self._waiting.remove(request)
        elif request in self._running:
            self._running.remove(request)
        self._drop_blocks(request)
        request.state = State.FINISHED

    def extend_keys(self, request: Request) -> None:
        """Extend ``request.chain`` to all full pages; only new pages are hashed."""
        if request.chain is None:
            request.chain = Chain(self._page_tokens)
        request.chain.extend(request.tokens)

    def check(self) -> None:
        """Assert the cross-field invariants."""
        self._allocator.check()
        if self._tree is not None:
            self._tree.check()
        assert len(self._running) <= self._limits.running_max
        for request in self._waiting:
            assert request.state is State.WAITING, "a request without blocks is not waiting"
            assert not request.blocks, "a waiting request holds blocks"
            assert request.computed == 0
        for request in self._running:
            assert request.state in (State.RESTORING, State.RUNNING, State.FLUSHING)
            assert len(request.blocks) * self._page_tokens >= request.computed * self._page_blocks
            assert request.computed < len(request.tokens)
            assert all(self._allocator.references(block) for block in request.blocks)

    def _pages(self, tokens: int) -> int:
        """Number of pages for ``tokens``; the last one is allocated whole, for a handoff."""
        return -(-tokens // self._page_tokens)

    def _piece(self, request: Request, budget: int) -> int:
        """Size of the next chunk of a prompt: the rest, or up to a page boundary, or the budget."""
        if request.uncomputed <= budget:
            return request.uncomputed
        aligned = (request.computed + budget) // self._page_tokens * self._page_tokens
        return aligned - request.computed if aligned > request.computed else budget

    def _make_room(self, request: Request, plan: Plan) -> bool:
        """Allocate the page of a decoding request's next token; may preempt younger requests."""
        missing = self.blocks_of(len(request.tokens)) - len(request.blocks)
        while missing > 0:
            fresh = self._allocate(missing)
            if fresh is not None:
                request.blocks += fresh
                break
            place = self._running.index(request)
            younger = reversed(self._running[place:])
            victim = next(r for r in younger if r.state is State.RUNNING and not r.pushes)
            self._preempt(victim)
            plan.preempted.append(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._drop_blocks(request)
        request.state = State.WAITING
        request.retracted = True
        self._waiting.appendleft(request)

    def _drop_blocks(self, request: Request) -> None:
        self._allocator.release(request.blocks)
        request.blocks = []
        request.computed = 0

    def _allocate(self, count: int) -> list[int] | None:
        """Allocate blocks; evict from the prefix tree if none are free."""
        while self._allocator.free < count:
            if self._tree is None or not self._tree.evict():
                return None
        return self._allocator.allocate(count)
