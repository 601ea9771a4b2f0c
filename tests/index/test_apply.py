"""Payloads as engines and nodes send them, and the limits of what one of them may be."""

import random
from typing import Any

import numpy as np
import pytest

from kvstore.index import apply as applying
from kvstore.index.apply import EngineScope, KvGroup, shard_name
from kvstore.index.blocks import BlockLimits
from kvstore.index.payload import is_nothing
from kvstore.index.reading import UnreadableError
from kvstore.index.scope import key_chains, scope_seed, token_chains
from kvstore.mover.chains import Chains
from kvstore.protocol.page import page_keys
from tests.index.applied import (
    DOMAIN,
    KEYS,
    PACK,
    SECRET,
    SPACE,
    Applied,
    Place,
    each,
    pages,
    pages_gone,
    prompt,
    removed,
    stored,
)

DIGEST = "0123456789ABCDEF" + "00" * 24
GPU, CPU = Place("GPU"), Place("CPU")
CLEARED = {"type": "AllBlocksCleared"}


def of_keys(keys: list[bytes], space: str = SPACE) -> list[int]:
    """Their chain values."""
    chains: list[int] = key_chains(b"".join(keys), scope_seed(SECRET, "keys", space)).tolist()
    return chains


def of_tokens(tokens: list[int], size: int, lora: str = "", salt: str = "") -> list[int]:
    """Chain values of a prompt for an engine with hashes of its own."""
    seed = scope_seed(SECRET, "tokens", DOMAIN, size, lora, salt)
    chains: list[int] = token_chains(np.array(tokens, np.uint32), size, seed).tolist()
    return chains


def at(place: Place, chains: list[int]) -> set[tuple[int, Place]]:
    return {(chain, place) for chain in chains}


# Nodes


@each
def test_pages_of_a_node_are_known_by_space_medium_and_shard(chains: Chains) -> None:
    keys = [random.Random(n).randbytes(32) for n in range(10)]
    applied = Applied(chains)
    applied.apply(
        pages(keys[:5], shard=3), pages(keys[:2], shard=3, shard_digest=DIGEST),
        pages(keys[:1], medium="STORAGE"), pages(keys[5:7], space="cd" * 32),
        pages_gone(keys[1:3], shard=3), pages_gone(keys[:1], medium="STORAGE", space="cd" * 32),
    )  # fmt: skip

    assert applied.entries == {
        *at(Place("CPU", "3"), of_keys([keys[0], *keys[3:5]])),
        *at(Place("CPU", "0123456789abcdef"), of_keys(keys[:2])),
        *at(Place("STORAGE", "0"), of_keys(keys[:1])),
        *at(Place("CPU", "0"), of_keys(keys[5:7], "cd" * 32)),
    }
    applied.apply(pages_gone(keys, shard=3), pages_gone(keys, shard=3, shard_digest=DIGEST))
    assert {place.medium for _, place in applied.entries} == {"STORAGE", "CPU"}
    assert len(applied.entries) == 3


@pytest.mark.parametrize(
    ("digest", "name"),
    [
        (None, "7"), ("", "7"), ("ab" * 7, "7"), ("ab" * 8, "ab" * 8), ("AB" * 32, "ab" * 8),
        ("g" * 16, "7"), ("ab" * 7 + "\u0661\u0662", "7"),
    ],
)  # fmt: skip
def test_a_shard_is_named_by_its_digest_if_that_is_one(digest: str | None, name: str) -> None:
    assert shard_name(7, digest) == name


@each
@pytest.mark.parametrize("wrong", [[5], [b"x" * 31], [b"x" * 33], ["x" * 32], [None], 5, {}, None])
def test_a_space_without_keys_of_32_bytes_cannot_be_read(chains: Chains, wrong: Any) -> None:
    applied = Applied(chains)
    for event in (pages(KEYS[:1]), pages(wrong), pages_gone(wrong)):
        if event["block_hashes"] == KEYS[:1]:
            applied.apply(event)
        else:
            with pytest.raises(UnreadableError):
                applied.apply(event)


def test_more_spaces_than_are_remembered_are_still_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applying, "_SPACES_MAX", 3)
    applied = Applied()
    spaces = [f"{n:064}" for n in range(10)] * 2
    applied.apply(*(pages(KEYS[:1], space=space) for space in spaces))

    assert applied.entries == {
        (chain, Place("CPU", "0")) for space in spaces for chain in of_keys(KEYS[:1], space)
    }


# Engines with hashes of their own


@each
@pytest.mark.parametrize("size", [1, 16, 64])
def test_the_blocks_of_an_engine_are_those_of_the_prompt_with_the_same_scope(
    chains: Chains, size: int
) -> None:
    ids = prompt(8 * size)
    applied = Applied(chains)
    applied.apply(
        stored([1, 2, 3], ids[: 3 * size], extra_keys=[None] * 3),
        stored([4, 5], ids[3 * size : 5 * size], 3, medium="CPU", extra_keys=[None] * 2),
        stored([11, 12], ids[: 2 * size], lora_id=4, extra_keys=None),
        stored([21, 22], ids[: 2 * size], lora_id=4, lora_name="a", extra_keys=[["a"], ["a"]]),
        stored([31, 32], ids[: 2 * size], extra_keys=[["salt"], None]),
        stored([41], ids[:size], lora_name="a", extra_keys=[["a", "salt"]]),
        stored([42], ids[size : 2 * size], 41, lora_name="a", extra_keys=[["a"]]),
    )

    assert applied.entries == {
        *at(GPU, of_tokens(ids, size)[:3]),
        *at(CPU, of_tokens(ids, size)[3:5]),
        *at(GPU, of_tokens(ids, size, "\0004")[:2]),
        *at(GPU, of_tokens(ids, size, "a")[:2]),
        *at(GPU, of_tokens(ids, size, "", "salt")[:2]),
        *at(GPU, of_tokens(ids, size, "a", "salt")[:2]),
    }
    assert (applied.ingest.kind, applied.ingest.block_tokens) == ("tokens", size)


@each
def test_a_block_that_an_image_distinguishes_is_not_that_of_the_plain_prompt(
    chains: Chains,
) -> None:
    ids = prompt(12)
    applied = Applied(chains)
    for number, extra in enumerate((["x", 1], ["x", 2], ["y", 1])):
        hashes = [10 * number + n for n in range(3)]
        applied.apply(stored(hashes, ids, extra_keys=[None, [extra], None]))

    first, *others = of_tokens(ids, 4)
    assert len(applied.entries) == 1 + 2 * 3
    assert (first, GPU) in applied.entries
    assert not applied.entries & at(GPU, others)


@each
@pytest.mark.parametrize(
    "extra", ["x", 0, {}, [None, None], [["x"]] * 3, [5], ["x"], [[None], [[[]]]], [{}]]
)
def test_extra_keys_of_an_unknown_form_are_never_taken_for_nothing(
    chains: Chains, extra: Any
) -> None:
    ids = prompt(4)
    applied = Applied(chains)
    applied.apply(stored([9], ids))
    applied.apply(removed([9]), stored([5], ids, extra_keys=extra))

    assert not applied.entries & at(GPU, of_tokens(ids, 4)) or extra == [None, None]


@pytest.mark.parametrize("count", [0, 1, 15, 16, 70_000])
def test_a_list_of_none_is_nothing(count: int) -> None:
    assert is_nothing(PACK([None] * count))
    assert not is_nothing(PACK([None] * count + [[]]))
    assert not is_nothing(PACK([None] * count + [b"\xc0"]))


@each
def test_a_block_known_from_one_medium_needs_no_tokens_in_another(chains: Chains) -> None:
    ids = prompt(16)
    applied = Applied(chains)
    applied.apply(stored([1, 2, 3, 4], ids))
    applied.apply(stored([3, 7, 1], [], 2, medium="CPU"), removed([1, 2], medium="GPU"))
    known = of_tokens(ids, 4)

    assert applied.entries == {*at(GPU, known[2:]), *at(CPU, [known[0], known[2]])}
    assert applied.ingest.blocks.unmapped == 1
    applied.apply(removed([1, 2, 3, 4, 7], medium="STORAGE"), removed([1, 1, 3, 99], medium="CPU"))
    assert applied.entries == at(GPU, known[2:])
    assert len(applied.ingest.blocks) == 2


@each
@pytest.mark.parametrize(
    "tokens", [[], [1] * 3, [1] * 9, [1] * 7 + [-1], [1] * 7 + [2**32], ["x"] * 8, None, 5,
               [1.0] * 8, [True] * 8]
)  # fmt: skip
def test_blocks_without_their_token_ids_are_not_mapped(chains: Chains, tokens: Any) -> None:
    applied = Applied(chains, EngineScope(DOMAIN, "tokens", 4))
    for parent in (None, 77):
        applied.apply({**stored([1, 2], [], parent), "token_ids": tokens, "block_size": 4})

    assert not applied.entries
    assert applied.ingest.blocks.unmapped == 4
    assert applied.ingest.blocks.waiting == 0


@each
def test_a_hash_that_comes_again_with_other_tokens_is_what_it_was_last(chains: Chains) -> None:
    old, new = prompt(12), prompt(12, 2)
    applied = Applied(chains)
    applied.apply(stored([1, 2, 3], old), stored([1, 2], old[:8], medium="CPU"))
    applied.apply(stored([2, 3], new[:8]))

    assert applied.entries == {
        *at(GPU, of_tokens(old, 4)[:1]), *at(CPU, of_tokens(old, 4)[:1]),
        *at(GPU, of_tokens(new, 4)[:2]),
    }  # fmt: skip
    applied.apply(removed([1, 2, 3]), removed([1, 2], medium="CPU"))
    assert not applied.entries


@each
def test_a_hash_that_means_two_blocks_of_one_event_means_neither(chains: Chains) -> None:
    applied = Applied(chains)
    applied.apply(stored([8], prompt(4, 3)), stored([1, 2, 1], prompt(12)))

    assert applied.entries == at(GPU, of_tokens(prompt(4, 3), 4))
    assert applied.ingest.blocks.unmapped == 3


@each
def test_blocks_of_another_size_are_counted_not_indexed(chains: Chains) -> None:
    ids = prompt(16)
    applied = Applied(chains)
    applied.apply(stored([1, 2], ids[:8]), stored([3], ids[8:11], 2), stored([3], ids[8:16], 2))
    assert applied.entries == at(GPU, of_tokens(ids, 4)[:2])
    assert applied.ingest.other_size == 2

    registered = Applied(chains, EngineScope(DOMAIN, None, 8))
    registered.apply(stored([1], ids[:4]), stored([1], ids[:8]))
    assert registered.entries == at(GPU, of_tokens(ids, 8)[:1])
    assert registered.ingest.other_size == 1


@each
def test_every_group_has_its_own_blocks_and_says_what_a_hit_needs(chains: Chains) -> None:
    ids = prompt(16)
    applied = Applied(chains)
    kinds: list[tuple[Any, Any]] = [
        ("full_attention", None), ("sliding_window", 9), ("mamba", None), (None, None),
        ("something_new", 5), ("sliding_window", None),
    ]  # fmt: skip
    for group, (kind, window) in enumerate(kinds):
        spec = {"kv_cache_spec_kind": kind, "kv_cache_spec_sliding_window": window}
        applied.apply(stored([1, 2], ids[:8], group_idx=group, **spec))
        applied.apply(stored([1, 2], ids[:8], group_idx=group))
    # The parent of this one was never stored in its group.
    applied.apply(stored([3], ids[8:12], 2), removed([2], group_idx=1))
    applied.apply(stored([4], ids[12:], 3, group_idx=1), stored([9], [1, 2], 4, group_idx=6))

    # A block that is not full has another size, and changes nothing that is known of its group.
    partial = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 9}
    applied.apply(stored([8], ids[:2], group_idx=1, **partial))
    needs = [applied.ingest.groups[group].last_blocks for group in range(6)]
    assert needs == [0, 3, 1, 0, 0, 0]
    assert applied.ingest.groups[6] == KvGroup(0, 2)
    known = of_tokens(ids, 4)
    assert {chain for chain, place in applied.entries if place.group == 1} == {known[0], known[3]}
    assert {chain for chain, place in applied.entries if place.group == 0} == set(known[:3])
    assert {place.group for chain, place in applied.entries if chain == known[1]} == {0, 2, 3, 4, 5}


@each
def test_blocks_wait_for_their_parent_within_limits(chains: Chains) -> None:
    ids = prompt(400)
    applied = Applied(chains, limits=BlockLimits(1_000, 10, 10_000))
    applied.apply(stored([0], ids[:4]))
    for number in range(2, 20):
        applied.apply(stored([number], ids[4 * number : 4 * number + 4], number - 1))
    assert (applied.ingest.blocks.waiting, applied.ingest.blocks.dropped) == (10, 8)
    applied.apply(stored([1], ids[4:8], 0))
    assert len(applied.entries) == 2
    applied.apply(*(stored([n], ids[4 * n : 4 * n + 4], n - 1) for n in range(2, 10)))
    assert applied.entries == at(GPU, of_tokens(ids, 4)[:20])
    assert applied.ingest.blocks.waiting == 0

    small = Applied(chains, limits=BlockLimits(1_000, 1_000, 300))
    small.apply(stored([0], ids[:4]))
    small.apply(*(stored([n], ids[4 * n : 4 * n + 4], n - 1) for n in range(2, 50)))
    assert 3 < small.ingest.blocks.waiting < 15
    assert small.ingest.blocks.waiting + small.ingest.blocks.dropped == 48


@each
def test_an_engine_with_more_blocks_than_are_remembered_loses_some(chains: Chains) -> None:
    ids = prompt(80)
    applied = Applied(chains, limits=BlockLimits(10, 10, 1_000))
    applied.apply(stored(list(range(8)), ids[:32]), stored([8, 9, 10], ids[32:44], 7))
    assert len(applied.ingest.blocks) == 8
    assert applied.ingest.blocks.unmapped == 3
    applied.apply(removed([0, 1]), stored([8, 9], ids[32:40], 7), stored(list(range(2, 8)), [], 1))
    assert applied.entries == at(GPU, of_tokens(ids, 4)[2:10])


@each
def test_all_that_a_worker_has_is_dropped_in_its_place(chains: Chains) -> None:
    ids = prompt(16)
    applied = Applied(chains)
    applied.apply(
        stored([1, 2], ids[:8]), stored([7], ids[8:12], 6), pages(KEYS[:2]), CLEARED,
        stored([3], ids[8:12], 2), pages(KEYS[3:5]), stored([1], ids[:4]),
    )  # fmt: skip

    assert applied.entries == {
        *at(GPU, of_tokens(ids, 4)[:1]), *at(Place("CPU", "0"), of_keys(KEYS[3:5])),
    }  # fmt: skip
    assert applied.ingest.blocks.waiting == 1
    applied.ingest.clear()
    assert not applied.entries
    assert applied.ingest.kind is None
    assert len(applied.ingest.blocks) == applied.ingest.blocks.waiting == 0


# SGLang


def page_hashes(ids: list[int], size: int) -> list[int]:
    """As SGLang publishes them."""
    keys = page_keys(ids, size)
    return [int.from_bytes(key[:8], "big", signed=True) for key in keys]


@each
def test_hashes_that_begin_a_prefix_key_are_recognised_and_need_no_tokens(
    chains: Chains,
) -> None:
    ids = prompt(40)
    hashes = page_hashes(ids, 4)
    seed = scope_seed(SECRET, "keys", DOMAIN, 4)
    expected = key_chains(page_keys(ids, 4).packed, seed).tolist()

    applied = Applied(chains)
    applied.apply(stored(hashes[6:8], ids[24:32], hashes[5]))  # before it is known what they are
    applied.apply(stored(hashes[8:9], ids[32:36], hashes[7]), removed(hashes[6:7]))
    assert not applied.entries
    applied.apply(*(
        stored([one], ids[4 * n : 4 * n + 4], hashes[n - 1] if n else None)
        for n, one in enumerate(hashes[:5])
    ))  # fmt: skip
    assert applied.ingest.kind == "keys"
    assert applied.entries == at(GPU, [*expected[:5], *expected[7:9]])
    applied.apply({**stored(hashes[9:], [], medium="CPU_PINNED"), "block_size": 4})
    applied.apply(removed([*hashes[:2], 99]), removed(hashes, medium="DISK"))
    assert applied.entries == {
        *at(GPU, [*expected[2:5], *expected[7:9]]), *at(Place("CPU_PINNED"), expected[9:]),
    }  # fmt: skip
    assert len(applied.ingest.blocks) == applied.ingest.blocks.waiting == 0


@each
def test_a_lora_of_an_engine_that_publishes_prefix_keys_is_apart(chains: Chains) -> None:
    ids = prompt(8)
    hashes = page_hashes(ids, 4)
    applied = Applied(chains, EngineScope(DOMAIN, "keys", 4))
    applied.apply(stored(hashes, ids, lora_id=3))
    packed = page_keys(ids, 4).packed
    of_lora = key_chains(packed, scope_seed(SECRET, "keys", DOMAIN, 4, "\0003")).tolist()
    assert applied.entries == at(GPU, of_lora)
    applied.apply(stored(hashes, ids))
    assert len(applied.entries) == 4
    applied.apply(removed(hashes[1:]))
    plain = key_chains(packed, scope_seed(SECRET, "keys", DOMAIN, 4)).tolist()
    assert applied.entries == at(GPU, [plain[0], of_lora[0]])


@each
def test_whoever_is_registered_as_one_kind_is_not_looked_at(chains: Chains) -> None:
    ids = prompt(8)
    applied = Applied(chains, EngineScope(DOMAIN, "tokens", 4))
    applied.apply(stored(page_hashes(ids, 4), ids))
    assert applied.entries == at(GPU, of_tokens(ids, 4))
    applied.ingest.clear()
    assert applied.ingest.kind == "tokens"


@each
def test_blocks_of_a_group_that_leaves_some_out_are_known_once_another_group_has_them_all(
    chains: Chains,
) -> None:
    """vLLM announces a state, or what is in a window, with the tokens of all blocks before."""
    ids = prompt(16)
    known = of_tokens(ids, 4)
    state = {"group_idx": 0, "kv_cache_spec_kind": "mamba", "block_size": 4}
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "block_size": 4}
    full = stored([1, 2, 3, 4], ids, group_idx=2, kv_cache_spec_kind="full_attention")
    early = [{**stored([4], ids), **state}, {**stored([2, 3, 4], ids), **window}]

    applied = Applied(chains)
    applied.apply(*early)
    assert not applied.entries, "nobody knows which tokens are those of which block"
    assert applied.ingest.blocks.waiting == 4
    applied.apply(removed([3, 9], group_idx=1), full)
    places = [Place("GPU", "", group) for group in range(3)]
    whole = {(chain, places[2]) for chain in known}
    wanted = {(known[3], places[0]), (known[1], places[1]), (known[3], places[1])}
    assert applied.entries == whole | wanted, "without the one that was removed"
    assert applied.ingest.blocks.waiting == applied.ingest.blocks.unmapped == 0
    applied.apply(removed([4], group_idx=0), {**stored([3], ids[:12]), **state})
    assert (known[3], places[0]) not in applied.entries
    assert (known[2], places[0]) in applied.entries, "a name that is known says it at once"

    small = Applied(chains, limits=BlockLimits(1_000, 3, 1 << 20))
    small.apply(*early, full)
    assert small.ingest.blocks.dropped == 2, "the oldest name, of two groups"
    assert {chain for chain, place in small.entries if place != places[2]} == set(known[1:3])


@each
def test_blocks_that_wait_for_their_meaning_are_forgotten_when_an_engine_clears_its_cache(
    chains: Chains,
) -> None:
    ids = prompt(16)
    state = {"group_idx": 0, "kv_cache_spec_kind": "mamba", "block_size": 4}
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "block_size": 4}
    full = stored([1, 2, 3, 4], ids, group_idx=2, kv_cache_spec_kind="full_attention")
    applied = Applied(chains)
    applied.apply({**stored([4], ids), **state}, {**stored([2, 3, 4], ids), **window})
    applied.apply(CLEARED, full)

    assert applied.entries == {(chain, Place("GPU", "", 2)) for chain in of_tokens(ids, 4)}
    assert applied.ingest.blocks.waiting == 0
