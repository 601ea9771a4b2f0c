"""Lookups of the scheduler side: each step of the engine has a limit for all of them together.

A node that answers each lookup just in time would otherwise stop the engine for the sum of them. A
request that was passed over is asked for before those whose turn came later.
"""

from collections.abc import Callable
from typing import Final

from kvstore.client.results import MISS, Hit
from kvstore.engine.counts import AdapterCounts
from kvstore.engine.hints import FetchHint
from kvstore.engine.opening import Opening
from kvstore.engine.requests import Request
from kvstore.engine.states import RequestState
from kvstore.engine.transfer import NOTHING, Transfer, read_transfer
from kvstore.protocol.page import PrefixKeys

TIMEOUTS_MAX: Final = 2
"""Lookup timeouts after which no further lookup begins in a step."""


class StepLookups:
    """Asks the node which pages there are.

    Args:
        opening: source of the space.
        page_tokens: tokens per page.
        timeout_s: maximum seconds of one lookup.
        clock: monotonic seconds.
        counts: counts of the adapter.
    """

    def __init__(
        self, opening: Opening, page_tokens: int, timeout_s: float,
        clock: Callable[[], float], counts: AdapterCounts,
    ) -> None:  # fmt: skip
        self._opening = opening
        self._page_tokens = page_tokens
        self._limit_s = TIMEOUTS_MAX * timeout_s
        self._clock = clock
        self._counts = counts
        self._spent_s = 0.0
        self._step = 0
        self._oldest: int | None = None
        self._passed: int | None = None

    def next_step(self) -> None:
        """A step ends, and the next one begins."""
        self._step += 1
        full = self._spent_s >= self._limit_s
        # With time left all could be looked up, so no order is needed. If it were kept, a backlog
        # would never end while requests arrive in every step.
        self._oldest, self._passed = (self._passed if full else None), None
        self._spent_s = 0.0

    def is_turn(self, state: RequestState, *, last: bool) -> bool:
        """Whether to look up a request in this step; otherwise it waits, see :meth:`pass_over`.

        Args:
            state: of the request.
            last: its wait is over: it does not have to wait for older ones.
        """
        turn = self._step if state.turn is None else state.turn
        # The oldest may not come again: then this holds up the others for one step only.
        too_early = self._oldest is not None and turn > self._oldest and not last
        if too_early or self._spent_s >= self._limit_s:
            return False
        state.turn = None
        return True

    def pass_over(self, state: RequestState, now: float, wait_s: float) -> int | None:
        """Leave a request to a later step, in which it goes before those that came after it.

        Returns:
            None; or 0 tokens to load: it has waited for ``wait_s``, so that it is a miss.
        """
        if not state.wait.waits_for_turn(now, wait_s):
            return 0
        self._counts.add("passed_over", state.turn is None)
        state.turn = turn = self._step if state.turn is None else state.turn
        self._passed = turn if self._passed is None else min(self._passed, turn)
        return None

    def ask(self, keys: PrefixKeys, promise: Transfer, hint: FetchHint) -> Hit:
        """Look up the leading run of ``keys``.

        Args:
            keys: of the request.
            promise: what the prefill engine says it has stored.
            hint: what a router says another node has.
        """
        space = self._opening.get()
        if space is None:
            return MISS
        began = self._clock()
        held = promise.promised_pages(self._page_tokens)
        held, node = (held, promise.kvstore_node) if held else (hint.pages(keys), hint.node)
        hit = space.lookup(keys, holder=node, held=held)
        took_s = self._clock() - began
        self._spent_s += took_s
        self._counts.add("lookups")
        self._counts.add("lookup_seconds", took_s)
        return hit

    def promise(self, request: Request) -> Transfer:
        """The pages that the prefill engine says it has stored."""
        if not (request.kv_transfer_params and self._opening.connected):
            return NOTHING
        return read_transfer(request.kv_transfer_params)
