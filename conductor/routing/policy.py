"""Policies: in which order requests are considered, and which engine is the cheapest for each.

A policy is a few functions over columns, chosen by name from :data:`POLICIES`; everything else is
the same for all policies.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from conductor.routing.columns import Column, Offers, Waiting

HERD_LOAD_GAP: Final = 0.5
"""A longer prefix, or the engine of a session, is ignored if its load is so much above the lowest.

Loads are fractions of ``max_running``. Otherwise one engine gets all requests with a popular prefix
while others are idle (reported for several cache-aware routers).
"""

Order = Callable[[Waiting, float], Sequence[int]]
"""Rows of waiting requests in the order in which they are given places; takes the time, too."""
Costs = Callable[[Waiting, int, Offers], Sequence[Column]]
"""What each engine would cost for the request in this row, [engines]: the lowest is taken. If
several columns are given, a later one counts where the earlier ones are equal."""


def by_arrival(waiting: Waiting, _: float) -> Sequence[int]:
    """First come, first served."""
    return range(len(waiting))


class Policy(NamedTuple):
    """How engines are chosen.

    Attributes:
        costs: of engines, for one request.
        because: the reason in decisions.
        needs_prefixes: whether ``costs`` uses prefixes, so that prompts must be tokenised.
        order: of requests.
    """

    costs: Costs
    because: str
    needs_prefixes: bool
    order: Order = by_arrival


def _random(waiting: Waiting, row: int, engines: Offers) -> Sequence[Column]:
    return (_hashes(waiting.numbers[row], engines),)


def _session(waiting: Waiting, row: int, engines: Offers) -> Sequence[Column]:
    """Each session has an order of engines of its own: when one comes or goes, few others move."""
    session = waiting.sessions[row]
    if not session:
        return (engines.load,)
    return _is_hot(engines), _hashes(session, engines)


def _new_tokens_times_batch(waiting: Waiting, row: int, engines: Offers) -> Sequence[Column]:
    tokens = waiting.tokens[row]
    batch = engines.in_flight + 1
    if tokens is None:
        return (batch,)
    new_tokens: Column = np.maximum(tokens - engines.usable, 1.0)
    return (new_tokens * batch,)


def _hashes(what: object, engines: Offers) -> Column:
    """A number in 0..1 for each engine, which looks random but is always the same."""
    names = [f"{what}/{one}".encode(errors="surrogatepass") for one in engines.ids]
    digests = [hashlib.blake2b(name, digest_size=6).digest() for name in names]
    return np.array([int.from_bytes(digest) / 2**48 for digest in digests])


def _is_hot(engines: Offers) -> Column:
    """1 for engines whose load is far above the lowest one."""
    hot: Column = (engines.load - engines.load.min() > HERD_LOAD_GAP).astype(np.float64)
    return hot


def _longest_prefix(_: Waiting, __: int, engines: Offers) -> Sequence[Column]:
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
}
