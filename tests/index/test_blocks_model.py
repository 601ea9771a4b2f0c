"""Goal: of an engine with hashes of its own, the index knows what its events say, and nothing else.

The model is a set of blocks, each named by all its tokens, its LoRA, its salt and its images.
"""

import struct
from functools import cache
from typing import Any, NamedTuple

import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.index.blocks import BlockLimits
from kvstore.index.scope import scope_seed
from kvstore.mover.chains import Chains
from tests.index.applied import DOMAIN, PACK, SECRET, Applied, Place, each, removed

SIZE = 3
ROOM = BlockLimits(1_000_000, 100_000, 1 << 30)


class Part(NamedTuple):
    """The content of one block."""

    tokens: tuple[int, ...]
    image: str = ""


class Block(NamedTuple):
    """A block: everything up to its end."""

    lora: str
    salt: str
    parts: tuple[Part, ...]

    @property
    def parent(self) -> "Block | None":
        return self._replace(parts=self.parts[:-1]) if len(self.parts) > 1 else None


@cache
def chain_of(block: Block) -> int:
    chain = scope_seed(SECRET, "tokens", DOMAIN, SIZE, block.lora, block.salt)
    for part in block.parts:
        data = struct.pack(f"<{SIZE}I", *part.tokens)
        data += PACK([[part.image, 7]]) if part.image else b""
        chain = xxhash.xxh3_64_intdigest(data, chain)
    return chain


def hash_of(block: Block, as_bytes: bool) -> int | bytes:
    digest = xxhash.xxh3_128_digest(repr(block).encode())
    return digest * 2 if as_bytes else int.from_bytes(digest[:8], "big")


class Run(NamedTuple):
    """Blocks ``first`` to ``last`` of a prompt, in a place that may leave out some of them."""

    prompt: Block
    first: int
    last: int
    place: Place
    left_out: frozenset[int] = frozenset()

    @property
    def numbers(self) -> list[int]:
        return [number for number in range(self.first, self.last) if number not in self.left_out]

    @property
    def blocks(self) -> list[Block]:
        return [self.prompt._replace(parts=self.prompt.parts[: n + 1]) for n in self.numbers]

    def event(self, as_bytes: bool) -> dict[str, Any]:
        parts = self.prompt.parts[self.first : self.last]
        extra: list[Any] = []
        for number in self.numbers:
            part = self.prompt.parts[number]
            keys: list[Any] = [self.prompt.lora] if self.prompt.lora else []
            keys += [[part.image, 7]] if part.image else []
            keys += [self.prompt.salt] if self.prompt.salt and number == 0 else []
            extra.append(keys or None)
        parent = self.prompt._replace(parts=self.prompt.parts[: self.first])
        return {
            "type": "BlockStored",
            "block_hashes": [hash_of(block, as_bytes) for block in self.blocks],
            "parent_block_hash": hash_of(parent, as_bytes) if self.first else None,
            "token_ids": [token for part in parts for token in part.tokens],
            "block_size": SIZE,
            "lora_id": 1 if self.prompt.lora else None,
            "lora_name": self.prompt.lora or None,
            "medium": self.place.medium,
            "extra_keys": extra,
            "group_idx": self.place.group,
        }


def gone(block: Block, place: Place, as_bytes: bool) -> dict[str, Any]:
    return removed([hash_of(block, as_bytes)], medium=place.medium, group_idx=place.group)


tokens = st.tuples(*[st.sampled_from([0, 1, 70_000]) for _ in range(SIZE)])
parts = st.builds(Part, tokens, st.sampled_from(["", "", "", "an image"]))
prompts = st.builds(
    Block,
    st.sampled_from(["", "", "a", "b"]),
    st.sampled_from(["", "", "s"]),
    st.lists(parts, min_size=1, max_size=5).map(tuple),
)
places = st.builds(Place, st.sampled_from(["GPU", "CPU"]), st.just(""), st.sampled_from([0, 1]))


@st.composite
def run_of(draw: Any, prompt: Block) -> Run:
    first = draw(st.integers(0, len(prompt.parts) - 1))
    last = draw(st.integers(first + 1, len(prompt.parts)))
    left_out = draw(
        st.sets(st.integers(first, last - 1)) if draw(st.booleans()) else st.just(set())
    )
    return Run(prompt, first, last, draw(places), frozenset(left_out - {last - 1}))


@each
@given(st.data(), st.lists(prompts, min_size=1, max_size=5), st.booleans())
def test_blocks_that_arrive_in_any_order_are_all_known_in_the_end(
    chains: Chains, data: st.DataObject, several: list[Block], as_bytes: bool
) -> None:
    runs = [data.draw(run_of(prompt)) for prompt in several for _ in range(2)]
    runs += [Run(prompt, 0, len(prompt.parts), Place("CPU", "", 1)) for prompt in several]
    runs = data.draw(st.permutations(runs))
    applied = Applied(chains, limits=ROOM)
    for run in runs:
        applied.apply(run.event(as_bytes))
        known = {(chain_of(block), one.place) for one in runs for block in one.blocks}
        assert applied.entries <= known

    assert applied.entries == known
    assert applied.ingest.blocks.waiting == applied.ingest.blocks.unmapped == 0
    assert applied.ingest.kind == "tokens"
    names = {block for run in runs for block in run.blocks}
    assert len(applied.ingest.blocks) == len(names)

    drop = data.draw(st.sets(st.sampled_from(sorted(names)), max_size=4))
    for block in drop:
        applied.apply(*(gone(block, place, as_bytes) for place in {one.place for one in runs}))
    kept = {(chain_of(b), one.place) for one in runs for b in one.blocks if b not in drop}
    assert applied.entries == kept
    assert len(applied.ingest.blocks) == len(names - drop)


@each
@settings(max_examples=200)
@given(st.data(), st.lists(prompts, min_size=1, max_size=4), st.integers(0, 12))
def test_who_joins_late_knows_only_what_is_there_and_all_of_it_after_a_replay(
    chains: Chains, data: st.DataObject, several: list[Block], joins_at: int
) -> None:
    applied = Applied(chains, limits=ROOM)
    there: set[tuple[Block, Place]] = set()
    for step in range(data.draw(st.integers(5, 25))):
        event: dict[str, Any]
        if there and data.draw(st.integers(0, 2)) == 0:
            block, place = data.draw(st.sampled_from(sorted(there)))
            there.discard((block, place))
            event = gone(block, place, False)
        else:
            run = data.draw(run_of(data.draw(st.sampled_from(several))))
            there |= {(block, run.place) for block in run.blocks}
            event = run.event(False)
        if step >= joins_at:
            applied.apply(event)
        assert applied.entries <= {(chain_of(block), place) for block, place in there}

    replay = [Run(block, len(block.parts) - 1, len(block.parts), place) for block, place in there]
    replay = data.draw(st.permutations(replay))
    applied.apply(*(run.event(False) for run in replay), *(run.event(False) for run in replay))
    held = {block for block, _ in there}
    sure = {
        (chain_of(block), place)
        for block, place in there
        if all(block._replace(parts=block.parts[:n]) in held for n in range(1, len(block.parts)))
    }
    assert sure <= applied.entries <= {(chain_of(block), place) for block, place in there}


@each
def test_prompts_of_another_scope_have_other_chain_values(chains: Chains) -> None:
    part = Part((1, 2, 3))
    blocks = [Block(lora, salt, (part,)) for lora in ("", "a") for salt in ("", "a", "s")]
    blocks.append(Block("", "", (Part((1, 2, 3), "an image"),)))
    applied = Applied(chains)
    applied.apply(*(Run(block, 0, 1, Place("GPU")).event(False) for block in blocks))

    assert {chain for chain, _ in applied.entries} == {chain_of(block) for block in blocks}
    assert len(applied.entries) == 7


@each
@given(st.lists(prompts, min_size=2, max_size=2, unique=True), prompts)
def test_blocks_of_an_unknown_parent_are_what_their_parent_turns_out_to_be_and_nothing_before(
    chains: Chains, several: list[Block], behind: Block
) -> None:
    """Two engines that hold different prefixes announce the same: decision 18."""
    place = Place("GPU")
    for prefix in several:
        whole = prefix._replace(parts=prefix.parts + behind.parts)
        first, last = len(prefix.parts), len(whole.parts)
        announced = Run(whole, first, last, place)
        event = announced.event(False)
        event["parent_block_hash"] = 1_000  # hashes mean nothing, and are those of both engines
        event["block_hashes"] = [2_000 + number for number in range(last - first)]
        applied = Applied(chains, limits=ROOM)
        applied.apply(event)
        assert applied.entries == set(), "its tokens are those of both"
        assert applied.ingest.blocks.waiting == last - first

        parents = Run(whole, 0, first, place).event(False)
        parents["block_hashes"] = [*range(3_000, 3_000 + first - 1), 1_000]
        applied.apply(parents)
        assert applied.entries == {
            (chain_of(block), place) for block in Run(whole, 0, last, place).blocks
        }
        assert applied.ingest.blocks.waiting == 0
