"""Goodput: the highest rate of requests of which nearly all are served in time (DistServe)."""

from collections.abc import Callable
from typing import Final, NamedTuple

ATTAINED: Final = 0.9
"""Part of the requests that must be effective."""
PRECISION: Final = 0.02
SPEED_MAX: Final = 1024.0
SPEED_MIN: Final = 1 / 1024
_STEP: Final = 1.05
"""Ratio of two successive speeds of a search from above."""


class Highest(NamedTuple):
    """The highest speed found, and the part of the requests that was effective there.

    Attributes:
        speed: 0 = none is slow enough.
        effective: at that speed.
    """

    speed: float
    effective: float


def highest_speed(
    effective: Callable[[float], float], first: float = 1.0, precision: float = PRECISION
) -> Highest:
    """Search the highest speed at which :data:`ATTAINED` of the requests are effective.

    It doubles or halves the speed until the limit lies between two, and then halves the distance.
    If the part rises and falls, it is the limit of one fall.

    Args:
        effective: simulates a speed, returns the part of the requests that is effective.
        first: speed to begin with, more than 0.
        precision: by which part the result may be too low, more than 0.
    """
    assert first > 0
    assert precision > 0
    good, bad = Highest(0.0, 0.0), 0.0
    speed = first
    while SPEED_MIN <= speed <= SPEED_MAX and not (good.speed and bad):
        part = effective(speed)
        if part >= ATTAINED:
            good, speed = Highest(speed, part), speed * 2
        else:
            bad, speed = speed, speed / 2
    return _between(effective, good, bad, precision) if good.speed and bad else good


def highest_up_to(
    effective: Callable[[float], float],
    top: float,
    floor: float = SPEED_MIN,
    precision: float = PRECISION,
) -> Highest:
    """Search the highest speed likewise where the part rises and falls: step by step, from above.

    Args:
        effective: as for :func:`highest_speed`.
        top: speed to begin with.
        floor: lower speeds are not of interest; more than 0.
        precision: as for :func:`highest_speed`.
    """
    bad, speed = 0.0, top
    while speed >= floor:
        part = effective(speed)
        if part >= ATTAINED:
            return _between(effective, Highest(speed, part), bad or speed, precision)
        bad, speed = speed, speed / _STEP
    return Highest(0.0, 0.0)


def _between(
    effective: Callable[[float], float], good: Highest, bad: float, precision: float
) -> Highest:
    """Halve the distance between a speed that is slow enough and one that is not."""
    while bad / good.speed > 1 + precision:
        speed = (good.speed * bad) ** 0.5
        part = effective(speed)
        if part >= ATTAINED:
            good = Highest(speed, part)
        else:
            bad = speed
    return good
