"""Which requests of the reference engine are restored, how far, and what they wait for."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from engine_adapters.reference.request import Request
from kvstore.client.results import MISS, Hit
from kvstore.engine.load_choice import LoadChooser, PromptsAhead, offer_of
from kvstore.engine.load_decisions import LoadDecisions, RequestLoad
from kvstore.engine.options import Loads
from kvstore.engine.pace import Pace
from kvstore.engine.pending import PendingWait, missing_tokens

PENDING_WAIT_MAX_S: Final = 2.0
"""Maximum wait for pages that another engine is writing; less if computing them takes less."""
ROOM_WAIT_MAX_S: Final = 0.2
"""Maximum wait for room, while too many restores are under way; less if computing takes less."""


@dataclass(slots=True)
class _Waiting:
    """What a request waits for before its restore begins, and what was decided about it.

    Attributes:
        others: returns the prompts that are computed before it.
    """

    others: Callable[[], PromptsAhead]
    pages: PendingWait = field(default_factory=PendingWait)
    load: RequestLoad = field(default_factory=RequestLoad)


class Chosen(NamedTuple):
    """What to restore: the pages of ``hit``, as ``load`` says if it has a choice."""

    hit: Hit
    load: RequestLoad


class RestoreChoices:
    """Decides for each request, and keeps those that wait; all calls from the step thread.

    Args:
        lookup: looks a request up.
        pace: of the engine.
        loads: what is restored of a hit.
        page_tokens: tokens in a page.
        page_bytes: bytes of a page on all ranks.
        count: adds to a series of :data:`kvstore.engine.counts.SERIES`, or to a choice.

    Attributes:
        decisions: must be told of the beginning and the end of restores.
    """

    def __init__(
        self, lookup: Callable[[Request], Hit], pace: Pace, loads: Loads, page_tokens: int,
        page_bytes: int, count: Callable[[str, float], None],
    ) -> None:  # fmt: skip
        self.decisions = LoadDecisions(LoadChooser(pace, loads), ROOM_WAIT_MAX_S, count)
        self._lookup = lookup
        self._pace = pace
        self._page_tokens = page_tokens
        self._page_bytes = page_bytes
        self._waiting: dict[Request, _Waiting] = {}

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def begin(
        self, request: Request, others: Callable[[], PromptsAhead], now: float
    ) -> Chosen | None:
        """Choose for a request; None: it waits until :meth:`poll` returns it."""
        waiting = _Waiting(others)
        chosen = self._chosen(request, waiting, now)
        if chosen is None:
            self._waiting[request] = waiting
        return chosen

    def at_once(self, request: Request, hit: Hit, now: float) -> Chosen:
        """Choose for a request that cannot wait; without room nothing is restored."""
        load = RequestLoad()
        return Chosen(self._decided(request, PromptsAhead(), load, hit, now) or MISS, load)

    def poll(self, now: float) -> list[tuple[Request, Chosen]]:
        """The requests that need not wait any more."""
        ready: list[tuple[Request, Chosen]] = []
        for request, waiting in list(self._waiting.items()):
            chosen = self._chosen(request, waiting, now) if now >= waiting.pages.ask_at else None
            if chosen is not None:
                del self._waiting[request]
                ready.append((request, chosen))
        return ready

    def forget(self, request: Request) -> None:
        """A request waits for nothing any more; an unknown one never did."""
        self._waiting.pop(request, None)

    def forget_all(self) -> None:
        """The engine stops."""
        self._waiting.clear()

    def _chosen(self, request: Request, waiting: _Waiting, now: float) -> Chosen | None:
        if self.decisions.waits_for_room(waiting.load, now):
            return None
        hit = self._lookup(request)
        if self._waits(request, waiting.pages, hit, now):
            return None
        decided = self._decided(request, waiting.others(), waiting.load, hit, now)
        return Chosen(decided, waiting.load) if decided is not None else None

    def _waits(self, request: Request, wait: PendingWait, hit: Hit, now: float) -> bool:
        """Whether to look up again later, because pages are being written or looked for."""
        there = hit.pages + hit.remote
        wanted = there + hit.pending
        missing = missing_tokens(there, wanted, request.computed, self._page_tokens)
        wait_s = self._pace.wait_s(missing, 0.0, PENDING_WAIT_MAX_S)
        return missing > 0 and wait.goes_on(now, wait_s)

    def _decided(
        self, request: Request, others: PromptsAhead, load: RequestLoad, hit: Hit, now: float
    ) -> Hit | None:
        """The pages of a hit to restore, the first ones; None = there is no room now."""
        request.stored_pages = hit.pages
        usable = (len(request.tokens) - 1) // self._page_tokens  # one token is left to compute
        there = min(hit.pages, usable)
        remote = min(hit.remote, usable - there)
        asked = offer_of(
            hit._replace(pages=there, remote=remote), request.computed, self._page_tokens,
            self._page_bytes, others.beside(request.id), promised=request.from_handoff is not None,
        )  # fmt: skip
        if not asked.tokens:
            return hit
        choice = self.decisions.decide(load, asked, now)
        if choice is None:
            return None
        if not choice.pages:
            self.decisions.computes(load, now)
            return MISS
        end = request.computed // self._page_tokens + choice.pages
        taken = max(0, end - there)
        request.stored_pages = hit.pages + taken
        return hit._replace(pages=min(end, there), remote=taken)
