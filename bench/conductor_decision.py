"""One decision of the Conductor on a prompt of 131,072 tokens, while the index is written to."""

import asyncio
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Final, NamedTuple

from bench.index_feed import MODEL, SPACE, Lines, feed
from bench.index_fleet import (
    DECODE_ENGINES,
    NODES,
    PAGE_TOKENS,
    PREFILL_ENGINES,
    Fleet,
    tokens,
)
from bench.index_ours import Cores, LastBlocks, OurIndex
from conductor.costs.book import CostBook
from conductor.routing.choices import Assign
from conductor.routing.decisions import DecisionLog
from conductor.routing.dispatcher import Dispatcher
from conductor.routing.engines import EngineInfo, EngineRegistry, Role
from conductor.routing.policy import POLICIES
from conductor.routing.prefixes import PrefixView
from conductor.routing.requests import DispatchLimits, Request
from conductor.routing.scheduler import Scheduler
from kvstore.index.face import PrefixIndex
from kvstore.process.collector import look_seldom

BLOCKS_PER_S: Final = 100_000
POLICY: Final = "earliest-first-token"
"""With all terms: queue, fetch, prefill, handoff, and time between tokens."""
_BLOCKS: Final = 128
"""In each message."""
_MODEL: Final = MODEL.removeprefix("model:")
_ROUTE: Final = "/v1/completions"
_ENGINES: Final = PREFILL_ENGINES + DECODE_ENGINES
_KEPT: Final = 4_096
_PIECE: Final = 4_096
"""Messages that are on their way to the index at a time; twice as many at most."""


class Decided(NamedTuple):
    """Milliseconds of decisions.

    Attributes:
        known: with the prompt's keys at hand.
        known_cpu: CPU time of these decisions.
        entry_cpu: how much of it the entry in the log takes, packed and with all terms.
        of_tokens: hashing included.
        of_tokens_cpu: CPU time of these decisions.
        peer: decisions of another program by ``hashes`` and from ``tokens``; none if it was not
            asked.
        blocks_per_s: blocks a second that were written meanwhile.
        held: decisions that chose no pair.
    """

    known: list[float]
    known_cpu: list[float]
    entry_cpu: list[float]
    of_tokens: list[float]
    of_tokens_cpu: list[float]
    peer: dict[str, list[float]]
    blocks_per_s: float
    held: int


class Took(NamedTuple):
    """Milliseconds of one decision.

    Attributes:
        wall: that passed.
        cpu: of CPU time.
        entry_cpu: of these, for the entry in the log.
    """

    wall: float
    cpu: float
    entry_cpu: float


class Decider:
    """What the Conductor has for a decision: engines, index, dispatcher and log."""

    def __init__(self, index: PrefixIndex, fleet: Fleet) -> None:
        """Register 64 prefill and 64 decode engines; a node has one of each."""
        registry = EngineRegistry()
        nodes = [f"node-{at}" for at in range(NODES)]
        engines = [one.name.removeprefix("engine/") for one in fleet.workers()[:_ENGINES]]
        for at, name in enumerate(engines):
            role = Role.PREFILL if at < PREFILL_ENGINES else Role.DECODE
            node = nodes[at % NODES]
            peers = tuple(sorted(one for one in nodes if one != node))
            registry.register(_engine(name, role, node, peers), 0.0)
        policy = POLICIES[POLICY]
        self.prefixes = PrefixView(index, registry, needed=policy.needs_prefixes)
        limits = DispatchLimits(100, 1e9, 3)
        self._dispatcher = Dispatcher(registry, Scheduler(policy), limits, CostBook())
        self._log = DecisionLog(_KEPT)
        self._tokens = tokens(fleet.document()).ravel()
        self._number = 0
        self.held = 0

    def of_tokens(self) -> Took:
        """Decide once, hashing included."""
        return self._decided(hashed=False)

    def known(self) -> Took:
        """The same with the keys of the prompt at hand."""
        return self._decided(hashed=True)

    def _decided(self, *, hashed: bool) -> Took:
        self._number += 1
        number, prefixes = self._number, self.prefixes
        if hashed:
            self._remember(number)
            prefixes.keys(number, _MODEL)
            prefixes.find(number, _MODEL)
        began, cpu_began = time.perf_counter(), time.thread_time()
        if not hashed:
            self._remember(number)
        held = self._decide(number, began)
        decision = self._log.get(str(number))
        assert decision is not None
        cpu_decided = time.thread_time()
        self._log.ended(decision)
        wall, cpu_ended = time.perf_counter() - began, time.thread_time()
        took = Took(1e3 * wall, 1e3 * (cpu_ended - cpu_began), 1e3 * (cpu_ended - cpu_decided))
        self.held += held
        self._dispatcher.left(number, began)
        prefixes.forget(number)
        return took

    def _remember(self, number: int) -> None:
        self.prefixes.remember(number, self._tokens, "", _MODEL)  # type: ignore[arg-type] # array

    def _decide(self, number: int, now: float) -> bool:
        """What the front and the queue do until the request goes; whether no pair was chosen."""
        dispatcher, prefixes = self._dispatcher, self.prefixes
        decision = self._log.open(
            str(number), _ROUTE, _MODEL, POLICY, stream=True, at=datetime.now(UTC)
        )
        keys = prefixes.keys(number, _MODEL)
        dispatcher.arrive(
            Request(number=number, model=_MODEL, arrived=now, tokens=len(self._tokens), keys=keys)
        )
        for one, model in dispatcher.due(now):
            dispatcher.learn(one, prefixes.find(one, model))
        for effect in dispatcher.step(now):
            if isinstance(effect, Assign):
                decision.attempted(effect, 0.0)
                return False
        return True

    def some(self) -> bool:
        """Whether every engine has a part of the prompt, and every node."""
        self._number += 1
        self._remember(self._number)
        found = self.prefixes.find(self._number, _MODEL)
        self.prefixes.forget(self._number)
        return bool(found) and all(one.local and one.node and one.usable for one in found.values())


def _engine(name: str, role: Role, node: str, peers: tuple[str, ...]) -> EngineInfo:
    return EngineInfo(
        id=name, role=role, url="http://x", model=_MODEL, page_tokens=PAGE_TOKENS, domain=SPACE,
        spaces=(SPACE,), node=node, peers=peers, max_running=64, shape="llama3-70b",
        hardware="8xh800",
    )  # fmt: skip


def decided(
    pages: int,
    seconds: float,
    note: Callable[[str], None],
    peer: Callable[[], Lines] | None = None,
) -> Decided:
    """Fill an index with so many pages, and decide while it is written to.

    Args:
        pages: of all workers.
        seconds: for each case.
        note: tells what goes on.
        peer: starts Dynamo, which decides afterwards on the same events; None = it does not.

    Raises:
        FeedError: the index does not become ready.
    """
    cores, mine = Cores.present(), os.sched_getaffinity(0)
    with feed(cores.others) as publisher:
        end = look_seldom()  # as the Conductor does
        os.sched_setaffinity(0, cores.others or mine)  # the index has the other core
        try:
            ours = asyncio.run(_measured(publisher, pages, seconds, note))
            if peer is None:
                return ours
            note(f"{pages * _ENGINES // (_ENGINES + NODES):,} pages come in at Dynamo")
            with peer() as dynamo:
                return ours._replace(peer=_of_peer(publisher, dynamo, pages, seconds))
        finally:
            os.sched_setaffinity(0, mine)
            end()


def _fleets(pages: int, seconds: float) -> tuple[Fleet, Fleet]:
    """What is there, and what is written meanwhile."""
    fleet = Fleet(_ENGINES, NODES, pages, shared=True)
    enough = int(BLOCKS_PER_S * (2 * seconds + 2))
    return fleet, fleet._replace(pages=enough, shared=False, seed=1)


def _of_peer(publisher: Lines, dynamo: Lines, pages: int, seconds: float) -> dict[str, list[float]]:
    """Milliseconds in which Dynamo chooses an engine; it knows engines only."""
    fleet, written = _fleets(pages, seconds)
    engines = fleet._replace(nodes=0, pages=pages // len(fleet.workers()) * _ENGINES)
    publisher.pin(Cores.present().others)
    endpoints = publisher.ask("open", fleet=fleet)
    dynamo.ask("follow", endpoints=[events for events, _ in endpoints[:_ENGINES]])
    publisher.ask("wait_subscribed", workers=_ENGINES)
    publisher.ask("make", fleet=written, blocks=_BLOCKS)
    publisher.ask("stream", fleet=engines, blocks=_BLOCKS)
    dynamo.ask("visible", fleet=engines)
    publisher.ask("steady", rate=BLOCKS_PER_S / _BLOCKS)
    found: dict[str, list[float]] = dynamo.ask("select", fleet=engines, seconds=seconds)
    publisher.ask("stop")
    return found


async def _measured(
    publisher: Lines, pages: int, seconds: float, note: Callable[[str], None]
) -> Decided:
    fleet, written = _fleets(pages, seconds)

    async def ask(do: str, **arguments: object) -> object:
        return await asyncio.to_thread(publisher.ask, do, **arguments)

    async with OurIndex(fleet.pages + written.pages) as ours:
        endpoints = publisher.ask("open", fleet=fleet)
        ours.follow(fleet.workers(), [[events] for events, _ in endpoints])
        await ask("wait_subscribed", workers=len(fleet.workers()))
        await ask("make", fleet=written, blocks=_BLOCKS)
        note(f"{pages:,} pages come in first")
        await ask("begin", fleet=fleet, blocks=_BLOCKS)
        sent = 0
        while piece := await ask("piece", most=_PIECE):
            assert isinstance(piece, int)
            sent += piece
            await ours.wait_seen(partial(_applied, ours.index, sent - _PIECE))
        await ours.wait_seen(LastBlocks(await ours.table(), fleet).seen)
        decider = Decider(ours.index, fleet)
        await ours.wait_seen(decider.some)
        publisher.pin(Cores.present().indexer)  # who decides has the other core to itself
        await ask("steady", rate=BLOCKS_PER_S / _BLOCKS)
        known = await _times(decider.known, seconds)
        of_tokens = await _times(decider.of_tokens, seconds)
        rate = await ask("stop")
        assert isinstance(rate, float)
    wall, cpu, entry_cpu = zip(*known, strict=True)
    tokens_wall, tokens_cpu, _ = zip(*of_tokens, strict=True)
    return Decided(
        [*wall], [*cpu], [*entry_cpu], [*tokens_wall], [*tokens_cpu], {}, rate * _BLOCKS,
        decider.held,
    )  # fmt: skip


def _applied(index: PrefixIndex, messages: int) -> bool:
    """Whether so many messages have been applied, all workers together."""
    return sum(one.batches for one in index.present().report.workers) >= messages


async def _times(decide: Callable[[], Took], seconds: float) -> list[Took]:
    """Times of decisions, each in a turn of our loop."""
    times, until = list[Took](), time.monotonic() + seconds
    while time.monotonic() < until:
        times.append(decide())
        await asyncio.sleep(0)
    return times
