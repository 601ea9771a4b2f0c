"""Which KV to load or copy before it is requested, and which prefixes to replicate. Pure.

A waiting request has a *wish*: pages that are not yet in the memory of the node that will most
likely serve it. :class:`BringPlanner` starts wishes within a byte budget, and cancels them when the
request goes elsewhere. :class:`HotPrefixes` says how many nodes should have a prefix that many
requests have; a level is left only at half the rate at which it was reached (hysteresis).
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import log
from typing import Final, NamedTuple

from conductor.routing.columns import NO_PREFIX, Prefix
from kvstore.index.layout import Words

HALF_S: Final = 30.0
"""After which a request counts half in the rate of its prefixes."""
PREFIXES_MAX: Final = 4096
TRIES: Final = 2
"""Nodes to which something is brought for one request, one after another."""


class BringKind(StrEnum):
    """The source of pages: the node's own disk, or another node."""

    LOAD = "load"
    COPY = "copy"


class Wish(NamedTuple):
    """Pages that a waiting request would find at a node.

    Attributes:
        request: number of the request.
        node: the node that will most likely serve it.
        source: the node that has the pages, and is asked: the same one to load them.
        tokens: tokens of the prompt, up to the end of the wished pages.
        size_bytes: bytes of the missing pages.
    """

    request: int
    node: str
    source: str
    tokens: int
    size_bytes: int

    @property
    def kind(self) -> BringKind:
        """The source of the pages."""
        return BringKind.LOAD if self.node == self.source else BringKind.COPY


class Start(NamedTuple):
    """Carry a wish out; ``number`` names it."""

    number: int
    wish: Wish


class Cancel(NamedTuple):
    """Carry a wish out no further; it still counts until :meth:`BringPlanner.ended`."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BringLimits:
    """Limits of pages in transit.

    Attributes:
        bytes_max: maximum bytes of all loads and copies.
        jobs_max: wishes that one node carries out at a time.
    """

    bytes_max: int
    jobs_max: int


@dataclass(slots=True)
class _Carried:
    wish: Wish
    cancelled: bool = False


@dataclass(slots=True)
class BringPlanner:
    """The wishes that are carried out."""

    limits: BringLimits
    _carried: dict[int, _Carried] = field(default_factory=dict)
    _of_request: dict[int, int] = field(default_factory=dict)  # the one that is not cancelled
    _tries: Counter[int] = field(default_factory=Counter)
    _numbers: int = 0

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of all that is carried out, cancelled ones included until their ends."""
        return sum(one.wish.size_bytes for one in self._carried.values())

    def step(self, wishes: Sequence[Wish]) -> list[Start | Cancel]:
        """Decide which wishes to start and to cancel now.

        Args:
            wishes: of waiting requests, in order; at most one each. A request without a wish any
                more (or with one for another node) has its job cancelled; one that is not listed
                keeps it.
        """
        effects: list[Start | Cancel] = []
        for wish in wishes:
            number = self._of_request.get(wish.request)
            if number is not None:
                if self._carried[number].wish.node == wish.node:
                    continue
                effects += self._cancel(wish.request)
            if self._fits(wish):
                self._numbers += 1
                self._tries[wish.request] += 1
                self._carried[self._numbers] = _Carried(wish)
                self._of_request[wish.request] = self._numbers
                effects.append(Start(self._numbers, wish))
        return effects

    def _fits(self, wish: Wish) -> bool:
        jobs = sum(one.wish.source == wish.source for one in self._carried.values())
        return (
            self._tries[wish.request] < TRIES
            and jobs < self.limits.jobs_max
            and 0 < wish.size_bytes <= self.limits.bytes_max - self.in_flight_bytes
        )

    def went(self, request: int, node: str | None) -> list[Cancel]:
        """A request waits no more: it has the engine of a node, or has left (None)."""
        number = self._of_request.get(request)
        stays = number is not None and self._carried[number].wish.node == node
        effects = [] if stays else self._cancel(request)
        self._of_request.pop(request, None)
        del self._tries[request]
        return effects

    def _cancel(self, request: int) -> list[Cancel]:
        number = self._of_request.pop(request, None)
        if number is None:
            return []
        self._carried[number].cancelled = True
        return [Cancel(number)]

    def ended(self, number: int) -> None:
        """A wish is carried out, or could not be; its bytes count no more."""
        wish = self._carried.pop(number).wish
        if self._of_request.get(wish.request) == number:
            del self._of_request[wish.request]

    def check(self) -> None:
        """Assert the invariants."""
        assert self.in_flight_bytes <= self.limits.bytes_max
        jobs = Counter(one.wish.source for one in self._carried.values())
        assert all(count <= self.limits.jobs_max for count in jobs.values())
        for request, number in self._of_request.items():
            assert self._carried[number].wish.request == request
            assert not self._carried[number].cancelled
        assert all(0 < tries <= TRIES for tries in self._tries.values())


def likely(bound: str, found: Mapping[str, Prefix], loads: Mapping[str, float]) -> str:
    """The engine that will most likely compute a prompt; empty = there is none.

    Args:
        bound: the engine for which the request waits; empty = none was chosen.
        found: its prefix at each engine.
        loads: of the engines that can compute it, with the part of their places that is taken.
    """
    if bound in loads:
        return bound
    return max(
        loads, key=lambda one: (found.get(one, NO_PREFIX).usable, -loads[one], one), default=""
    )


@dataclass(slots=True)
class _Heat:
    """A prefix: its rate at a time, and how many nodes were to have it."""

    count: float = 0.0
    at: float = 0.0
    copies: int = 1


class HotPrefixes:
    """The rates of prefixes, and how many nodes should have them.

    Args:
        rate: requests per second from which on two nodes should have a prefix; three from twice as
            many on, and so forth.
        copies_max: maximum nodes.
    """

    def __init__(self, rate: float, copies_max: int) -> None:
        assert rate > 0
        self._rate = rate
        self._copies_max = copies_max
        self._heat: OrderedDict[int, _Heat] = OrderedDict()

    def came(self, keys: Words, now: float) -> tuple[int, int]:
        """Count an arriving request.

        Args:
            keys: a chain value for each leading page of its prompt.
            now: time, seconds.

        Returns:
            Pages of its longest prefix of which more nodes should have a copy than before, and how
            many nodes; (0, 0) if there is none. Prefixes of 1, 2, 4 … pages are examined.
        """
        found = (0, 0)
        pages = 1
        while pages <= len(keys):
            copies = self._warm(int(keys[pages - 1]), now)
            if copies:
                found = (pages, copies)
            pages *= 2
        return found

    def _warm(self, key: int, now: float) -> int:
        """One more request with a prefix; returns how many nodes are to have it, if more are."""
        one = self._heat.setdefault(key, _Heat(at=now))
        self._heat.move_to_end(key)
        if len(self._heat) > PREFIXES_MAX:
            self._heat.popitem(last=False)
        cooled = one.count * 0.5 ** (max(0.0, now - one.at) / HALF_S)
        while one.copies > 1 and self._rate_of(cooled) < self._from(one.copies) / 2:
            one.copies -= 1
        one.count, one.at = cooled + 1.0, now
        before = one.copies
        while one.copies < self._copies_max and self._rate_of(one.count) >= self._from(
            one.copies + 1
        ):
            one.copies += 1
        return one.copies if one.copies > before else 0

    def _from(self, copies: int) -> float:
        """The rate from which on ``copies`` nodes should have a prefix."""
        return float(self._rate * 2.0 ** (copies - 2))

    @staticmethod
    def _rate_of(count: float) -> float:
        """Requests a second that would keep a count as it is."""
        return count * log(2) / HALF_S

    def check(self) -> None:
        """Assert the invariants."""
        assert len(self._heat) <= PREFIXES_MAX
        assert all(1 <= one.copies <= self._copies_max for one in self._heat.values())
