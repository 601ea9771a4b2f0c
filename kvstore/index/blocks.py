"""The blocks of one engine with hashes of its own, mapped to chain values by their tokens. Pure.

The chain value of a block is computed from its tokens and the chain value of its parent
(:mod:`kvstore.index.scope`). The KV groups of an engine name a block by the same hash, so a block
has one chain value and a bit for each holder, which is a medium and a group.

Blocks whose parent is unknown wait until a later event names it; then they and those that wait for
them are stored. Events of KV groups with states or windows leave out some blocks; theirs wait until
another group's event shows the tokens of their hash. Blocks without token ids are unmapped unless
their hash is known. Nothing is guessed: the index may lose, it never lies.
"""

from typing import Final, NamedTuple

import numpy as np

from kvstore.index.batch import HASHES_MAX, ChangeBatch
from kvstore.index.blockmap import BITS_MAX, block_map
from kvstore.index.reading import UnreadableError
from kvstore.index.waiting import WaitingBlocks, WaitingEvents, WaitingNames
from kvstore.mover.chains import CHAINS, Chains, WordBuffer, block_chain, name_of

TOKENS_MAX: Final = 262_144
"""Maximum tokens in one event: those of one step of an engine."""
_WAKE_STEP: Final = 256
"""Blocks and events of one step of waking: a few milliseconds."""


class BlockLimits(NamedTuple):
    """Limits of one engine.

    Attributes:
        blocks: maximum blocks that are remembered.
        waiting: maximum blocks that wait for their parent, and that wait for the tokens of their
            hash, each.
        waiting_bytes: maximum bytes of their tokens, as msgpack.
    """

    blocks: int = 16_000_000
    waiting: int = 16_384
    waiting_bytes: int = 4 << 20


class Workspace:
    """State shared by the engines of one thread.

    Attributes:
        chains: the implementation in use.
        secret: of the index; 0..2**64-1.
        names: names of the current event.
        ids: token ids of the current event.
        spots: positions of the token ids of the current events.
    """

    __slots__ = ("chains", "ids", "names", "secret", "spots")

    def __init__(self, secret: int, chains: Chains = CHAINS) -> None:
        self.chains = chains
        self.secret = secret
        self.names = WordBuffer(HASHES_MAX)
        self.ids = WordBuffer(TOKENS_MAX, np.uint32)
        self.spots = WordBuffer(2_048)


class StoredBlocks(NamedTuple):
    """Blocks of one event, before :class:`EngineBlocks` has mapped them.

    Attributes:
        hashes: msgpack array of their hashes, in chain order.
        tokens: msgpack array of their tokens.
        parent: hash of the block before the first; None at the start of a chain.
        seed: seed of the scope, for the start of a chain.
        extras: msgpack of other inputs that distinguish each block; None if there are none.
        has_lora: they belong to a LoRA, which prefix keys do not cover.
    """

    hashes: bytes
    tokens: bytes
    parent: int | bytes | None
    seed: int
    extras: list[bytes] | None
    has_lora: bool = False


class EngineBlocks:
    """The blocks of one engine.

    Attributes:
        unmapped: blocks that were not mapped: without token ids, too many blocks, or of more than
            64 holders.
        dropped: blocks that waited too long.
    """

    def __init__(self, workspace: Workspace, limits: BlockLimits) -> None:
        self._space = workspace
        self._limits = limits
        self._map = block_map(workspace.chains)
        self._waiting = WaitingEvents(limits.waiting, limits.waiting_bytes)
        self._nameless = WaitingNames(limits.waiting)
        self._bits: dict[int, int] = {}  # holder → bit
        self._holders: list[int] = []  # by bit
        self._awake: list[tuple[int, int]] = []  # blocks that may have been waited for
        self._shown: list[tuple[int, int]] = []  # those of the waiting names that are known now
        self.unmapped = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._map)

    @property
    def waiting(self) -> int:
        """Number of blocks that wait for their parent, or for the tokens of their hash."""
        return self._waiting.blocks + self._nameless.blocks

    def clear(self) -> None:
        """Forget all blocks and holders."""
        self._map.clear()
        self._waiting.clear()
        self._nameless.clear()
        self._awake.clear()
        self._shown.clear()
        self._bits.clear()
        self._holders.clear()

    def stored(
        self, event: StoredBlocks, block_tokens: int, holder: int, batch: ChangeBatch
    ) -> None:
        """A holder has stored blocks; appends the known ones. Call :meth:`wake` afterwards.

        Raises:
            UnreadableError: the hashes are not block hashes.
        """
        count = self.count(event.hashes)
        bit = self._bit(holder)
        if bit is None:
            self.unmapped += count
            return
        chain, parent = event.seed, 0
        if event.parent is not None:
            parent = name_of(event.parent, self._space.secret)
            chain = self._map.chain(parent)
        if not chain:
            found = self._count_tokens(event)
            if found == count * block_tokens:
                self._store_known(count, bit, batch, event, parent)
            else:
                self._store_gaps(count, found, block_tokens, bit, batch)
            return
        found = self._extend(event, block_tokens, chain, batch)
        if found != count * block_tokens:
            self._store_gaps(count, self._count_tokens(event), block_tokens, bit, batch)
        elif not self._has_room(count):
            self._store_known(count, bit, batch)
        elif self._store(count, bit, batch) and self._waiting:
            names = self._space.names.array[:count].tolist()
            chains = batch.chains.array[batch.used - count : batch.used].tolist()
            self._awake += zip(names, chains, strict=True)

    def wake(self, block_tokens: int, batch: ChangeBatch) -> bool:
        """Append some of the blocks that have waited for those that were stored last.

        To be called after :meth:`stored`, until it returns False: there are no more.
        """
        for _ in range(_WAKE_STEP):
            if self._shown:
                self._store_shown(batch)
                continue
            if not self._awake or not self._waiting:
                self._awake.clear()
                return False
            name, chain = self._awake[-1]
            event = self._waiting.take(name)
            if event is None:
                self._awake.pop()
            else:
                self._store_waiting(event, chain, block_tokens, batch)
        return True

    def named(self, hashes: bytes, count: int, holder: int, batch: ChangeBatch) -> None:
        """A holder has stored blocks whose chain values are behind the used ones of ``batch``.

        Args:
            hashes: msgpack array of their hashes.
            count: number of the chain values.
            holder: the holder.
            batch: the batch.

        Raises:
            UnreadableError: the hashes are not block hashes.
        """
        bit = self._bit(holder)
        if self.count(hashes) != count or bit is None or not self._has_room(count):
            self.unmapped += count
        else:
            self._store(count, bit, batch)

    def release_as_keys(self, seed: int, batch: ChangeBatch) -> None:
        """Append all waiting blocks without LoRA: their hashes are the beginning of prefix keys."""
        self.unmapped += self._nameless.blocks
        self._nameless.clear()
        for event in self._waiting.take_all():
            at = batch.make_room()
            count = self._space.chains.keys(event.hashes, seed, batch.chains, at, integers=True)
            if count != len(event.names) or event.has_lora:
                self.unmapped += len(event.there)
                continue
            there = np.array([name in event.there for name in event.names])
            kept = batch.chains.array[at : at + count][there]
            batch.chains.array[at : at + len(kept)] = kept
            batch.add(len(kept), self._holders[event.bit], stored=True)

    def removed(self, hashes: bytes, holder: int, batch: ChangeBatch) -> None:
        """A holder has removed blocks; appends those that it had.

        Raises:
            UnreadableError: the hashes are not block hashes.
        """
        count = self.count(hashes)
        bit = self._bits.get(holder)
        if bit is None:
            return
        at = batch.make_room()
        gone = self._map.remove(self._space.names, count, bit, batch.chains, at)
        batch.add(gone, holder, stored=False)
        if self._waiting or self._nameless:
            names = self._space.names.array[:count].tolist()
            self._waiting.remove(names, bit)
            self._nameless.remove(names, bit)

    def check(self) -> None:
        """Assert the invariants."""
        assert len(self._map) <= self._limits.blocks
        assert [self._bits[holder] for holder in self._holders] == list(range(len(self._bits)))
        self._waiting.check()
        names = self._nameless.names()
        self._space.names.array[: len(names)] = names
        chains, _ = self._map.find(self._space.names, len(names))
        self._nameless.check({name for name, chain in zip(names, chains, strict=True) if chain})

    def count(self, hashes: bytes) -> int:
        """Read the names of block hashes; returns how many.

        Raises:
            UnreadableError: these are not block hashes.
        """
        space = self._space
        count = space.chains.names(hashes, space.secret, space.names)
        if count < 0:
            raise UnreadableError("the hashes of an event are not block hashes")
        return count

    def _bit(self, holder: int) -> int | None:
        """The bit of a holder; None if there are too many."""
        bit = self._bits.get(holder)
        if bit is None and len(self._holders) < BITS_MAX:
            bit = self._bits[holder] = len(self._holders)
            self._holders.append(holder)
        return bit

    def _count_tokens(self, event: StoredBlocks) -> int:
        """The number of token ids; negative if these are none."""
        return self._space.chains.read_ids(event.tokens, self._space.ids)

    def _extend(
        self, event: StoredBlocks | WaitingBlocks, block_tokens: int, chain: int, batch: ChangeBatch
    ) -> int:
        """Write the chain values of an event's blocks behind the used ones.

        Returns:
            The number of tokens, or a negative number if there are none.
        """
        space, at = self._space, batch.make_room()
        if event.extras is None:
            return space.chains.chain_raw(
                event.tokens, space.ids, block_tokens, chain, batch.chains, at
            )
        count = space.chains.read_ids(event.tokens, space.ids)
        if count != len(event.extras) * block_tokens:
            return -1
        packed, step = space.ids.array[:count].tobytes(), 4 * block_tokens
        for number, extra in enumerate(event.extras):
            chain = block_chain(packed[number * step : (number + 1) * step] + extra, chain)
            batch.chains.array[at + number] = chain
        return count

    def _store(self, count: int, bit: int, batch: ChangeBatch) -> bool:
        """Store the present names with the chain values behind the used ones.

        Returns:
            False if it stored none, because one name is there twice with different chain values.
        """
        names, holder = self._space.names, self._holders[bit]
        if self._map.store(names, count, batch.chains, batch.used, bit):
            self._replace(count, batch)
            if self._map.store(names, count, batch.chains, batch.used, bit):
                gone = self._map.remove(names, count, bit, batch.chains, batch.used)
                batch.add(gone, holder, stored=False)
                self.unmapped += count
                return False
        batch.add(count, holder, stored=True)
        if self._nameless:
            first = batch.used - count
            some = names.array[:count].tolist()
            for at in self._nameless.among(some):
                self._shown.append((some[at], int(batch.chains.array[first + at])))
        return True

    def _store_shown(self, batch: ChangeBatch) -> None:
        """Store a block for all holders that announced its name before it was known."""
        name, chain = self._shown.pop()
        for bit in self._nameless.take(name):
            self._space.names.array[0] = name
            batch.chains.array[batch.make_room()] = chain
            self._store(1, bit, batch)

    def _replace(self, count: int, batch: ChangeBatch) -> None:
        """Remove earlier blocks of the current names whose contents have changed."""
        names, at = self._space.names, batch.used
        chains = batch.chains.array[at : at + count].copy()
        known, masks = self._map.find(names, count)
        wrong = np.flatnonzero((known != chains) & (known != 0))
        here = names.array[:count].copy()
        names.array[: len(wrong)] = here[wrong]
        for bit, holder in enumerate(self._holders):
            if (masks[wrong] >> np.uint64(bit) & np.uint64(1)).any():
                gone = self._map.remove(names, len(wrong), bit, batch.chains, batch.make_room())
                batch.add(gone, holder, stored=False)
        names.array[:count] = here
        at = batch.make_room()
        batch.chains.array[at : at + count] = chains

    def _store_known(
        self,
        count: int,
        bit: int,
        batch: ChangeBatch,
        event: StoredBlocks | None = None,
        parent: int = 0,
    ) -> None:
        """Store those of the present names that are known; the others wait, with an event."""
        names = self._space.names
        here = names.array[:count].copy()
        chains, _ = self._map.find(names, count)
        known = np.flatnonzero(chains)
        if len(known):
            at = batch.make_room()
            names.array[: len(known)] = here[known]
            batch.chains.array[at : at + len(known)] = chains[known]
            self._store(len(known), bit, batch)
        if len(known) == count:
            return
        if event is None:
            self.unmapped += count - len(known)
            return
        waiting = here.tolist()
        self.dropped += self._waiting.add(
            WaitingBlocks(
                event.hashes,
                parent,
                waiting,
                bit,
                event.tokens,
                event.extras,
                set(waiting),
                event.has_lora,
            )
        )

    def _store_gaps(
        self, count: int, tokens: int, block_tokens: int, bit: int, batch: ChangeBatch
    ) -> None:
        """Store the present names, which are not all blocks of the event's tokens.

        Those that are unknown wait if the tokens are those of whole blocks.
        """
        here = self._space.names.array[:count].copy()
        chains, _ = self._map.find(self._space.names, count)
        unmapped = self.unmapped
        self._store_known(count, bit, batch)
        if tokens > count * block_tokens and tokens % block_tokens == 0:
            self.unmapped = unmapped
            self.dropped += self._nameless.add(here[chains == 0].tolist(), bit)

    def _store_waiting(
        self, event: WaitingBlocks, chain: int, block_tokens: int, batch: ChangeBatch
    ) -> None:
        """Store blocks that have waited; ``chain`` is the chain value of their parent."""
        count, names = len(event.names), self._space.names
        found = self._extend(event, block_tokens, chain, batch)
        if found != count * block_tokens or not self._has_room(len(event.there)):
            self.unmapped += len(event.there)
            return
        at = batch.used
        pairs = list(zip(event.names, batch.chains.array[at : at + count].tolist(), strict=True))
        self._awake += pairs
        there = [pair for pair in pairs if pair[0] in event.there]
        names.array[: len(there)] = [pair[0] for pair in there]
        batch.chains.array[at : at + len(there)] = [pair[1] for pair in there]
        self._store(len(there), event.bit, batch)

    def _has_room(self, count: int) -> bool:
        return len(self._map) + count <= self._limits.blocks
