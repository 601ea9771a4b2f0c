"""The dispatcher alone: many requests wait, all engines are full, and one place comes free."""

import heapq
import time
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from conductor.routing.choices import Assign, Continue
from conductor.routing.columns import Prefix
from conductor.routing.dispatcher import Dispatcher
from conductor.routing.engines import EngineInfo, EngineRegistry, Role
from conductor.routing.policy import POLICIES
from conductor.routing.requests import DispatchLimits, Request
from conductor.routing.scheduler import Scheduler
from kvstore.index.layout import Words

ENGINES: Final = 64
"""Of each role."""
PLACES: Final = 8
WAITING: Final = 1_000
ROUNDS: Final = 300
_DOCUMENTS: Final = 64
"""Prefixes that prompts have in common."""
_TOKENS: Final = 20_000
_PAGE_TOKENS: Final = 64
_WAIT_S: Final = 1e9
_SECONDS: Final = 1.0
"""A prompt takes so long if the policy does not say."""

Running = tuple[float, int, str]
"""When a request ends, its number, and its engine."""


class Times(NamedTuple):
    """Milliseconds of some rounds: passed, and for which the thread had a core."""

    wall: list[float]
    cpu: list[float]


def scheduled(policy: str, rounds: int = ROUNDS) -> Times:
    """Times from the end of a request to what is decided then by a policy.

    A round is what the queue does: a place is released, the prefixes of who could get it are
    learned (they are at hand: looking them up is another case), and the dispatcher decides. The
    next request takes the place of the one that left the queue, outside of the time.
    """
    random = np.random.default_rng(1)
    registry = EngineRegistry()
    for role in (Role.PREFILL, Role.DECODE):
        for at in range(ENGINES):
            registry.register(_engine(f"{role}-{at}", role), 0.0)
    scheduler = Scheduler(POLICIES[policy])
    limits = DispatchLimits(WAITING + 1, _WAIT_S, 3)
    dispatcher = Dispatcher(registry, scheduler, limits)
    names = [engine.info.id for engine in registry]
    matches = [_matches(names, random) for _ in range(_DOCUMENTS)]
    keys = random.integers(1, 1 << 63, (_DOCUMENTS, _TOKENS // _PAGE_TOKENS), dtype=np.uint64)
    running: list[Running] = []
    number, now = 0, 0.0
    while len(dispatcher) < WAITING:
        number += 1
        dispatcher.arrive(_request(number, keys, now))
        _decide(dispatcher, matches, running, now)
    times = Times([], [])
    for _ in range(rounds):
        now, ended, engine = heapq.heappop(running)
        began, cpu_began = time.perf_counter(), time.thread_time()
        dispatcher.released(ended, engine, now)
        dispatcher.left(ended, now)
        _decide(dispatcher, matches, running, now)
        times.cpu.append(1e3 * (time.thread_time() - cpu_began))
        times.wall.append(1e3 * (time.perf_counter() - began))
        number += 1
        dispatcher.arrive(_request(number, keys, now))
        _decide(dispatcher, matches, running, now)
    return times


def _decide(
    dispatcher: Dispatcher,
    matches: Sequence[Mapping[str, Prefix]],
    running: list[Running],
    now: float,
) -> None:
    for number, _ in dispatcher.due(now):
        dispatcher.learn(number, matches[number % len(matches)])
    for effect in dispatcher.step(now):
        if isinstance(effect, Assign):
            seconds = effect.fetch_s + effect.prefill_s or _SECONDS
            busy_until = [end for end, _, engine in running if engine == effect.prefill]
            end = max([now, *busy_until]) + seconds
            heapq.heappush(running, (end, effect.request, effect.prefill))
        else:
            assert not isinstance(effect, Continue), "no KV arrives"
    _ = dispatcher.wake_at  # the queue asks for it each time


def _matches(names: list[str], random: np.random.Generator) -> dict[str, Prefix]:
    pages = random.integers(0, _TOKENS // _PAGE_TOKENS, (len(names), 2)) * _PAGE_TOKENS
    return {
        name: Prefix(local=local, node=node, usable=max(local, node))
        for name, (local, node) in zip(names, pages.tolist(), strict=True)
    }


def _request(number: int, documents: Words, now: float) -> Request:
    """A prompt that has a part of a document with others in common."""
    keys = documents[number % len(documents)].copy()
    keys[len(keys) * (number % 7) // 7 :] += np.uint64(number)
    session = f"s{number % 100}"
    return Request(
        number=number, model="m", arrived=now, tokens=_TOKENS, keys=keys, session=session
    )


def _engine(name: str, role: Role) -> EngineInfo:
    return EngineInfo(
        id=name, role=role, url="http://x", model="m", page_tokens=_PAGE_TOKENS, domain="d",
        max_running=PLACES,
    )  # fmt: skip
