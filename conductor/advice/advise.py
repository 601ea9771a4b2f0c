"""Estimates how one engine more, fewer, or in another role would change goodput. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Final

import msgspec

from conductor.routing.capacity import EngineKind, FleetRates, Needs, Targets, capacity
from conductor.routing.engines import Role
from conductor.routing.recent import LoadShape

SAMPLES_MIN: Final = 16
"""With fewer requests that have ended, nothing is advised."""
SHORT_MAX: Final = 64
"""More engines than this are not counted."""
KINDS_MAX: Final = 16
"""Of each role, the most frequent hardware first: what bounds the work."""
_WORTH: Final = 1.02
"""A change of roles that gives less than so many times the goodput is not advised."""
_PLACES: Final = 256
"""Of an engine that would decode, if no other does."""


class Change(msgspec.Struct, frozen=True):
    """One change of a fleet, and what it would serve then.

    Attributes:
        change: ``more``, ``fewer`` or ``flip``.
        role: role that an engine gets, or loses if there are fewer.
        hardware: hardware of this engine.
        was: role of the engine before a flip; otherwise empty.
        rate: requests a second that would be served in time.
        goodput: the same for each engine.
        gain: ``rate`` as a multiple of the present one; 0 = nothing is served now.
    """

    change: str
    role: Role
    hardware: str
    was: str
    rate: float
    goodput: float
    gain: float


class Shortage(msgspec.Struct, frozen=True):
    """Engines that are missing for the present load.

    Attributes:
        role: theirs.
        hardware: of which so many are missing.
        engines: how many; :data:`SHORT_MAX` = so many or more.
    """

    role: Role
    hardware: str
    engines: int


class Advice(msgspec.Struct, frozen=True):
    """What is advised.

    Attributes:
        rate: requests a second that came lately.
        served: requests a second that the fleet could serve in time.
        goodput: the same for each engine.
        prefill: requests a second whose prompts it could compute in time.
        decode: requests a second that it could decode in time.
        limit: the role that limits it: ``prefill``, ``decode`` or, of mixed engines alone,
            ``mixed``.
        short: what is missing, by hardware; empty if the fleet serves what comes.
        flip: the best change of one engine's role; None if none is worth it.
        changes: all that were looked at.
        reason: why nothing is advised; empty if something is.
    """

    rate: float
    served: float = 0.0
    goodput: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    limit: str = ""
    short: tuple[Shortage, ...] = ()
    flip: Change | None = None
    changes: tuple[Change, ...] = ()
    reason: str = ""


def advise(kinds: Sequence[EngineKind], load: LoadShape, targets: Targets) -> Advice:
    """Look at a fleet.

    Args:
        kinds: engines of the fleet by kind; engines of one role and hardware are one kind.
        load: what came lately.
        targets: objectives of the requests.
    """
    if len(load.samples) < SAMPLES_MIN:
        seen = f"{len(load.samples)} requests have ended, {SAMPLES_MIN} are needed"
        return Advice(load.rate, reason=seen)
    kinds = _most(kinds)
    if not kinds:
        return Advice(load.rate, reason="there are no engines")
    needs = Needs(load.samples)
    now = capacity(kinds, needs, targets)
    changes = [_change(one, needs, targets, now.both) for one in _fleets(kinds)]
    flips = [one for one in changes if one.change == "flip"]
    flip = max(flips, key=lambda one: one.rate, default=None)
    if flip is not None and flip.rate <= _WORTH * now.both:
        flip = None
    limit = _limit(kinds, now)
    return Advice(
        rate=load.rate,
        served=now.both,
        goodput=now.both / _count(kinds),
        prefill=now.prefill,
        decode=now.decode,
        limit=str(limit),
        short=_shortages(kinds, limit, load.rate, needs, targets) if now.both < load.rate else (),
        flip=flip,
        changes=tuple(changes),
    )


def _most(kinds: Sequence[EngineKind]) -> list[EngineKind]:
    """The kinds with the most engines."""
    found: list[EngineKind] = []
    for role in Role:
        mine = [one for one in kinds if one.role is role and one.count]
        found += sorted(mine, key=lambda one: (-one.count, one.hardware))[:KINDS_MAX]
    return found


def _count(kinds: Sequence[EngineKind]) -> int:
    return sum(one.count for one in kinds)


def _limit(kinds: Sequence[EngineKind], now: FleetRates) -> Role:
    if all(one.role is Role.MIXED for one in kinds):
        return Role.MIXED
    return Role.PREFILL if now.prefill <= now.decode else Role.DECODE


def _like(kinds: Sequence[EngineKind], role: Role, hardware: str) -> EngineKind:
    """Engines of a hardware that is there, in a role, none yet."""
    for one in kinds:
        if (one.role, one.hardware) == (role, hardware):
            return one
    known = next(one for one in kinds if one.hardware == hardware)
    places = max((one.places for one in kinds if one.role is not Role.PREFILL), default=_PLACES)
    return replace(known, role=role, places=places, count=0)


def _with(kinds: Sequence[EngineKind], kind: EngineKind, more: int) -> list[EngineKind]:
    """The fleet with so many more of a kind."""
    others = [one for one in kinds if (one.role, one.hardware) != (kind.role, kind.hardware)]
    return [*others, replace(kind, count=kind.count + more)]


_Fleet = tuple[str, EngineKind, str, list[EngineKind]]
"""A change, the kind that has one more or fewer, its role before, and the fleet then."""


def _fleets(kinds: Sequence[EngineKind]) -> list[_Fleet]:
    """Every change of one engine."""
    roles = [role for role in Role if any(one.role is role for one in kinds)]
    hardware = list(dict.fromkeys(one.hardware for one in kinds))
    found: list[_Fleet] = []
    for role in roles:
        for name in hardware:
            kind = _like(kinds, role, name)
            found.append(("more", kind, "", _with(kinds, kind, 1)))
            if kind.count:
                found.append(("fewer", kind, "", _with(kinds, kind, -1)))
    for was, role in permutations(roles, 2):
        for one in kinds:
            if one.role is was:
                kind = _like(kinds, role, one.hardware)
                fleet = _with(_with(kinds, one, -1), kind, 1)
                found.append(("flip", kind, str(was), fleet))
    return found


def _change(change: "_Fleet", needs: Needs, targets: Targets, now: float) -> Change:
    what, kind, was, fleet = change
    rate = capacity(fleet, needs, targets).both
    count = _count(fleet)
    return Change(
        what, kind.role, kind.hardware, was, rate, rate / count if count else 0.0,
        rate / now if now else 0.0,
    )  # fmt: skip


def _shortages(
    kinds: Sequence[EngineKind], role: Role, rate: float, needs: Needs, targets: Targets
) -> tuple[Shortage, ...]:
    """How many more of each hardware the role would need."""
    found: list[Shortage] = []
    for name in dict.fromkeys(one.hardware for one in kinds):
        kind, low, high = _like(kinds, role, name), 0, SHORT_MAX
        while high - low > 1:
            middle = (low + high) // 2
            then = capacity(_with(kinds, kind, middle), needs, targets)
            if (then.decode if role is Role.DECODE else then.prefill) >= rate:
                high = middle
            else:
                low = middle
        found.append(Shortage(role, name, high))
    return tuple(found)
