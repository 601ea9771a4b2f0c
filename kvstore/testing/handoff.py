"""Handoffs between prefill and decode engines in one thread: simulated clock, network and deaths.

The cores (``kvstore.handoff.sending`` and ``receiving``), the digests and the places in pools are
the product's; engines, links and the conductor are simulated. Messages and ranges are lost, late,
doubled and overtake each other, which TCP would not do; ranges land piece by piece, also in a
stopped process and after their link was closed. Pools are real memory: every block that decode
counts on is compared with what follows from its request.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Final

from kvstore.errors import CapacityError, InvalidArgument
from kvstore.handoff.memory import AuxSlots
from kvstore.handoff.receiving import Receivers
from kvstore.handoff.rooms import RoomNumbers
from kvstore.handoff.sending import Senders
from kvstore.handoff.states import HandoffProgress, Patience, State
from kvstore.testing.handoff_links import (
    SECOND,
    HandoffOutcome,
    HandoffProcess,
    HandoffWires,
)
from kvstore.testing.handoff_memory import BLOCK_TOKENS, BLOCKS, LAYERS, PLANES, PoolMemory
from kvstore.testing.handoff_registry import EVERY_NS, RegistryProcess, registering
from kvstore.testing.timeline import FaultRates, Timeline

AUX_SLOTS: Final = 6
AUX_BYTES: Final = 64
PATIENCE: Final = Patience(bootstrapping_s=3, waiting_s=3, transferring_s=2, total_s=10)
_OTHER: Final = 1 << 62
"""Where the content of a prompt that was mixed up differs."""
STEP_NS: Final = SECOND // 20
_LONGEST_NS: Final = int(PATIENCE.total_s * SECOND) + SECOND
"""A handoff has ended after this time, not counting that in which its process stood."""


@dataclass(frozen=True)
class HandoffFaults:
    """Probabilities of faults, for each message or each step.

    Attributes:
        lost: a message or head of ranges is lost.
        doubled: it comes twice.
        flipped: one byte of some ranges is another one.
        misplaced: a range is sent as that of another position.
        stalled: pieces of some ranges land very late.
        aborted: an engine gives a request up, in each of its steps.
        careless: a prefill engine gives all blocks away before the handoff has ended.
        trouble: in each step, a process is stopped or killed, or a pair is cut off.
    """

    lost: float = 0.004
    doubled: float = 0.01
    flipped: float = 0.01
    stalled: float = 0.02
    misplaced: float = 0.01
    aborted: float = 0.003
    careless: float = 0.02
    trouble: float = 0.03


@dataclass
class _Prompt:
    """One request at one engine."""

    room: int
    content: int
    token_count: int
    progress: HandoffProgress
    opened_ns: int
    first: int = 0
    blocks: list[int] = field(default_factory=list)
    chunk: int = 0
    layer: int = 0
    until_ns: int = 0
    announced: bool = False
    held: bool = False


class PrefillProcess(HandoffProcess):
    """A prefill engine: computes chunk by chunk, layer by layer, and pushes each."""

    def __init__(self, world: "HandoffSimulation", name: str) -> None:
        super().__init__(world.time, name)
        self.world = world
        self.boot = world.time.random.randbytes(16)
        self._registrations = 0
        self.memory = PoolMemory()
        self.senders = Senders(self.memory.pool.shape, PATIENCE)
        self.prompts: dict[int, _Prompt] = {}
        self.careless_rooms: set[int] = set()
        self._used: set[int] = set()

    @property
    def is_idle(self) -> bool:
        """Whether no request is left."""
        return not self.prompts and not self.senders.describe(self.time.now_ns)

    def begin(self, room: int, token_count: int, content: int) -> None:
        """A request of the conductor; one whose room was used must be refused."""
        used = room in self._used
        try:
            progress, effects = self.senders.open(room, token_count, self.time.now_ns)
        except (InvalidArgument, CapacityError):
            self.world.outcome.refused += 1
            return
        assert not used, "a room was used twice"
        self._used.add(room)
        self.prompts[room] = _Prompt(room, content, token_count, progress, self.time.now_ns)
        self.world.wires.carry_out(self, effects)

    def step(self) -> None:
        """Compute one layer of one chunk of every request."""
        world, now = self.world, self.time.now_ns
        if now >= self._registrations * EVERY_NS:
            self._registrations = now // EVERY_NS + 1
            find = partial(world.registry_of, self.name)
            registering(self, self._registrations, find, self.time.random.random)
        world.wires.carry_out(self, self.senders.tick(now))
        for prompt in list(self.prompts.values()):
            if not prompt.progress.ended:
                if world.time.random.random() < world.faults.aborted:
                    world.outcome.aborted += 1
                    world.wires.carry_out(self, self.senders.abort(prompt.room, now))
                else:
                    self._compute(prompt)
            self.check_time(prompt.progress, prompt.opened_ns, _LONGEST_NS)
            if prompt.progress.ended and not self.senders.holds_blocks(prompt.room):
                if prompt.blocks:
                    self.memory.give_back(prompt.blocks)
                world.wires.carry_out(self, self.senders.close(prompt.room, now))
                world.outcome.prefill_failed += prompt.progress.state == State.FAILED
                del self.prompts[prompt.room]
        self.senders.check()

    def _compute(self, prompt: _Prompt) -> None:
        now, random = self.time.now_ns, self.world.time.random
        count = -(-prompt.token_count // BLOCK_TOKENS)
        if not prompt.blocks and not prompt.chunk and not prompt.layer:
            shuffle = random.shuffle if random.random() < 0.5 else None
            prompt.blocks = self.memory.take(count, shuffle) or []
            if not prompt.blocks:
                self.world.wires.carry_out(self, self.senders.renew(prompt.room, now))
                return
        if prompt.chunk >= count:
            if prompt.blocks and random.random() < self.world.faults.careless:
                self.careless_rooms.add(prompt.room)
                self.memory.give_back(prompt.blocks)
                prompt.blocks = []
            return
        stop = min(prompt.chunk + 3, count)
        positions = range(prompt.chunk, stop)
        blocks = prompt.blocks[prompt.chunk : stop]
        for plane in (2 * prompt.layer, 2 * prompt.layer + 1):
            for position, block in zip(positions, blocks, strict=True):
                self.memory.write(plane, block, prompt.content, position)
        generations = self.memory.pool.generations(blocks)
        layers = range(prompt.layer, prompt.layer + 1)
        effects = self.senders.push(prompt.room, layers, positions, blocks, generations, now)
        prompt.layer += 1
        if prompt.layer == LAYERS:
            prompt.layer, prompt.chunk = 0, stop
        if prompt.chunk == count:
            aux = prompt.content.to_bytes(8, "little")
            effects += self.senders.finish(prompt.room, aux, now)
        self.world.wires.carry_out(self, effects)


class DecodeProcess(HandoffProcess):
    """A decode engine: finds memory, announces it, decodes what has come and computes the rest."""

    def __init__(self, world: "HandoffSimulation", name: str) -> None:
        super().__init__(world.time, name)
        self.world = world
        self.memory = PoolMemory()
        self.aux = AuxSlots(AUX_SLOTS, AUX_BYTES)
        self.receivers = Receivers(self.memory.pool.shape, AUX_SLOTS, AUX_BYTES, PATIENCE)
        self.prompts: dict[int, _Prompt] = {}
        self._computed: list[_Prompt] = []

    def begin(self, room: int, token_count: int, peer: str, content: int) -> None:
        """A request of the conductor."""
        try:
            progress, effects = self.receivers.open(room, peer, token_count, self.time.now_ns)
        except (InvalidArgument, CapacityError):
            self.world.outcome.refused += 1
            return
        self.prompts[room] = _Prompt(room, content, token_count, progress, self.time.now_ns)
        self.world.wires.want(self, peer)
        self.world.wires.carry_out(self, effects)

    def step(self) -> None:
        """Look at every request, then decode."""
        world, now = self.world, self.time.now_ns
        world.wires.carry_out(self, self.receivers.tick(now))
        for prompt in list(self.prompts.values()):
            state = prompt.progress.state
            if not prompt.progress.ended:
                self._go_on(prompt)
            elif state == State.SUCCESS:
                self._decode(prompt)
            elif self.receivers.holds_blocks(prompt.room):
                world.outcome.limbo += not prompt.held
                prompt.held = True
            else:
                self._compute_instead(prompt)
            self.check_time(prompt.progress, prompt.opened_ns, _LONGEST_NS)
        for prompt in [one for one in self._computed if now >= one.until_ns]:
            wrong = self.memory.wrong(prompt.blocks, prompt.content, prompt.first)
            assert not wrong, f"room {prompt.room}: others wrote into what decode had computed"
            self.memory.give_back(prompt.blocks)
            self._computed.remove(prompt)
        self.receivers.check()

    @property
    def is_idle(self) -> bool:
        """Whether no request is left."""
        return not self.prompts and not self._computed

    def _go_on(self, prompt: _Prompt) -> None:
        world, now = self.world, self.time.now_ns
        if world.time.random.random() < world.faults.aborted:
            world.outcome.aborted += 1
            world.wires.carry_out(self, self.receivers.abort(prompt.room, now))
            return
        if prompt.announced:
            return
        count = -(-prompt.token_count // BLOCK_TOKENS)
        first_token = world.time.random.choice([0, 0, min(5, prompt.token_count)])
        prompt.first = first_token // BLOCK_TOKENS if first_token < prompt.token_count else count
        shuffle = world.time.random.shuffle if world.time.random.random() < 0.5 else None
        blocks = self.memory.take(count - prompt.first, shuffle)
        if blocks is None:
            world.wires.carry_out(self, self.receivers.renew(prompt.room, now))
            return
        prompt.blocks, prompt.announced = blocks, True
        effects = self.receivers.announce(prompt.room, first_token, blocks, now)
        world.wires.carry_out(self, effects)

    def _decode(self, prompt: _Prompt) -> None:
        """Everything has come: it is right now, and stays so until the request has ended."""
        world, now = self.world, self.time.now_ns
        told = int.from_bytes(self.aux.read(*self.receivers.aux_place(prompt.room)), "little")
        if told != prompt.content:  # the conductor has mixed two requests up
            assert told == prompt.content ^ _OTHER
            assert not self.memory.wrong(prompt.blocks, told, prompt.first)
            world.outcome.wrong_prompt += 1
            self._compute_instead(prompt)
            return
        wrong = self.memory.wrong(prompt.blocks, prompt.content, prompt.first)
        assert not wrong, f"room {prompt.room}: wrong bytes at positions {wrong}"
        if not prompt.until_ns:
            world.outcome.succeeded += 1
            prompt.until_ns = now + world.time.random.randrange(1, 10) * STEP_NS
        if now >= prompt.until_ns:
            self._close(prompt)
            self.memory.give_back(prompt.blocks)

    def _compute_instead(self, prompt: _Prompt) -> None:
        """It failed and nothing arrives any more: the blocks are the engine's again."""
        self.world.outcome.decode_failed += 1
        self._close(prompt)
        for at, block in enumerate(prompt.blocks):
            for plane in range(PLANES):
                self.memory.write(plane, block, prompt.content, prompt.first + at)
        prompt.until_ns = self.time.now_ns + self.world.time.random.randrange(1, 20) * STEP_NS
        self._computed.append(prompt)

    def _close(self, prompt: _Prompt) -> None:
        del self.prompts[prompt.room]
        effects = self.receivers.close(prompt.room, self.time.now_ns)
        self.world.wires.carry_out(self, effects)


class HandoffSimulation:
    """One seeded history of two prefill and two decode engines.

    Args:
        seed: determines all random choices.
        faults: fault rates.

    Attributes:
        outcome: counts so far.
        processes: name → the process that has it now.
    """

    def __init__(self, seed: int, faults: HandoffFaults | None = None) -> None:
        """Start the engines; :meth:`run` sends requests."""
        self.time = Timeline(seed, FaultRates())
        self.faults = faults or HandoffFaults()
        self.outcome = HandoffOutcome()
        self.wires = HandoffWires(
            self.time,
            self.faults,
            self.outcome,
            self.find,
            lambda name: self.registry_of(name).boot,
        )
        self._registries = {
            name: RegistryProcess(self.time, name, self.outcome) for name in ("r0", "r1")
        }
        self.processes: dict[str, PrefillProcess | DecodeProcess] = {}
        for name in ("p0", "p1", "d0", "d1"):
            self._start(name)
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

    def find(self, name: str) -> HandoffProcess:
        """The process that has a name now."""
        return self.processes[name]

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
        for process in list(self.processes.values()):
            process.do(process.step)
        self.wires.tick()
        self.time.at(STEP_NS, self._step)

    def _request(self) -> None:
        """Send one request to both sides, perhaps to one only, perhaps twice."""
        random = self.time.random
        prefill = self.processes[random.choice(["p0", "p1"])]
        decode = self.processes[random.choice(["d0", "d1"])]
        assert isinstance(prefill, PrefillProcess)
        assert isinstance(decode, DecodeProcess)
        room, tokens = self._rooms.draw(), random.randrange(1, 40)
        peer = prefill.name
        content = room ^ (_OTHER if random.random() < 0.03 else 0)
        for again in range(1 + (random.random() < 0.05)):
            delay_ns = random.randrange(SECOND // 5 + 3 * SECOND * again)
            if random.random() > 0.03:
                self.time.at(
                    delay_ns, lambda: prefill.do(lambda: prefill.begin(room, tokens, content))
                )
            delay_ns = random.randrange(SECOND // 5)
            if random.random() > 0.03:
                self.time.at(
                    delay_ns, lambda: decode.do(lambda: decode.begin(room, tokens, peer, room))
                )
        self.outcome.requests += 1

    def _trouble(self) -> None:
        random = self.time.random
        name = random.choice(sorted(self.processes) + sorted(self._registries))
        what = random.choice(["kill", "stop", "stop", "cut"])
        if what != "cut" and name in self._registries:
            self._trouble_registry(name, kill=what == "kill")
        elif what == "kill":
            self.outcome.killed += 1
            self.processes[name].kill()
            self.wires.died(self.processes[name])
            self._start(name)
        elif what == "stop":
            self.outcome.stopped += 1
            self.processes[name].stop(random.randrange(SECOND // 2, 6 * SECOND))
        else:
            self.outcome.partitions += 1
            pair = (random.choice(["p0", "p1"]), random.choice(["d0", "d1"]))
            self.wires.cut(*pair, random.randrange(SECOND // 2, 5 * SECOND))

    def _trouble_registry(self, name: str, *, kill: bool) -> None:
        if kill:
            self._registries[name].kill()
            self._registries[name] = RegistryProcess(self.time, name, self.outcome)
        else:
            self._registries[name].stop(self.time.random.randrange(SECOND // 2, 6 * SECOND))

    def _start(self, name: str) -> None:
        kind = PrefillProcess if name[0] == "p" else DecodeProcess
        self.processes[name] = kind(self, name)

    def _is_idle(self) -> bool:
        """Whether every engine runs, and has nothing to do."""
        return (
            all(process.is_idle and not process.is_stopped for process in self.processes.values())
            and not self.wires.under_way
        )

    def _check_the_end(self) -> None:
        for process in self.processes.values():
            process.step()
            left = list(process.prompts)
            assert not left, f"{process.name} has not ended rooms {left}"
            assert len(process.memory.free) == BLOCKS, f"{process.name} has lost blocks"
            if isinstance(process, DecodeProcess):
                assert process.is_idle
                assert not process.receivers.limbo_blocks()
                assert not process.receivers.describe(self.time.now_ns)
            else:
                assert not process.senders.describe(self.time.now_ns)


def drawn_handoffs(seed: int) -> HandoffSimulation:
    """One of many histories: some have no faults of the network, some many aborts."""
    faults = [
        HandoffFaults(),
        HandoffFaults(lost=0, doubled=0, flipped=0),
        HandoffFaults(aborted=0.02, trouble=0.01),
        HandoffFaults(trouble=0.1, stalled=0.1),
    ]
    return HandoffSimulation(seed, faults[seed % len(faults)])
