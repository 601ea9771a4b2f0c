"""Decisions about the loads of one engine: choosing, waiting for room, counting. Pure.

Each request has a :class:`RequestLoad`, which the caller keeps. This module holds no request, so
one may be removed at any time; a load is known by its job's number until
:meth:`LoadDecisions.ended`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.engine.load_choice import Choice, HitOffer, LoadChooser


@dataclass(slots=True)
class RequestLoad:
    """The decision for one request.

    Attributes:
        asked: the hit; None = there is no pending decision.
        choice: the choice for it.
        tiers: the tiers from which it waits to load.
        room_since: time at which the request began to wait for room.
        room_until: time at which the wait for room ends; a request waits for room once per load.
    """

    asked: HitOffer | None = None
    choice: Choice | None = None
    tiers: tuple[str, ...] = ()
    room_since: float | None = None
    room_until: float = 0.0


class LoadDecisions:
    """Chooses for the requests of one engine.

    Args:
        chooser: estimates loads and computing.
        room_wait_s: maximum seconds that a request waits for room.
        count: adds to a series of :data:`kvstore.engine.counts.SERIES`, or to a choice.
    """

    def __init__(
        self, chooser: LoadChooser, room_wait_s: float, count: Callable[[str, float], None]
    ) -> None:
        self._chooser = chooser
        self._room_wait_s = room_wait_s
        self._count = count

    def waits_for_room(self, own: RequestLoad, now: float) -> bool:
        """Whether a request must still wait for room; then its hit need not be looked up.

        Args:
            own: the decision for the request.
            now: monotonic seconds.
        """
        self._count("stuck_loads", self._chooser.costs.give_up(now))
        began = own.room_since is not None
        if not began or now >= own.room_until or self._chooser.waits_in_vain:
            return False
        return not self._chooser.has_room(own.tiers)

    def decide(self, own: RequestLoad, asked: HitOffer, now: float) -> Choice | None:
        """Choose for a request that has a hit of at least one token.

        Returns:
            The choice; None: there is no room now; call again, at the latest at ``own.room_until``.
        """
        self._count("stuck_loads", self._chooser.costs.give_up(now))
        choice = self._chooser.choose(asked, now)
        own.tiers = asked.tiers(choice.pages)
        if choice.pages and not self._chooser.has_room(own.tiers):
            if own.room_since is None:
                own.room_since = now
                own.room_until = now + min(self._room_wait_s, choice.compute_s)
                self._count("room_waits", 1)
            if now < own.room_until and not self._chooser.waits_in_vain:
                return None
            choice = choice._replace(kind="compute", reason="no_room", pages=0)
        own.asked, own.choice = asked, choice
        return choice

    def began(self, job: int, own: RequestLoad, now: float) -> None:
        """The load that was chosen for a request starts."""
        assert own.asked is not None
        assert own.choice is not None
        assert own.choice.pages, own.choice
        self._chooser.costs.began(job, own.asked.split(own.choice.pages), now)
        self._settle(own, now)

    def computes(self, own: RequestLoad, now: float) -> None:
        """A request is computed: count the choice, if there is an uncounted one."""
        if own.choice is not None and not own.choice.pages:
            self._settle(own, now)

    def late(self, job: int, now: float) -> None:
        """The request of a load stopped waiting for it."""
        self._chooser.costs.late(job, now)

    def ended(self, job: int, seconds: float, *, whole: bool) -> None:
        """A load has ended; see :meth:`LoadCosts.ended`."""
        end = self._chooser.costs.ended(job, seconds, whole=whole)
        if end is not None:
            self._count("load_expected_seconds", end.expected_s)
            self._count("load_measured_seconds", end.seconds)
            self._count("load_error_seconds", abs(end.expected_s - end.seconds))

    def _settle(self, own: RequestLoad, now: float) -> None:
        assert own.asked is not None
        assert own.choice is not None
        asked, choice = own.asked, own.choice
        self._chooser.took(asked, choice)
        self._count(f"choices_{choice.kind}_{choice.reason}", 1)
        if choice.reason == "faster":
            self._count("slower_tokens", asked.tokens - asked.gained(choice.pages))
        if own.room_since is not None:
            self._count("room_wait_seconds", min(now, own.room_until) - own.room_since)
        own.asked = own.choice = None
        own.room_since = None
