"""Policies: in which order requests are considered, and which engine is the cheapest for each.

A policy is a few functions over columns, chosen by name from :data:`POLICIES`; everything else is
the same for all policies.
"""

import enum
import hashlib
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from conductor.routing.columns import Column, Eligible, Waiting

HERD_LOAD_GAP: Final = 0.5
"""A longer prefix, or the engine of a session, is ignored if its load is so much above the lowest.

Loads are fractions of ``max_running``. Otherwise one engine gets all requests with a popular prefix
while others are idle (reported for several cache-aware routers).
"""

Order = Callable[[Waiting, float], Sequence[int]]
"""Rows of waiting requests in the order in which they get places; also takes the time."""
Costs = Callable[[Waiting, int, Eligible], Sequence[Column]]
"""The costs of each engine for the request in this row, [engines]: the lowest is chosen. If there
are several columns, a later one counts where the earlier ones are equal."""


Fetches = Callable[[Column, Column, Column, Column], npt.NDArray[np.bool_]]
"""Which engines fetch the part of prompts that another node has, [prompts, engines]. It gets the
tokens that they have, and those that they would have then; the seconds if they fetch, and if not.
"""


class Binding(enum.StrEnum):
    """When a request gets its engine."""

    ROOM = "room"
    """When engines have places: the cheapest of these is taken."""
    ARRIVAL = "arrival"
    """When it arrives: the cheapest is taken, and it waits for a place there."""
    LATE = "late"
    """When the cheapest is about to need its next prompt; until then all may change."""


def by_arrival(waiting: Waiting, _: float) -> Sequence[int]:
    """First come, first served."""
    return range(len(waiting))


AGING: Final = 0.1
"""A second of waiting counts as this many seconds less to compute."""


def by_need(waiting: Waiting, now: float) -> Sequence[int]:
    """Requests that need least come first; waiting reduces the need.

    Among ``n`` requests for one engine, the mean wait is least in this order; aging limits the wait
    of each: one that needs ``s`` seconds is never overtaken by requests that arrive ``s / AGING``
    later.
    """
    if not waiting.least_s:
        return range(len(waiting))
    needed = np.array(waiting.least_s) - AGING * (now - np.array(waiting.arrived))
    rows: Sequence[int] = np.argsort(needed, kind="stable").tolist()
    return rows


class Policy(NamedTuple):
    """How engines are chosen.

    Attributes:
        costs: of engines, for one request.
        because: the reason in decisions.
        needs_prefixes: whether ``costs`` uses prefixes, so that prompts must be tokenised.
        order: of requests.
        fetches: which engines fetch what others have; None = ``costs`` are not in seconds.
        binds: when a request gets its engine; :attr:`Binding.ROOM` unless costs are in seconds.
    """

    costs: Costs
    because: str
    needs_prefixes: bool
    order: Order = by_arrival
    fetches: Fetches | None = None
    binds: Binding = Binding.ROOM

    def new_rows(self, waiting: Waiting) -> set[int]:
        """Rows of requests that must be looked up even if there are no free places."""
        if self.binds is Binding.ARRIVAL and "" in waiting.bound:
            return {row for row, bound in enumerate(waiting.bound) if not bound}
        if self.binds is Binding.LATE:
            return set(np.flatnonzero(np.array(waiting.least_s) == 0.0).tolist())
        return set()


def _random(waiting: Waiting, row: int, engines: Eligible) -> Sequence[Column]:
    return (_hashes(waiting.numbers[row], engines),)


def _session(waiting: Waiting, row: int, engines: Eligible) -> Sequence[Column]:
    """Each session has its own order of engines: if an engine joins or leaves, few others move."""
    session = waiting.sessions[row]
    if not session:
        return (engines.load,)
    return _is_hot(engines), _hashes(session, engines)


def _new_tokens_times_batch(waiting: Waiting, row: int, engines: Eligible) -> Sequence[Column]:
    tokens = waiting.tokens[row]
    batch = engines.in_flight + 1
    if tokens is None:
        return (batch,)
    new_tokens: Column = np.maximum(tokens - engines.usable, 1.0)
    return (new_tokens * batch,)


WORK: Final = 0.4
"""Cost to later requests of a second of an engine's time when all engines are busy; it scales with
the fourth power of the busy part: an engine that computes less is preferred to one that is as fast.
So a burst with one cold prefix stays together, unless engines are idle anyway."""
OVERTAKEN: Final = 3.0
"""A request that waits for an engine is overtaken by later ones that need less: the wait counts as
longer by this multiple of the prompt's own seconds, at most this multiple of itself, when all
engines are busy; it scales with the square of the busy part. So a free engine is worth more."""
FIRST_TOKENS: Final = 5
"""Number of tokens after the first one that count when ``earliest-first-token`` compares
engines."""
KVCACHE_BALANCING_THRESHOLD: Final = 2.0
"""How many times longer than its own a prefix must be that an engine fetches (``cache-global``).
Mooncake (FAST'25, Algorithm 1) tunes this by hand, and does not say the value."""


def _ttft(_: Waiting, __: int, engines: Eligible) -> Sequence[Column]:
    assert engines.terms is not None
    return (engines.terms.ttft_s,)


def _first_tokens(_: Waiting, __: int, engines: Eligible) -> Sequence[Column]:
    """Seconds until the first token, and the costs to others: time, and slower tokens."""
    terms = engines.terms
    assert terms is not None
    busy = np.count_nonzero(terms.queue_s) / max(1, len(terms.queue_s))
    passed_s = OVERTAKEN * busy**2 * np.minimum(terms.queue_s, terms.prefill_s)
    work_s = WORK * busy**4 * terms.prefill_s
    others_s = passed_s + work_s + terms.late_s
    return (terms.ttft_s + others_s + FIRST_TOKENS * terms.tbt_s,)


def never_fetches(usable: Column, _: Column, __: Column, ___: Column) -> npt.NDArray[np.bool_]:
    """No engine fetches."""
    return np.zeros(usable.shape, dtype=np.bool_)


def _much_longer(usable: Column, reached: Column, _: Column, __: Column) -> npt.NDArray[np.bool_]:
    """Whether the ratio exceeds the threshold; it is infinite for those that have nothing."""
    longer: npt.NDArray[np.bool_] = reached > usable * KVCACHE_BALANCING_THRESHOLD
    return longer


def sooner(_: Column, __: Column, fetched_s: Column, computed_s: Column) -> npt.NDArray[np.bool_]:
    """Those that have the prompt sooner if they fetch."""
    fetch: npt.NDArray[np.bool_] = fetched_s < computed_s
    return fetch


def _hashes(what: object, engines: Eligible) -> Column:
    """A number in 0..1 for each engine, which looks random but is always the same."""
    names = [f"{what}/{one}".encode(errors="surrogatepass") for one in engines.ids]
    digests = [hashlib.blake2b(name, digest_size=6).digest() for name in names]
    return np.array([int.from_bytes(digest) / 2**48 for digest in digests])


def _is_hot(engines: Eligible) -> Column:
    """1 for engines whose load is far above the lowest one."""
    hot: Column = (engines.load - engines.load.min() > HERD_LOAD_GAP).astype(np.float64)
    return hot


def _longest_prefix(_: Waiting, __: int, engines: Eligible) -> Sequence[Column]:
    return _is_hot(engines), -engines.usable, engines.load, -engines.local


POLICIES: Final[dict[str, Policy]] = {
    "random": Policy(_random, "at random", needs_prefixes=False),
    "round-robin": Policy(
        lambda _, __, engines: (engines.last_assigned,), "its turn", needs_prefixes=False
    ),
    "least-loaded": Policy(
        lambda _, __, engines: (engines.load,), "least load", needs_prefixes=False
    ),
    "longest-prefix": Policy(
        _longest_prefix, "longest usable prefix, then least load", needs_prefixes=True
    ),
    "session": Policy(_session, "engine of its session", needs_prefixes=False),
    "lmetric": Policy(
        _new_tokens_times_batch, "fewest new tokens times batch size", needs_prefixes=True
    ),
    "cache-local": Policy(
        _ttft,
        "earliest first token, nothing fetched",
        needs_prefixes=True,
        fetches=never_fetches,
        binds=Binding.ARRIVAL,
    ),
    "cache-global": Policy(
        _ttft,
        "earliest first token, much longer prefixes fetched",
        needs_prefixes=True,
        fetches=_much_longer,
        binds=Binding.ARRIVAL,
    ),
    "earliest-first-token": Policy(
        _first_tokens,
        "earliest first token",
        needs_prefixes=True,
        order=by_need,
        fetches=sooner,
        binds=Binding.LATE,
    ),
}
