"""Load over time: samples, as columns of JSON and as a plot."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Final, NamedTuple

import msgspec

from conductor.routing.engines import Role
from conductor.simulator.batching import BatchEngine

_WIDTH: Final = 960
_HEIGHT: Final = 320
_COLOURS: Final = ("#c0392b", "#2471a3", "#1e8449", "#7d3c98", "#b9770e")


class EngineLoad(NamedTuple):
    """What an engine did up to now, and does now.

    Attributes:
        prompt_s: seconds in which it computed prompts, since the start.
        waiting: requests there that wait, or whose prompt is computed.
        batch: requests that decode.
        reserved: tokens of KV that requests hold.
    """

    prompt_s: float
    waiting: int
    batch: int
    reserved: int

    @classmethod
    def of(cls, engine: BatchEngine, now: float) -> "EngineLoad":
        """Its load, the present stretch included."""
        return cls(engine.prompt_s(now), engine.waiting, engine.batch, engine.reserved)


class Sample(NamedTuple):
    """The load at one time: requests that wait for an engine, and each engine."""

    at: float
    waiting: int
    engines: Mapping[str, EngineLoad]


class Series(msgspec.Struct):
    """Load over time in columns, all of the same length; a value for each sample but the first.

    Attributes:
        at_s: time.
        waiting: requests that wait for an engine.
        prefill: part of the time since the sample before in which engines that prefill computed
            prompts, mean; empty without such engines.
        decode: requests that decode, as part of the places of the engines that decode.
        kv: reserved room for KV, as part of the room of the engines that decode.
    """

    at_s: list[float] = []
    waiting: list[int] = []
    prefill: list[float] = []
    decode: list[float] = []
    kv: list[float] = []

    def until(self, at_s: float) -> "Series":
        """Its part up to a time: without the end, when nobody comes any more."""
        size = bisect_right(self.at_s, at_s)
        return Series(*(getattr(self, name)[:size] for name in self.__struct_fields__))


class Capacity(NamedTuple):
    """What the load of an engine is compared with."""

    role: Role
    places: int
    room_tokens: int


def series_of(samples: Sequence[Sample], engines: Mapping[str, Capacity]) -> Series:
    """The load of a fleet."""
    first = [name for name, one in engines.items() if one.role is not Role.DECODE]
    second = [name for name, one in engines.items() if one.role is not Role.PREFILL]
    places = sum(engines[name].places for name in second)
    room = sum(engines[name].room_tokens for name in second)
    found = Series()
    for before, now in pairwise(samples):
        seconds = now.at - before.at
        busy = sum(now.engines[name].prompt_s - before.engines[name].prompt_s for name in first)
        found.at_s.append(now.at)
        found.waiting.append(now.waiting)
        found.prefill.append(busy / seconds / len(first) if first else 0.0)
        found.decode.append(sum(now.engines[name].batch for name in second) / max(1, places))
        found.kv.append(sum(now.engines[name].reserved for name in second) / max(1, room))
    return found


def swing_of(column: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation of a column of load; 0 of none."""
    return (fmean(column), pstdev(column)) if column else (0.0, 0.0)


def plot(title: str, at_s: Sequence[float], columns: Mapping[str, Sequence[float]]) -> str:
    """An SVG of columns over time, each from 0 to the largest value of all."""
    top = max((max(column, default=0.0) for column in columns.values()), default=0.0) or 1.0
    end = at_s[-1] if at_s else 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT + 50}"'
        ' font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="16">{title}: 0 to {top:.3g}, over {end:.0f} s</text>',
    ]
    for (name, column), colour, number in zip(columns.items(), _COLOURS, range(5), strict=False):
        points = " ".join(
            f"{_WIDTH * at / end:.1f},{_HEIGHT + 20 - _HEIGHT * value / top:.1f}"
            for at, value in zip(at_s, column, strict=True)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        x = 8 + 180 * number
        parts.append(f'<text x="{x}" y="{_HEIGHT + 42}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])
