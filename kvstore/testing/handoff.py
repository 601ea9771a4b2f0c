"""Handoffs between prefill and decode engines in one thread: simulated clock, network and deaths.

The cores (``kvstore.handoff.sending`` and ``receiving``), the plans of ranks, the digests and the
places in pools are the product's; engines, links and the conductor are simulated. Engines have one
or several ranks, whose layers and heads are split in unequal ways. Messages and ranges are lost,
late, doubled and overtake each other, which TCP would not do; ranges land piece by piece, also in a
stopped process and after their link was closed. Processes of one rank, or of all, are stopped and
killed. Pools are real memory: every block that decode counts on is compared with what follows from
its request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvstore.handoff.ranks import RankPart
from kvstore.handoff.rooms import RoomNumbers
from kvstore.testing.handoff_engines import (
    OTHER_PROMPT,
    PATIENCE,
    STEP_NS,
    DecodeEngine,
    PrefillEngine,
    RankProcess,
)
from kvstore.testing.handoff_memory import HEADS, LAYERS
from kvstore.testing.handoff_processes import SECOND, HandoffOutcome
from kvstore.testing.handoff_registry import RegistryProcess
from kvstore.testing.handoff_wires import HandoffWires
from kvstore.testing.timeline import FaultRates, Timeline

_DEATH_NS: Final = SECOND // 2
"""Until an engine ends of which one rank has died."""


def parts_of(layers: Sequence[int], heads: Sequence[int], copies: int = 1) -> tuple[RankPart, ...]:
    """The ranks of an engine whose layers and heads are split at these numbers."""
    return tuple(
        RankPart((layers[stage], layers[stage + 1]), (heads[at], heads[at + 1]))
        for stage in range(len(layers) - 1)
        for at in range(len(heads) - 1)
        for _ in range(copies)
    )


WHOLE: Final = parts_of((0, LAYERS), (0, HEADS))
STAGES: Final = parts_of((0, 1, LAYERS), (0, HEADS))
SPLITS: Final = (
    (WHOLE, WHOLE),
    (parts_of((0, LAYERS), (0, 1, HEADS)), WHOLE),
    (STAGES, STAGES),
    (WHOLE, parts_of((0, LAYERS), (0, 3, HEADS))),
    (parts_of((0, LAYERS), (0, HEADS), 3), parts_of((0, LAYERS), (0, 2, HEADS))),
    (STAGES, parts_of((0, LAYERS), (0, 2, HEADS))),
    (parts_of((0, LAYERS), (0, 2, HEADS)), parts_of((0, LAYERS), (0, 1, 3, HEADS))),
    (parts_of((0, LAYERS), (0, 2, HEADS), 2), STAGES),
)
"""What the ranks of prefill and of decode hold. Where it is the same there is state data, too."""


@dataclass(frozen=True)
class HandoffFaults:
    """Probabilities of faults, for each message or each step.

    Attributes:
        lost: a message or head of ranges is lost.
        doubled: it comes twice.
        flipped: one byte of some ranges is another one.
        misplaced: a range is sent with the number of another position.
        stalled: pieces of some ranges land very late.
        hung: a job of prefill begins seconds after it was submitted.
        aborted: an engine gives a request up, in each of its steps.
        careless: a prefill engine gives all blocks away before the handoff has ended.
        trouble: in each step, a process is stopped or killed, or a pair is cut off.
    """

    lost: float = 0.004
    doubled: float = 0.01
    flipped: float = 0.01
    stalled: float = 0.02
    hung: float = 0.004
    misplaced: float = 0.01
    aborted: float = 0.003
    careless: float = 0.02
    trouble: float = 0.03


class HandoffSimulation:
    """One seeded history of two prefill and two decode engines.

    Args:
        seed: determines all random choices.
        faults: fault rates.
        parts: what each rank of prefill and of decode holds.

    Attributes:
        outcome: counts so far.
        is_stateful: whether the engines have state data.
    """

    def __init__(
        self, seed: int, faults: HandoffFaults | None = None,
        parts: tuple[Sequence[RankPart], Sequence[RankPart]] = (WHOLE, WHOLE),
    ) -> None:  # fmt: skip
        self._parts = parts
        self.is_stateful = set(parts[0]) == set(parts[1])
        self.time = Timeline(seed, FaultRates())
        self.faults = faults or HandoffFaults()
        self.outcome = HandoffOutcome()
        self.wires = HandoffWires(
            self.time,
            self.faults,
            self.outcome,
            lambda name, rank: self._prefill[name].ranks[rank],
            lambda name: self.registry_of(name).listed,
        )
        self._registries = {
            name: RegistryProcess(self.time, name, self.outcome) for name in ("r0", "r1")
        }
        self._prefill = {name: PrefillEngine(self, name, parts[0]) for name in ("p0", "p1")}
        self._decode = {name: DecodeEngine(self, name, parts[1]) for name in ("d0", "d1")}
        self._rooms = RoomNumbers(self.time.random.getrandbits(31))
        self._quiet = False

    def run(self, seconds: float) -> HandoffOutcome:
        """Run for this much simulated time, let everything heal and end, and check that it has.

        Raises:
            AssertionError: a wrong byte counted, a request was late, or something is still held.
        """
        end_ns = self.time.now_ns + int(seconds * SECOND)
        self.time.at(0, self._step)
        self.time.pass_until(end_ns)
        self._quiet = True
        self.wires.heal()
        last_ns = end_ns + int(PATIENCE.total_s * SECOND) + 12 * SECOND
        while self.time.now_ns < last_ns and not self._is_idle():
            self.time.pass_until(self.time.now_ns + SECOND)
        self._check_the_end()
        return self.outcome

    @property
    def _engines(self) -> dict[str, PrefillEngine | DecodeEngine]:
        return {**self._prefill, **self._decode}

    def registry_of(self, prefill: str) -> RegistryProcess:
        """The registry of a prefill instance."""
        return self._registries[prefill.replace("p", "r")]

    def _step(self) -> None:
        random = self.time.random
        if not self._quiet:
            if random.random() < 0.35:
                self._request()
            if random.random() < self.faults.trouble:
                self._trouble()
        for engine in self._engines.values():
            for rank in engine.ranks:
                if not (rank.dead or rank.is_stopped):
                    rank.tick()
            if not (engine.dead or engine.is_stopped):
                engine.step()
        self.wires.tick()
        self.time.at(STEP_NS, self._step)

    def _request(self) -> None:
        """Send one request to both sides, perhaps to one only, perhaps twice."""
        random = self.time.random
        prefill = self._prefill[random.choice(["p0", "p1"])]
        decode = self._decode[random.choice(["d0", "d1"])]
        room, tokens = self._rooms.draw(), random.randrange(1, random.choice([9, 40]))
        peer = prefill.name
        content = room ^ (OTHER_PROMPT if random.random() < 0.03 else 0)
        for again in range(1 + (random.random() < 0.05)):
            delay_ns = random.randrange(SECOND // 5 + 3 * SECOND * again)
            if random.random() > 0.03:
                begin = partial(prefill.begin, room, tokens, content)
                self.time.at(delay_ns, partial(prefill.in_next_step, begin))
            delay_ns = random.randrange(SECOND // 5)
            if random.random() > 0.03:
                begin = partial(decode.begin, room, tokens, peer, room)
                self.time.at(delay_ns, partial(decode.in_next_step, begin))
        self.outcome.requests += 1

    def _trouble(self) -> None:
        random = self.time.random
        name = random.choice(["d0", "d1", "p0", "p1", "r0", "r1"])
        what = random.choice(["kill", "stop", "stop", "cut"])
        if what != "cut" and name in self._registries:
            self._trouble_registry(name, kill=what == "kill")
        elif what == "cut":
            self.outcome.partitions += 1
            prefill, decode = self._some("p0", "p1"), self._some("d0", "d1")
            for_ns = random.randrange(SECOND // 2, 5 * SECOND)
            for one in prefill:
                for other in decode:
                    self.wires.cut(one.name, other.name, for_ns)
        else:
            ranks = self._some(name)
            self.outcome.alone += len(ranks) < len(self._parts[name[0] == "d"])
            if what == "kill":
                self._kill(name, ranks)
            else:
                self.outcome.stopped += 1
                for_ns = random.randrange(SECOND // 2, 6 * SECOND)
                for rank in ranks:
                    rank.stop(for_ns)

    def _some(self, *names: str) -> Sequence[RankProcess]:
        """One rank of one of these engines, or all: a process, or the machine."""
        ranks: Sequence[RankProcess]
        ranks = self._engines[self.time.random.choice(names)].ranks
        return ranks if self.time.random.random() < 0.3 else [self.time.random.choice(ranks)]

    def _kill(self, name: str, ranks: Sequence[RankProcess]) -> None:
        """Kill some ranks; the others notice it, and end, a little later."""
        self.outcome.killed += 1
        for rank in ranks:
            if not rank.dead:
                rank.kill()
                self.wires.died(rank)
        delay_ns = self.time.random.randrange(_DEATH_NS)
        self.time.at(delay_ns, partial(self._start_again, self._engines[name]))

    def _start_again(self, engine: PrefillEngine | DecodeEngine) -> None:
        """All ranks of an engine end, and another one starts in its place."""
        if self._engines[engine.name] is not engine:
            return
        for rank in engine.ranks:
            if not rank.dead:
                rank.kill()
                self.wires.died(rank)
        if isinstance(engine, PrefillEngine):
            self._prefill[engine.name] = PrefillEngine(self, engine.name, self._parts[0])
        else:
            self._decode[engine.name] = DecodeEngine(self, engine.name, self._parts[1])

    def _trouble_registry(self, name: str, *, kill: bool) -> None:
        if kill:
            self._registries[name].kill()
            self._registries[name] = RegistryProcess(self.time, name, self.outcome)
        else:
            self._registries[name].stop(self.time.random.randrange(SECOND // 2, 6 * SECOND))

    def _is_idle(self) -> bool:
        """Whether every engine runs, and has nothing to do."""
        engines = self._engines.values()
        stand = any(one.dead or one.is_stopped or not one.is_idle for one in engines)
        return not stand and not self.wires.under_way

    def _check_the_end(self) -> None:
        for engine in self._engines.values():
            engine.step()
            left = list(engine.prompts)
            assert not left, f"{engine.name} has not ended rooms {left}"
            assert engine.is_idle
            assert engine.memory.is_free, f"{engine.name} has lost blocks"
        for decode in self._decode.values():
            for rank in decode.ranks:
                assert not rank.receivers.limbo()
                assert not rank.receivers.describe(self.time.now_ns)
                assert len(rank.receivers.free_slots) == rank.aux.count, "an aux slot is lost"


def drawn_handoffs(seed: int) -> HandoffSimulation:
    """One of many histories, with several ranks, without faults of the network, or many aborts."""
    faults = [
        HandoffFaults(),
        HandoffFaults(lost=0, doubled=0, flipped=0),
        HandoffFaults(aborted=0.02, trouble=0.01),
        HandoffFaults(trouble=0.1, stalled=0.1),
    ]
    parts = SPLITS[seed // len(faults) % len(SPLITS)]
    return HandoffSimulation(seed, faults[seed % len(faults)], parts)
