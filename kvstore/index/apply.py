"""Turns the event payloads of one worker into changes of the index. Pure.

Events with a space have prefix keys. All others have an engine's own hashes, which
:class:`~kvstore.index.blocks.EngineBlocks` maps by their tokens, unless they are the beginning of
prefix keys, as SGLang's are. If a payload cannot be read, the caller must treat it as lost.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from kvstore.index.batch import ChangeBatch
from kvstore.index.blocks import BlockLimits, EngineBlocks, StoredBlocks, Workspace
from kvstore.index.payload import (
    BlocksRemoved,
    BlocksStored,
    first_hash,
    is_nothing,
    read_extras,
    read_payload,
)
from kvstore.index.reading import UnreadableError
from kvstore.index.scope import ChainKind, scope_seed
from kvstore.mover.chains import U64_MAX

MEDIA_MAX: Final = 8
"""Maximum media of one worker; events of further media are not applied."""
GROUPS_MAX: Final = 64
"""KV groups have smaller numbers."""
NAMES_MAX = 2_048
"""Maximum names that one worker has for its holders: shards have a number and a digest."""
BLOCK_TOKENS_MAX: Final = 65_536
WINDOW_MAX: Final = 1 << 31
"""Tokens of a longer sliding window are all tokens of any prompt."""
_UNNAMED: Final = "\0"
"""Prefix of the id of a LoRA without a name; no name starts with it."""
_MEDIUM_DEFAULT: Final = "GPU"
"""Medium of engines that do not publish one."""
_SHARD_DIGITS: Final = 16
_SPACES_MAX: Final = 1_024
_WINDOWS: Final = ("sliding_window", "sliding_window_mla")
_WORK: Final = 4_096
"""Blocks per step, each event counting as 16 more: a few milliseconds."""
_EVENT_WORK: Final = 16
_CLEAR_WORK: Final = 256
_EXTRA_WORK: Final = 16
"""Bytes of extra keys that are as much work as a block."""

FindHolder = Callable[[str, str, str, int], int | None]
"""(worker, medium, shard, KV group) → number of the holder; None if there are too many."""


class EngineScope(NamedTuple):
    """What is known about the events of an engine when it is registered.

    Attributes:
        domain: the sharing domain of its blocks, part of the seed of its chains.
        kind: whether its hashes are the start of prefix keys; None = determined by the first event.
        block_tokens: tokens in a block; 0 = as in the first event.
    """

    domain: str
    kind: ChainKind | None = None
    block_tokens: int = 0


class KvGroup(NamedTuple):
    """The requirements of a hit on one KV group of an engine.

    Attributes:
        last_blocks: the number of blocks at the end of the prefix; 0 = all blocks.
        block_tokens: tokens in its blocks. If that is not the engine's number, none of its blocks
            is in the index.
    """

    last_blocks: int
    block_tokens: int


class EventIngest:
    """Turns the events of one worker into changes.

    Args:
        worker: name in the index.
        scope: for events without a space.
        holder: returns the number of a holder of this worker.
        dropped: called with the worker when it has lost all blocks: applies the changes so
            far, then deletes all entries of this worker. Numbers of holders end with that.
        workspace: of the calling thread.
        limits: of its blocks, if it has hashes of its own.

    Attributes:
        kind: kind of the chain values of an engine; None until an event has shown it.
        block_tokens: tokens in a block of an engine; 0 until an event has shown it.
        groups: KV groups of an engine that have stored blocks, by number.
        blocks: the engine's blocks.
        published: publication time of the newest batch, seconds since the epoch.
        skipped: events that were not applied: of unknown kinds, with extra keys of an unknown form,
            or with too many media or groups.
        other_size: blocks that were not applied, because of their size.
        without_holder: events that were not applied, because there are too many holders.
    """

    def __init__(
        self,
        worker: str,
        scope: EngineScope,
        holder: FindHolder,
        dropped: Callable[[str], None],
        workspace: Workspace,
        limits: BlockLimits,
    ) -> None:
        self._worker = worker
        self._scope = scope
        self._find_holder = holder
        self._dropped = dropped
        self._space = workspace
        self.blocks = EngineBlocks(workspace, limits)
        self.published = 0.0
        self.skipped = 0
        self.other_size = 0
        self.without_holder = 0
        self._forget()

    def _forget(self) -> None:
        self.kind = self._scope.kind
        self.block_tokens = self._scope.block_tokens
        self.groups: dict[int, KvGroup] = {}
        self._specs: dict[int, tuple[str | None, int | None, int]] = {}  # what groups were made of
        self._holders: dict[tuple[str | None, str | None, int], int] = {}
        self._listed: set[tuple[str | None, str]] = set()  # medium and shard of pages of a snapshot
        self._media: set[str] = set()
        self._seeds: dict[str, int] = {}  # of spaces
        self._set_seed()

    def clear(self) -> None:
        """Delete all entries of this worker, and forget its kind."""
        self.blocks.clear()
        self._forget()
        self._dropped(self._worker)

    def apply(self, payload: bytes, batch: ChangeBatch) -> Iterator[None]:
        """Append the changes of one message to a batch, in steps; the caller may apply between.

        Raises:
            UnreadableError: the payload cannot be read; some of its events may have been applied.
        """
        self.published, events, unknown = read_payload(
            payload, self._space.chains, self._space.spots
        )
        self.skipped += unknown
        work = 0
        for event in events:
            before = batch.used
            work += _EVENT_WORK
            if type(event) is BlocksStored:
                if event.space is not None:
                    self._node_keys(event, event.space, batch, stored=True)
                else:
                    work += len(bytes(event.extra_keys)) // _EXTRA_WORK
                    self._stored(event, batch)
                    while self.blocks.wake(self.block_tokens, batch):
                        yield
            elif type(event) is BlocksRemoved:
                if event.space is not None:
                    self._node_keys(event, event.space, batch, stored=False)
                else:
                    self._removed(event, batch)
            else:
                work += _CLEAR_WORK
                self.clear()
            work += max(batch.used - before, 0)
            if work >= _WORK:
                work = 0
                yield

    # Nodes

    def listed(self, medium: str, shard: str) -> int | None:
        """Number of the holder of a node's pages that a snapshot lists, and events may remove.

        Args:
            medium: their medium.
            shard: digest of their shard, as in events.

        Returns:
            None if there are too many holders.
        """
        name = shard_name(0, shard)
        if len(self._listed) < NAMES_MAX:
            self._listed.add((medium, name))
        return self._find_holder(self._worker, medium, name, 0)

    def _node_keys(
        self, event: BlocksStored | BlocksRemoved, space: str, batch: ChangeBatch, *, stored: bool
    ) -> None:
        """Prefix keys of a space."""
        seed = self._seeds.get(space)
        if seed is None:
            if len(self._seeds) >= _SPACES_MAX:
                self._seeds.clear()
            seed = self._seeds[space] = scope_seed(self._space.secret, "keys", space)
        at = (event.medium, event.shard_digest, event.shard)
        holder = self._holders.get(at)
        if holder is None:
            shard = shard_name(event.shard, event.shard_digest)
            if stored or (event.medium, shard) in self._listed:
                holder = self._new_holder(at, shard, 0)
        count = self._write_keys(event, seed, batch, integers=False)
        if holder is not None:
            batch.add(count, holder, stored=stored)

    def _write_keys(
        self, event: BlocksStored | BlocksRemoved, seed: int, batch: ChangeBatch, *, integers: bool
    ) -> int:
        """Write the chain values of prefix keys behind the used ones; returns their number."""
        at, raw = batch.make_room(), bytes(event.block_hashes)
        count = self._space.chains.keys(raw, seed, batch.chains, at, integers=integers)
        if count < 0:
            raise UnreadableError("an event has hashes that are not prefix keys")
        return count

    # Engines

    def _stored(self, event: BlocksStored, batch: ChangeBatch) -> None:
        group = event.group_idx or 0
        if not self._is_our_size(event, group):
            self.other_size += self.blocks.count(bytes(event.block_hashes))
            return
        if self.kind is None:
            self._recognise(event, batch)
        at = (event.medium, None, group)
        holder = self._holders.get(at)
        if holder is None:
            holder = self._new_holder(at, "", group)
            if holder is None:
                return
        lora = _lora(event)
        if self.kind != "keys":
            self._store_by_tokens(event, lora, holder, batch)
        elif lora:  # the hashes do not say so, nor do removals
            count = self._write_keys(event, self._scope_seed(lora, ""), batch, integers=True)
            self.blocks.named(bytes(event.block_hashes), count, holder, batch)
        else:
            count = self._write_keys(event, self._seed, batch, integers=True)
            batch.add(count, holder, stored=True)

    def _store_by_tokens(
        self, event: BlocksStored, lora: str, holder: int, batch: ChangeBatch
    ) -> None:
        """Blocks with hashes of the engine's own."""
        extra_keys, salt, extras = bytes(event.extra_keys), "", None
        parent, seed = event.parent_block_hash, self._seed
        if not is_nothing(extra_keys):
            try:
                salt, extras = read_extras(extra_keys, event.lora_name, is_root=parent is None)
            except UnreadableError:
                self.skipped += 1
                return
        if parent is None and (lora or salt) and self.kind is not None:
            seed = self._scope_seed(lora, salt)
        stored = StoredBlocks(
            bytes(event.block_hashes), bytes(event.token_ids), parent, seed, extras, bool(lora)
        )
        self.blocks.stored(stored, self.block_tokens, holder, batch)

    def _removed(self, event: BlocksRemoved, batch: ChangeBatch) -> None:
        holder = self._holders.get((event.medium, None, event.group_idx or 0))
        if holder is None:
            return  # it has never stored anything
        if self.kind == "keys":
            count = self._write_keys(event, self._seed, batch, integers=True)
            batch.add(count, holder, stored=False)
        if self.kind != "keys" or len(self.blocks):
            self.blocks.removed(bytes(event.block_hashes), holder, batch)

    def _is_our_size(self, event: BlocksStored, group: int) -> bool:
        """Whether the event's blocks have the engine's size; keeps what is known of its group."""
        size = event.block_size
        if not self.block_tokens and size <= BLOCK_TOKENS_MAX:
            self.block_tokens = size
            self._set_seed()
        spec = (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window, size)
        if self._specs.get(group) != spec and (
            group in self._specs or len(self._specs) < GROUPS_MAX
        ):
            self._specs[group] = spec
            known, is_ours = self.groups.get(group), size == self.block_tokens
            if known is None or (is_ours and (spec[0] is not None or known.block_tokens != size)):
                self.groups[group] = KvGroup(_last_blocks(*spec), size)
        return size == self.block_tokens

    def _recognise(self, event: BlocksStored, batch: ChangeBatch) -> None:
        """Compare the first hash of a chain with the prefix key of its tokens."""
        hashes = bytes(event.block_hashes)
        count = self.blocks.count(hashes)
        found = self._space.chains.read_ids(bytes(event.token_ids), self._space.ids)
        if event.parent_block_hash is not None or not count or found != count * self.block_tokens:
            return
        key = hashlib.sha256(self._space.ids.array[: self.block_tokens].tobytes()).digest()
        first = first_hash(hashes)
        if isinstance(first, int):
            is_key = first & U64_MAX == int.from_bytes(key[:8], "big")
        else:
            is_key = first == key
        self.kind = "keys" if is_key else "tokens"
        self._set_seed()
        if is_key:
            self.blocks.release_as_keys(self._seed, batch)

    def _set_seed(self) -> None:
        """The seed of chains without LoRA and salt; 0 until kind and block size are known."""
        self._seed = self._scope_seed("", "") if self.kind and self.block_tokens else 0

    def _scope_seed(self, lora: str, salt: str) -> int:
        assert self.kind is not None
        domain, size = self._scope.domain, self.block_tokens
        return scope_seed(self._space.secret, self.kind, domain, size, lora, salt)

    def _new_holder(
        self, at: tuple[str | None, str | None, int], shard: str, group: int
    ) -> int | None:
        """Number of a holder that has not stored anything yet; None if there are too many."""
        medium = at[0] or _MEDIUM_DEFAULT
        known_media = medium in self._media or len(self._media) < MEDIA_MAX
        is_full = len(self._holders) >= NAMES_MAX
        if is_full or not known_media or not 0 <= group < GROUPS_MAX:
            self.skipped += 1
            return None
        holder = self._find_holder(self._worker, medium, shard, group)
        if holder is None:
            self.without_holder += 1
            return None
        self._media.add(medium)
        self._holders[at] = holder
        return holder


def shard_name(number: int, digest: str | None) -> str:
    """Name of a shard in the index: the first 16 hex digits of its digest, else its number."""
    digits = (digest or "")[:_SHARD_DIGITS].lower()
    if len(digits) == _SHARD_DIGITS and set(digits) <= set("0123456789abcdef"):
        return digits
    return str(number)


def _lora(event: BlocksStored) -> str:
    """The LoRA of an event's blocks, as prompts name it; of one with an id only, no prompt does."""
    if event.lora_name is not None:
        return event.lora_name
    return "" if event.lora_id is None else f"{_UNNAMED}{event.lora_id}"


def _last_blocks(kind: str | None, window: int | None, block_tokens: int) -> int:
    """How many blocks at the end of a prefix a hit needs; 0 = all."""
    if kind in _WINDOWS and window is not None and 0 < window <= WINDOW_MAX:
        return -(-window // block_tokens)
    return 1 if kind == "mamba" else 0
