"""The engines of simulated handoffs: each has one or several ranks, each of them a process.

The ranks of an engine agree on the state of each request in each step, as a ``reduce`` would. That
waits for all ranks: while one stands, the engine makes no step, and only what the managers do by
themselves goes on. When one has died, the engine ends and another one starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from kvstore.handoff.memory import AuxSlots
from kvstore.handoff.ranks import INSTANCE_BYTES, RankGroup, RankPart
from kvstore.handoff.receiving import Receivers
from kvstore.handoff.sending import Senders
from kvstore.handoff.state_data import StateKind
from kvstore.handoff.states import HandoffProgress, Patience, State, least
from kvstore.protocol.errors import CapacityError, InvalidArgument
from kvstore.testing.handoff_memory import BLOCK_TOKENS, LAYERS, EnginePools, HeldBlocks
from kvstore.testing.handoff_processes import SECOND, HandoffProcess
from kvstore.testing.handoff_registry import EVERY_NS, registering

if TYPE_CHECKING:
    from kvstore.testing.handoff import HandoffSimulation

AUX_SLOTS: Final = 6
AUX_BYTES: Final = 64
PATIENCE: Final = Patience(bootstrapping_s=3, waiting_s=3, transferring_s=2, total_s=10)
OTHER_PROMPT: Final = 1 << 62
"""Where the content of a prompt that was mixed up differs."""
STEP_NS: Final = SECOND // 20
_LONGEST_NS: Final = int(PATIENCE.total_s * SECOND) + SECOND
"""A handoff has ended after this time, not counting that in which its process stood."""


@dataclass
class Prompt:
    """One request at one engine; ``progress`` has the handoff of each rank."""

    room: int
    content: int
    token_count: int
    progress: list[HandoffProgress]
    held: HeldBlocks | None = None
    chunk: int = 0
    layer: int = 0
    until_ns: int = 0
    in_limbo: bool = False

    @property
    def block_count(self) -> int:
        """Its positions."""
        return -(-self.token_count // BLOCK_TOKENS)

    @property
    def state(self) -> State:
        """The lowest of all ranks."""
        return least(one.state for one in self.progress)

    @property
    def ended(self) -> bool:
        """Whether it has ended at all ranks."""
        return all(one.ended for one in self.progress)


class _Begun(NamedTuple):
    """A handoff of one rank that has not ended."""

    progress: HandoffProgress
    opened_ns: int
    peer: str


class RankProcess(HandoffProcess):
    """One rank: its manager works by itself, its engine calls it in each step."""

    core: Senders | Receivers

    def __init__(self, world: "HandoffSimulation", name: str, group: RankGroup) -> None:
        super().__init__(world.time, name)
        self.world = world
        self.group = group
        self._handoffs: dict[int, _Begun] = {}

    def begun(self, room: int, progress: HandoffProgress, peer: str = "") -> HandoffProgress:
        """A handoff has begun, at decode with a peer; it must end in time."""
        self._handoffs[room] = _Begun(progress, self.time.now_ns, peer)
        return progress

    def tick(self) -> None:
        """What the manager does by itself."""
        self.world.wires.carry_out(self, self.core.tick(self.time.now_ns))
        for room, one in list(self._handoffs.items()):
            self.check_time(one.progress, one.opened_ns, _LONGEST_NS)
            if one.progress.ended:
                del self._handoffs[room]
        self.core.check()

    def abort(self, room: int) -> None:
        """Give a request up at this rank."""
        self.world.wires.carry_out(self, self.core.abort(room, self.time.now_ns))

    def close(self, room: int) -> None:
        """Ask no more about a request."""
        self.world.wires.carry_out(self, self.core.close(room, self.time.now_ns))


class PrefillRank(RankProcess):
    """A rank of a prefill engine."""

    def __init__(
        self, world: "HandoffSimulation", name: str, memory: EnginePools, rank: int
    ) -> None:
        self.memory = memory.ranks[rank]
        super().__init__(world, name, self.memory.pool.group)
        self.core = self.senders = Senders(self.memory.pool.shape, PATIENCE, rank)
        self.boot = world.time.random.randbytes(16)
        self.careless_rooms: set[int] = set()
        self._registrations = 0

    def tick(self) -> None:
        """Register besides."""
        if self.time.now_ns >= self._registrations * EVERY_NS:
            self._registrations = self.time.now_ns // EVERY_NS + 1
            find = partial(self.world.registry_of, self.engine_name)
            registering(self, self._registrations, find, self.time.random.random)
        super().tick()


class DecodeRank(RankProcess):
    """A rank of a decode engine."""

    def __init__(
        self, world: "HandoffSimulation", name: str, memory: EnginePools, rank: int
    ) -> None:
        self.memory = memory.ranks[rank]
        super().__init__(world, name, self.memory.pool.group)
        self.aux = AuxSlots(AUX_SLOTS, AUX_BYTES)
        self.core = self.receivers = Receivers(
            self.memory.pool.shape, AUX_SLOTS, AUX_BYTES, PATIENCE, rank
        )

    def living(self, peer: str) -> list[int]:
        """The handoffs with a peer that have not ended."""
        known = self._handoffs.items()
        return [room for room, one in known if one.peer == peer and not one.progress.ended]


_Rank = TypeVar("_Rank", PrefillRank, DecodeRank)


class SimulatedEngine(Generic[_Rank]):
    """An engine: what its ranks do together.

    Attributes:
        ranks: its processes.
        memory: of all ranks.
        prompts: requests that have not ended.
    """

    def __init__(
        self, world: "HandoffSimulation", name: str, parts: Sequence[RankPart], kind: type[_Rank]
    ) -> None:
        self.world: HandoffSimulation = world
        self.time = world.time
        self.name = name
        instance = world.time.random.randbytes(INSTANCE_BYTES)
        self.memory = EnginePools(parts, instance, stateful=world.is_stateful)
        self.ranks: list[_Rank] = [
            kind(world, f"{name}.{rank}", self.memory, rank) for rank in range(len(parts))
        ]
        self.prompts: dict[int, Prompt] = {}

    @property
    def dead(self) -> bool:
        """Whether one of its ranks has died."""
        return any(rank.dead for rank in self.ranks)

    @property
    def is_stopped(self) -> bool:
        """Whether one of its ranks stands: the others wait for it in each step."""
        return any(rank.is_stopped for rank in self.ranks)

    def in_next_step(self, call: "partial[None]") -> None:
        """Do something in the next step in which all ranks take part; never if one has died."""
        if self.dead:
            return
        if self.is_stopped:
            self.time.at(STEP_NS, partial(self.in_next_step, call))
        else:
            call()

    def agree(self, prompt: Prompt) -> State:
        """The state of a request at all ranks; if one has failed, the others give it up."""
        if prompt.state is State.FAILED:
            for rank, progress in zip(self.ranks, prompt.progress, strict=True):
                if not progress.ended:
                    rank.abort(prompt.room)
        return prompt.state

    def give_up(self, prompt: Prompt) -> bool:
        """Perhaps one rank gives a request up; returns whether it has."""
        random = self.time.random
        if random.random() >= self.world.faults.aborted:
            return False
        self.world.outcome.aborted += 1
        random.choice(self.ranks).abort(prompt.room)
        return True

    def take(self, prompt: Prompt, first: int) -> HeldBlocks | None:
        """Take the blocks of a request from a position on; None if there are too few."""
        shuffle = self.time.random.shuffle if self.time.random.random() < 0.5 else None
        prompt.held = self.memory.take(prompt.block_count, first, shuffle)
        return prompt.held

    def give_back(self, prompt: Prompt) -> None:
        """The blocks of a request, if it has some, are free."""
        if prompt.held is not None:
            self.memory.give_back(prompt.held)
            prompt.held = None


class PrefillEngine(SimulatedEngine[PrefillRank]):
    """Computes chunk by chunk, layer by layer, and pushes each."""

    def __init__(self, world: "HandoffSimulation", name: str, parts: Sequence[RankPart]) -> None:
        super().__init__(world, name, parts, PrefillRank)
        self._used: set[int] = set()

    @property
    def is_idle(self) -> bool:
        """Whether no request is left."""
        now = self.time.now_ns
        return not self.prompts and not any(rank.senders.describe(now) for rank in self.ranks)

    def begin(self, room: int, token_count: int, content: int) -> None:
        """A request of the conductor; one whose room was used must be refused."""
        used = room in self._used
        made: list[HandoffProgress] = []
        for rank in self.ranks:
            try:
                progress, effects = rank.senders.open(room, token_count, self.time.now_ns)
            except (InvalidArgument, CapacityError):
                self.world.outcome.refused += 1
                for begun, _ in zip(self.ranks, made, strict=False):
                    begun.close(room)
                return
            made.append(rank.begun(room, progress))
            self.world.wires.carry_out(rank, effects)
        assert not used, "a room was used twice"
        self._used.add(room)
        self.prompts[room] = Prompt(room, content, token_count, made)

    def step(self) -> None:
        """Compute one layer of one chunk of every request."""
        for prompt in list(self.prompts.values()):
            state = self.agree(prompt)
            if state not in (State.FAILED, State.SUCCESS) and not self.give_up(prompt):
                self._compute(prompt)
            holds = any(rank.senders.holds_blocks(prompt.room) for rank in self.ranks)
            if prompt.ended and not holds:
                self.give_back(prompt)
                for rank in self.ranks:
                    rank.close(prompt.room)
                self.world.outcome.prefill_failed += prompt.state == State.FAILED
                del self.prompts[prompt.room]

    def _compute(self, prompt: Prompt) -> None:
        now, count = self.time.now_ns, prompt.block_count
        if prompt.chunk >= count:
            if prompt.held and self.time.random.random() < self.world.faults.careless:
                for rank in self.ranks:
                    rank.careless_rooms.add(prompt.room)
                self.give_back(prompt)
            return
        held = prompt.held or self.take(prompt, 0)
        if held is None:
            for rank in self.ranks:
                self.world.wires.carry_out(rank, rank.senders.renew(prompt.room, now))
            return
        chunk = range(prompt.chunk, min(prompt.chunk + 3, count))
        for rank in self.ranks:
            first, last = rank.group.part.layers
            if first <= prompt.layer < last:
                layers = range(prompt.layer - first, prompt.layer - first + 1)
                self._push(rank, prompt, held, layers, chunk)
        prompt.layer += 1
        if prompt.layer == LAYERS:
            for rank in self.ranks:
                self._push_states(rank, prompt, held, chunk)
            prompt.layer, prompt.chunk = 0, chunk.stop
        if prompt.chunk == count:
            aux = prompt.content.to_bytes(8, "little")
            for rank in self.ranks:
                self.world.wires.carry_out(rank, rank.senders.finish(prompt.room, aux, now))

    def _push(
        self, rank: PrefillRank, prompt: Prompt, held: HeldBlocks, layers: range, positions: range
    ) -> None:
        blocks = held.blocks[positions.start : positions.stop]
        rank.memory.write(layers, blocks, prompt.content, positions.start)
        generations, now = rank.memory.pool.generations(blocks), self.time.now_ns
        self.world.wires.carry_out(
            rank, rank.senders.push(prompt.room, layers, positions, blocks, generations, now)
        )

    def _push_states(
        self, rank: PrefillRank, prompt: Prompt, held: HeldBlocks, chunk: range
    ) -> None:
        """The state data of the positions of a chunk; that of the whole request with the last."""
        now = self.time.now_ns
        for index, state in enumerate(self.memory.states):
            there = held.state_positions(state)
            part = range(max(there.start, chunk.start), min(there.stop, chunk.stop))
            if state.kind is StateKind.SLOT:
                part = there if chunk.stop == held.count else range(0)
            if not part:
                continue
            blocks = held.states[state.name][part.start - there.start :][: len(part)]
            rank.memory.write_state(index, blocks, prompt.content, part.start)
            numbers = rank.memory.pool.state_generations(state.name, blocks)
            effects = rank.senders.push_state(prompt.room, state.name, part, blocks, numbers, now)
            self.world.wires.carry_out(rank, effects)


class DecodeEngine(SimulatedEngine[DecodeRank]):
    """Finds memory, announces it, decodes what has come and computes the rest."""

    def __init__(self, world: "HandoffSimulation", name: str, parts: Sequence[RankPart]) -> None:
        super().__init__(world, name, parts, DecodeRank)
        self._computed: list[Prompt] = []

    @property
    def is_idle(self) -> bool:
        """Whether no request is left."""
        return not self.prompts and not self._computed

    def begin(self, room: int, token_count: int, peer: str, content: int) -> None:
        """A request of the conductor."""
        made: list[HandoffProgress] = []
        for rank in self.ranks:
            try:
                progress, effects = rank.receivers.open(room, peer, token_count, self.time.now_ns)
            except (InvalidArgument, CapacityError):
                self.world.outcome.refused += 1
                for begun, _ in zip(self.ranks, made, strict=False):
                    begun.close(room)
                return
            made.append(rank.begun(room, progress, peer))
            self.world.wires.want(rank, peer)
            self.world.wires.carry_out(rank, effects)
        self.prompts[room] = Prompt(room, content, token_count, made)

    def step(self) -> None:
        """Look at every request, then decode."""
        world, now = self.world, self.time.now_ns
        for prompt in list(self.prompts.values()):
            state = self.agree(prompt)
            if state is State.SUCCESS:
                self._decode(prompt)
            elif state is not State.FAILED:
                self._go_on(prompt)
            elif any(rank.receivers.holds_blocks(prompt.room) for rank in self.ranks):
                world.outcome.limbo += not prompt.in_limbo
                prompt.in_limbo = True
            else:
                self._compute_instead(prompt)
        for prompt in [one for one in self._computed if now >= one.until_ns]:
            assert not self._wrong(prompt, prompt.content), (
                f"room {prompt.room}: others wrote into what decode had computed"
            )
            self.give_back(prompt)
            self._computed.remove(prompt)

    def _go_on(self, prompt: Prompt) -> None:
        world, random, now = self.world, self.time.random, self.time.now_ns
        if self.give_up(prompt) or prompt.held is not None:
            return
        first_token = random.choice([0, 0, min(5, prompt.token_count)])
        wanted = first_token < prompt.token_count
        held = self.take(prompt, first_token // BLOCK_TOKENS if wanted else prompt.block_count)
        if held is None:
            for rank in self.ranks:
                world.wires.carry_out(rank, rank.receivers.renew(prompt.room, now))
            return
        for rank in self.ranks:
            effects = rank.receivers.announce(
                prompt.room, first_token, held.blocks, now, held.states
            )
            world.wires.carry_out(rank, effects)

    def _decode(self, prompt: Prompt) -> None:
        """Everything has come: it is right now, and stays so until the request has ended."""
        world, now = self.world, self.time.now_ns
        said = {rank.aux.read(*rank.receivers.aux_place(prompt.room)) for rank in self.ranks}
        assert len(said) == 1, "the ranks have different aux data"
        content = int.from_bytes(said.pop(), "little")
        if content != prompt.content:  # the conductor has mixed two requests up
            assert content == prompt.content ^ OTHER_PROMPT
            assert not self._wrong(prompt, content)
            world.outcome.wrong_prompt += 1
            self._compute_instead(prompt)
            return
        wrong = self._wrong(prompt, prompt.content)
        assert not wrong, f"room {prompt.room}: wrong bytes at ranks {wrong}"
        if not prompt.until_ns:
            world.outcome.succeeded += 1
            world.outcome.succeeded_states += bool(self.memory.states)
            prompt.until_ns = now + self.time.random.randrange(1, 10) * STEP_NS
        if now >= prompt.until_ns:
            self._close(prompt)
            self.give_back(prompt)

    def _compute_instead(self, prompt: Prompt) -> None:
        """It failed and nothing arrives any more: the blocks are the engine's again."""
        self.world.outcome.decode_failed += 1
        self._close(prompt)
        if prompt.held is not None:
            for rank in self.ranks:
                rank.memory.write_all(prompt.held, prompt.content)
        prompt.until_ns = self.time.now_ns + self.time.random.randrange(1, 20) * STEP_NS
        self._computed.append(prompt)

    def _wrong(self, prompt: Prompt, content: int) -> list[tuple[int, list[str]]]:
        return self.memory.wrong(prompt.held, content) if prompt.held is not None else []

    def _close(self, prompt: Prompt) -> None:
        del self.prompts[prompt.room]
        for rank in self.ranks:
            rank.close(prompt.room)
