"""Policies: in which order requests are considered, and which engine is the cheapest for each.

A policy is a few functions over columns, chosen by name from :data:`POLICIES`; everything else is
the same for all policies.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from conductor.routing.columns import Column, Offers, Waiting

HERD_LOAD_GAP: Final = 0.5
"""A longer prefix is ignored if the load of its engine is this much above the lowest load.

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


def _longest_prefix(_: Waiting, __: int, engines: Offers) -> Sequence[Column]:
    herded = (engines.load - engines.load.min() > HERD_LOAD_GAP).astype(float)
    return herded, -engines.usable, engines.load, -engines.local


POLICIES: Final[dict[str, Policy]] = {
    "round-robin": Policy(
        lambda _, __, engines: (engines.last_assigned,), "its turn", needs_prefixes=False
    ),
    "least-loaded": Policy(
        lambda _, __, engines: (engines.load,), "least load", needs_prefixes=False
    ),
    "longest-prefix": Policy(
        _longest_prefix, "longest usable prefix, then least load", needs_prefixes=True
    ),
}
