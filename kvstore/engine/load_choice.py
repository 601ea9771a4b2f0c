"""Decides for a hit whether to load it, to load a part of it, or to compute it. Pure.

Loading ``p`` pages and computing the others takes ``max(load(p), backlog) + compute(others)``:
while a load is in progress the engine computes the prompts before this one (its backlog), and the
pages that are not loaded are computed after it. Computing all takes ``backlog + compute(all)``.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from kvstore.client.results import Hit
from kvstore.engine.load_costs import LoadCosts, TierPart
from kvstore.engine.options import Loads
from kvstore.engine.pace import Pace

PREFER: Final = 1.05
"""Loading everything is chosen if it takes at most this multiple of the fastest choice: it
leaves the engine free for others. A part is chosen only if it is faster by this factor than all
or none."""
PROBE_AFTER: Final = 16
"""After this many consecutive hits that were not loaded from a tier, a few of its pages are loaded,
to measure it again."""
PROBE_SHARE: Final = 0.25
"""Maximum expected time of such a probe, as a share of the time to compute; but at least a page."""
STRETCH_AFTER: Final = 4
"""Loaded hits after which one is partly computed, with more tokens than ever in one step, to
measure that: twice as many, at least a page. Only while loading is expected to take more than
:data:`STRETCH_SHARE` of computing; otherwise a better estimate changes nothing."""
STRETCH_SHARE: Final = 0.25
STRETCH_S_MIN: Final = 0.02
"""Nor while loading takes at most this and computing was never measured: that is fast enough."""
LOADS_MAX: Final = 16
"""Loads in flight; further requests wait for one to end. Six run at a time; more would only hold
blocks of the engine."""
UNMEASURED_MAX: Final = 4
"""Loads in flight of a tier with too few measurements: if it is slow, few requests wait."""
STUCK_MAX: Final = 2 * LOADS_MAX
"""Loads that were given up and have not ended: each holds blocks of the engine. With this many,
nothing is loaded until one of them ends."""
_PARTS: Final = 8
"""A part grows within a tier in this many steps."""


class PromptsAhead:
    """The prompts that the engine is computing, or about to compute, before a request."""

    __slots__ = ("_pairs", "_requests", "_tokens")

    def __init__(self) -> None:
        self._requests: dict[str, tuple[int, int]] = {}
        self._tokens = 0
        self._pairs = 0

    def joins(self, request_id: str, tokens: int, before: int) -> None:
        """A request is computed from ``before`` on: ``tokens``; a known request is ignored.

        Decoded tokens do not count.
        """
        if tokens > 1 and request_id not in self._requests:
            self._requests[request_id] = tokens, before
            self._tokens += tokens
            self._pairs += tokens * before

    def beside(self, request_id: str) -> tuple[int, int]:
        """Tokens of the other requests, and the mean number before them in their prompts."""
        tokens, before = self._requests.get(request_id, (0, 0))
        others = self._tokens - tokens
        return others, (self._pairs - tokens * before) // others if others else 0


class HitOffer(NamedTuple):
    """A hit, and what the engine has already.

    Attributes:
        parts: the pages beyond the engine's own, by tier, in order.
        tokens: tokens gained by loading all pages: the engine may have the first page in part.
        computed: leading tokens that the engine has.
        page_tokens: tokens per page.
        backlog: tokens of prompts that the engine computes before this one.
        backlog_before: mean number of tokens before the backlog's tokens in their prompts.
        divisible: any number of leading pages can be loaded. Otherwise only all pages of this node,
            or the whole hit with the pages of other nodes: a group of the engine that needs only
            the last pages of a hit (windows, states) may have none at the end of a part.
        promised: another engine has just computed the pages for this request, so that this engine
            need not: no page is computed only for a measurement.
    """

    parts: tuple[TierPart, ...]
    tokens: int
    computed: int
    page_tokens: int
    backlog: int = 0
    backlog_before: int = 0
    divisible: bool = True
    promised: bool = False

    @property
    def ends(self) -> tuple[int, ...]:
        """The candidate numbers of leading pages: all, this node's, or each tier's in eighths."""
        found, before = set[int](), 0
        for part in self.parts:
            if self.divisible:
                found |= {before + part.pages * step // _PARTS for step in range(1, _PARTS + 1)}
            elif part.tier == "remote":
                found.add(before)
            before += part.pages
        return tuple(sorted(end for end in found | {before} if end and self.gained(end)))

    @property
    def pages(self) -> int:
        """Pages that could be loaded."""
        return sum(part.pages for part in self.parts)

    def gained(self, pages: int) -> int:
        """Tokens gained by loading the first ``pages``."""
        return max(0, self.tokens - (self.pages - pages) * self.page_tokens)

    def tiers(self, pages: int) -> tuple[str, ...]:
        """The tiers of the first ``pages``."""
        return tuple(part.tier for part, count in self.split(pages).items() if count)

    def split(self, pages: int) -> dict[TierPart, int]:
        """How many of the first ``pages`` belong to each part."""
        shares: dict[TierPart, int] = {}
        for part in self.parts:
            shares[part] = min(part.pages, pages)
            pages -= shares[part]
        return shares


class Choice(NamedTuple):
    """What to do with a hit.

    Attributes:
        kind: ``load`` all, a ``part``, or ``compute`` all.
        reason: ``faster``; ``unmeasured``: too few measurements; ``probe``: to measure a tier
            again; ``stretch``: to measure computing more tokens than ever; ``always``: as the
            options say; ``no_room``: too many loads, for too long.
        pages: leading pages to load.
        load_s: expected seconds to load these pages; to load all pages if none is loaded.
        compute_s: expected seconds to compute the loaded part instead, after the backlog; of all
            tokens if nothing is loaded. Infinite while unknown, and where everything is loaded
            however long that takes.
    """

    kind: str
    reason: str
    pages: int
    load_s: float
    compute_s: float


COUNTED: Final = (
    ("load", "faster"), ("load", "unmeasured"), ("load", "probe"), ("load", "always"),
    ("part", "faster"), ("part", "probe"), ("part", "stretch"),
    ("compute", "faster"), ("compute", "stretch"), ("compute", "always"), ("compute", "no_room"),
)  # fmt: skip
"""Every kind and reason."""


def offer_of(
    hit: Hit, computed: int, page_tokens: int, page_bytes: int, backlog: tuple[int, int] = (0, 0),
    *, divisible: bool = True, promised: bool = False,
) -> HitOffer:  # fmt: skip
    """What a lookup found beyond what the engine has.

    Args:
        hit: the lookup's answer. It does not say which pages are on disk: the last ones are
            assumed, because they are evicted first.
        computed: leading tokens that the engine has.
        page_tokens: tokens per page.
        page_bytes: bytes of a page on all ranks.
        backlog: tokens of the backlog and mean tokens before them, from
            :meth:`PromptsAhead.beside`.
        divisible: see :class:`HitOffer`.
        promised: see :class:`HitOffer`.
    """
    first = computed // page_tokens
    here = max(0, hit.pages - first)
    on_disk = min(here, hit.tiers.get("ssd", 0))
    remote = max(0, hit.pages + hit.remote - first) - here
    # The guess is for all of them: most of it is for the disk, if any are there.
    guess_s = hit.load_seconds / (on_disk or hit.pages) if hit.pages else 0.0
    remote_s = hit.remote_seconds / hit.remote if hit.remote else 0.0
    parts = (
        TierPart("host", here - on_disk, float(page_bytes), 0.0 if on_disk else guess_s),
        TierPart("ssd", on_disk, float(page_bytes), guess_s),
        TierPart("remote", remote, remote_s, remote_s),
    )
    found = tuple(part for part in parts if part.pages)
    tokens = max(0, (hit.pages + hit.remote) * page_tokens - computed)
    return HitOffer(found, tokens, computed, page_tokens, *backlog, divisible, promised)


class LoadChooser:
    """Chooses according to measurements.

    Args:
        pace: measured by the adapter.
        loads: the user's rule.

    Attributes:
        costs: measured loads, and those in flight.
        holds_too_much: loads hold so many of the engine's blocks that no further one may start; set
            by the caller.
    """

    def __init__(self, pace: Pace, loads: Loads = Loads.FASTER) -> None:
        self.costs = LoadCosts()
        self.holds_too_much = False
        self._pace = pace
        self._rule = loads
        self._skipped: dict[str, int] = {}
        self._stretched = 0
        self._since_stretch = STRETCH_AFTER

    def has_room(self, tiers: Iterable[str]) -> bool:
        """Whether one more load, from these tiers, may start.

        While loads are stuck, and none has ended since, one is tried at a time.
        """
        costs = self.costs
        most = LOADS_MAX if costs.any_ends or not costs.stuck else 1
        if costs.in_flight >= most or costs.stuck >= STUCK_MAX or self.holds_too_much:
            return False
        new = [tier for tier in tiers if not self.costs.is_known(tier)]
        return all(self.costs.in_flight_of(tier) < UNMEASURED_MAX for tier in new)

    @property
    def waits_in_vain(self) -> bool:
        """Whether waiting for room is pointless: loads are stuck.

        None has ended since, or no load is in flight whose end would make room. Otherwise each
        request would wait for as long as these loads are stuck.
        """
        costs = self.costs
        return costs.stuck > 0 and not (costs.any_ends and costs.in_flight)

    def choose(self, asked: HitOffer, now: float) -> Choice:
        """Choose; changes nothing. Call :meth:`took` when the choice is carried out.

        Args:
            asked: the hit, of at least one token.
            now: monotonic seconds.
        """
        assert asked.tokens > 0, asked
        whole = asked.pages
        ahead = {part.tier: self.costs.ahead(part.tier, now) for part in asked.parts}
        load_s = self._load_s(asked, whole, ahead)
        compute_s = self._after_backlog_s(asked, whole)
        if self._rule is not Loads.FASTER:
            if self._rule is Loads.ALWAYS:
                return Choice("load", "always", whole, load_s, float("inf"))
            return Choice("compute", "always", 0, load_s, compute_s)
        best = whole
        if compute_s < float("inf"):
            best = self._fastest(asked, ahead)
            probe = self._probe_pages(asked, best, ahead)
            if probe > best:
                return self._with("probe", asked, probe, ahead)
        if best < whole:
            return self._with("faster", asked, best, ahead)
        left = self._stretch_pages(asked, load_s, compute_s)
        if left:
            return self._with("stretch", asked, whole - left, ahead)
        known = all(self.costs.is_known(part.tier) for part in asked.parts)
        known = known and compute_s < float("inf")
        return self._with("faster" if known else "unmeasured", asked, whole, ahead)

    def _fastest(self, asked: HitOffer, ahead: dict[str, float]) -> int:
        """Number of pages to load for the shortest time; all or none if that is nearly as short."""
        taken = {pages: self._taken_s(asked, pages, ahead) for pages in (0, *asked.ends)}
        best = min(taken, key=lambda pages: (taken[pages], -pages))
        nearly = (pages for pages in (asked.pages, 0) if taken[pages] <= PREFER * taken[best])
        return next(nearly, best)

    def took(self, asked: HitOffer, choice: Choice) -> None:
        """A choice is being carried out."""
        self._since_stretch += 1
        if choice.reason == "stretch":
            computed = asked.tokens - asked.gained(choice.pages)
            self._stretched, self._since_stretch = max(self._stretched, computed), 0
        for part, pages in asked.split(choice.pages).items():
            if pages:
                self._skipped.pop(part.tier, None)
            elif choice.reason == "faster":
                self._skipped[part.tier] = self._skipped.get(part.tier, 0) + 1

    def _with(self, reason: str, asked: HitOffer, pages: int, ahead: dict[str, float]) -> Choice:
        kind = "load" if pages == asked.pages else "part" if pages else "compute"
        shown = pages or asked.pages
        load_s = self._load_s(asked, shown, ahead)
        return Choice(kind, reason, pages, load_s, self._after_backlog_s(asked, shown))

    def _load_s(self, asked: HitOffer, pages: int, ahead: dict[str, float]) -> float:
        parts = asked.split(pages).items()
        return sum(self.costs.seconds(part, count, ahead[part.tier]) for part, count in parts)

    def _after_backlog_s(self, asked: HitOffer, pages: int) -> float:
        """Seconds until the tokens of the first ``pages`` would be computed."""
        own = self._pace.recompute_s(asked.gained(pages), asked.computed)
        return own + self._backlog_s(asked)

    def _backlog_s(self, asked: HitOffer) -> float:
        return self._pace.recompute_s(asked.backlog, asked.backlog_before) if asked.backlog else 0.0

    def _taken_s(self, asked: HitOffer, pages: int, ahead: dict[str, float]) -> float:
        """Seconds until all tokens of the hit are there, if ``pages`` pages are loaded."""
        gained = asked.gained(pages)
        rest_s = self._pace.recompute_s(asked.tokens - gained, asked.computed + gained)
        backlog_s = self._backlog_s(asked)
        return max(self._load_s(asked, pages, ahead), backlog_s) + rest_s

    def _stretch_pages(self, asked: HitOffer, load_s: float, compute_s: float) -> int:
        """Last pages to compute, although loading is faster, for a measurement; 0 = none."""
        measured = max(self._pace.step_tokens, float(self._stretched))
        if not all(self.costs.is_known(part.tier) for part in asked.parts):
            return 0
        unknown = compute_s == float("inf")
        if asked.promised or not asked.divisible:
            return 0
        needless = load_s <= (STRETCH_S_MIN if unknown else STRETCH_SHARE * compute_s)
        if needless or measured >= asked.tokens or self._since_stretch < STRETCH_AFTER:
            return 0
        return min(asked.pages, max(1, int(2 * measured) // asked.page_tokens))

    def _probe_pages(self, asked: HitOffer, best: int, ahead: dict[str, float]) -> int:
        """Pages to load to measure a tier that was not measured recently; 0 = none is due."""
        limit_s = PROBE_SHARE * self._pace.recompute_s(asked.tokens, asked.computed)
        before = 0
        for part in asked.parts:
            due = self._skipped.get(part.tier, 0) >= PROBE_AFTER
            if due and best <= before and self.has_room([part.tier]):
                least_s = self._load_s(asked, before, ahead)
                if not asked.divisible:
                    return next(end for end in asked.ends if end > before)
                pages = before + 1
                while pages < before + part.pages:
                    more = min(before + part.pages, before + 2 * (pages - before))
                    if self._load_s(asked, more, ahead) - least_s > limit_s:
                        break
                    pages = more
                return pages
            before += part.pages
        return 0
