"""kvstore.protocol.page: names of pages, computed here a second time and independently."""

import hashlib
import struct
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol import page
from kvstore.protocol.errors import InvalidArgument, LayoutMismatch
from kvstore.protocol.page import (
    CanonicalLayout,
    OpaqueLayout,
    PrefixKeys,
    ShardSpec,
    SpaceIdentity,
    digest_seed,
    extend_keys,
    page_keys,
    page_seeds,
)

token_ids = st.integers(0, 2**32 - 1)
SPACE = SpaceIdentity(model="m", kv_dtype="bfloat16", page_tokens=64)
SHARD = ShardSpec(layout=CanonicalLayout(128), layers=(0, 32), heads=(0, 8))
OPAQUE = OpaqueLayout(engine="vllm", version="1", isa="avx2", block_tokens=16, block_bytes=4_096)


def chain(tokens: list[int], page_tokens: int) -> list[bytes]:
    """SGLang's documented page hashes: sha256(previous digest, little-endian uint32 tokens)."""
    digests: list[bytes] = []
    for start in range(0, len(tokens) - page_tokens + 1, page_tokens):
        words = struct.pack(f"<{page_tokens}I", *tokens[start : start + page_tokens])
        previous = digests[-1] if digests else b""
        digests.append(hashlib.sha256(previous + words).digest())
    return digests


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What each sha256 of the module starts with, one entry a hash."""
    started: list[bytes] = []

    def sha256(start: bytes = b""):
        started.append(start)
        return hashlib.sha256(start)

    monkeypatch.setattr(page, "hashlib", SimpleNamespace(sha256=sha256))
    return started


# Prefix keys


@given(tokens=st.lists(token_ids, max_size=40), page_tokens=st.integers(1, 9))
def test_keys_are_the_documented_chain_and_the_tail_has_none(tokens, page_tokens):
    keys = page_keys(tokens, page_tokens)

    assert list(keys) == chain(tokens, page_tokens)
    assert keys.packed == b"".join(chain(tokens, page_tokens))
    assert keys.parent == b""


def test_a_known_chain_has_its_known_digest():
    """Written down once, so that no later change of this file and of the module hides another."""
    keys = page_keys([1, 2, 3, 4], 2)

    assert keys[0].hex() == hashlib.sha256(bytes.fromhex("0100000002000000")).hexdigest()
    assert keys[1] == hashlib.sha256(keys[0] + bytes.fromhex("0300000004000000")).digest()


@pytest.mark.parametrize("dtype", ["<u4", ">u4", "<i8", "<u8", "<i4", "<u2"])
def test_an_array_of_any_integer_type_and_order_gives_the_keys_of_its_numbers(dtype):
    tokens = list(range(100, 400, 3))
    array = np.array(tokens, dtype=dtype)
    strided = np.repeat(array, 2)[::2]

    assert list(page_keys(array, 8)) == chain(tokens, 8)
    assert list(page_keys(strided, 8)) == chain(tokens, 8)
    assert list(page_keys(tuple(tokens), 8)) == chain(tokens, 8)


def test_changing_the_callers_array_afterwards_changes_nothing():
    tokens = np.arange(8, dtype=np.uint32)
    keys = page_keys(tokens, 4)
    tokens[:] = 99

    assert keys.tokens is not None
    assert keys.tokens.tolist() == list(range(8))
    assert page_keys(range(8), 4, known=keys) == keys


def test_a_prompt_shorter_than_a_page_has_no_keys():
    keys = page_keys([1, 2, 3], 4)

    assert (len(keys), keys.packed, list(keys)) == (0, b"", [])


@given(
    tokens=st.lists(token_ids, max_size=40),
    grown=st.lists(token_ids, max_size=20),
    page_tokens=st.integers(1, 7),
    seed=st.binary(max_size=3),
)
def test_incremental_hashing_equals_hashing_from_scratch(tokens, grown, page_tokens, seed):
    known = page_keys(tokens, page_tokens, seed=seed)
    whole = tokens + grown

    keys = page_keys(whole, page_tokens, seed=seed, known=known)

    assert keys == page_keys(whole, page_tokens, seed=seed)
    assert keys.tokens is not None
    assert keys.tokens.tolist() == whole[: len(keys) * page_tokens]


def test_a_grown_prompt_hashes_only_its_new_pages(hashed):
    known = page_keys(range(1_000), 10)
    assert len(hashed) == 100
    hashed.clear()

    keys = page_keys(range(1_035), 10, known=known)

    assert len(hashed) == 3
    assert hashed[0] == known[-1]
    assert list(keys) == chain(list(range(1_035)), 10)


def test_a_grown_prompt_without_a_new_full_page_hashes_nothing(hashed):
    known = page_keys(range(20), 10)
    hashed.clear()

    assert page_keys(range(29), 10, known=known) == known
    assert hashed == []


@pytest.mark.parametrize(
    "known",
    [
        pytest.param(page_keys([9, *range(1, 20)], 10), id="other tokens"),
        pytest.param(page_keys(range(40), 10), id="longer than the prompt"),
        pytest.param(page_keys(range(20), 5), id="other page size"),
        pytest.param(page_keys(range(20), 10, seed=b"salt"), id="other seed"),
        pytest.param(
            page_keys([7] * 10 + [*range(20)], 10)[1:], id="same tokens, not from the start"
        ),
        pytest.param(PrefixKeys(page_keys(range(20), 10).packed), id="no tokens"),
    ],
)
def test_known_keys_that_do_not_fit_are_not_used(known):
    assert list(page_keys(range(30), 10, known=known)) == chain(list(range(30)), 10)


# Seeds of chains


@given(first=st.binary(min_size=1, max_size=40), second=st.binary(max_size=40))
def test_seeds_separate_chains(first, second):
    plain = page_keys(range(8), 4, seed=first)
    other = page_keys(range(8), 4, seed=second)

    assert (plain == other) == (first == second)
    assert not (set(plain) & set(other)) or first == second


def test_a_salt_that_is_another_chains_digest_does_not_continue_that_chain():
    head, tail = list(range(4)), list(range(4, 8))
    whole = page_keys(head + tail, 4)

    forged = page_keys(tail, 4, seed=whole[0])

    assert forged[0] != whole[1]


def test_a_salt_that_starts_with_the_tokens_of_a_page_does_not_forge_its_key():
    first_page = struct.pack("<4I", *range(4))

    assert page_keys(range(4, 8), 4, seed=first_page)[0] not in page_keys(range(8), 4)


# Bounds of tokens


@pytest.mark.parametrize(
    "tokens",
    [
        pytest.param([0, -1], id="negative"),
        pytest.param([0, 2**32], id="33 bits"),
        pytest.param([0.0, 1.0], id="floats"),
        pytest.param(["1", "2"], id="strings"),
        pytest.param("12", id="a string"),
        pytest.param(b"12345678", id="bytes"),
        pytest.param([None, None], id="None"),
        pytest.param([[1, 2], [3, 4]], id="nested"),
        pytest.param(np.array([0, -1]), id="negative in an array"),
        pytest.param(np.array([0, 2**32]), id="33 bits in an array"),
        pytest.param(np.array([0.0, 1.5]), id="floats in an array"),
        pytest.param(np.array([np.nan, 1.0]), id="nan in an array"),
        pytest.param(np.array(["1", "2"]), id="strings in an array"),
        pytest.param(np.array([True, False]), id="truth values in an array"),
        pytest.param(np.zeros((2, 2), dtype=np.uint32), id="a table"),
    ],
)
def test_what_is_no_token_id_is_refused_by_name(tokens):
    with pytest.raises(InvalidArgument) as refusal:
        page_keys(tokens, 1)

    assert refusal.value.field == "tokens"


def test_the_smallest_and_the_largest_token_id_have_keys():
    assert list(page_keys([0, 2**32 - 1], 1)) == chain([0, 2**32 - 1], 1)
    assert list(page_keys(np.array([0, 2**32 - 1]), 1)) == chain([0, 2**32 - 1], 1)


@pytest.mark.parametrize("page_tokens", [0, -1])
def test_a_page_of_no_tokens_is_refused_by_name(page_tokens):
    with pytest.raises(InvalidArgument) as refusal:
        page_keys([1, 2], page_tokens)

    assert refusal.value.field == "page_tokens"


# Runs of keys


@given(
    count=st.integers(0, 6),
    start=st.none() | st.integers(-8, 8),
    stop=st.none() | st.integers(-8, 8),
)
def test_a_slice_has_the_keys_of_a_list_and_knows_what_precedes_it(count, start, stop):
    keys = page_keys(range(count * 3), 3)
    everything = list(keys)

    part = keys[start:stop]

    assert list(part) == everything[start:stop]
    first = slice(start, stop).indices(count)[0]
    assert part.parent == (everything[first - 1] if first else b"")
    assert part.tokens is not None
    assert part.tokens.tolist() == list(range(first * 3, (first + len(part)) * 3))


def test_a_slice_of_a_slice_keeps_the_parent_and_the_seed():
    keys = page_keys(range(12), 3, seed=b"salt")
    part = keys[1:]

    assert part[0:2].parent == keys[0]
    assert part[1:].parent == keys[1]
    assert (part.seed, part.page_tokens) == (b"salt", 3)


def test_equality_and_hash_follow_keys_and_parent():
    keys = page_keys(range(9), 3)
    same = PrefixKeys(keys.packed)

    assert (keys, hash(keys)) == (same, hash(same))
    assert keys[1:] != PrefixKeys(keys[1:].packed)
    assert keys != list(keys)


@pytest.mark.parametrize("index", [3, -4])
def test_an_index_outside_is_an_index_error(index):
    with pytest.raises(IndexError):
        page_keys(range(9), 3)[index]


def test_the_text_form_is_short_and_says_how_many():
    assert repr(page_keys(range(9), 3)).startswith("PrefixKeys(3 pages")
    assert repr(page_keys([], 3)) == "PrefixKeys(0)"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"packed": bytes(33)}, "keys"),
        ({"packed": bytes(32), "parent": bytes(31)}, "parent"),
        ({"packed": bytes(64), "tokens": np.zeros(3, np.uint32), "page_tokens": 2}, "tokens"),
    ],
)
def test_keys_that_cannot_be_are_refused_by_name(arguments, field):
    with pytest.raises(InvalidArgument) as refusal:
        PrefixKeys(**arguments)

    assert refusal.value.field == field


def test_a_slice_with_a_step_is_refused_by_name():
    with pytest.raises(InvalidArgument) as refusal:
        page_keys(range(9), 3)[::2]

    assert refusal.value.field == "keys"


# Identity

names = st.text(min_size=1, max_size=6)
spaces = st.builds(
    SpaceIdentity,
    model=names,
    kv_dtype=st.sampled_from(["float32", "bfloat16", "uint8"]),
    page_tokens=st.integers(1, 65_536),
    tenant=names,
    revision=st.text(max_size=6),
    scope=st.text(max_size=6),
)
ranges = st.tuples(st.integers(0, 9), st.integers(1, 9)).map(lambda r: (r[0], r[0] + r[1]))
layouts = st.builds(CanonicalLayout, head_dim=st.integers(1, 256)) | st.builds(
    OpaqueLayout,
    engine=names,
    version=names,
    isa=names,
    block_tokens=st.integers(1, 64),
    block_bytes=st.integers(1, 9_999),
)
shards = st.builds(
    ShardSpec,
    layout=layouts,
    layers=ranges,
    heads=ranges,
    group=names,
    window_pages=st.integers(0, 9),
)


def with_field(value, field: str, other):
    """``value`` with one field taken from ``other``."""
    fields = {name: getattr(value, name) for name in value.__struct_fields__}
    return type(value)(**{**fields, field: getattr(other, field)})


@pytest.mark.parametrize("field", SpaceIdentity.__struct_fields__)
@given(space=spaces, other=spaces)
def test_spaces_have_equal_digests_exactly_when_every_field_is_equal(field, space, other):
    changed = with_field(space, field, other)

    assert (changed.digest == space.digest) == (getattr(other, field) == getattr(space, field))
    assert len(space.digest) == 32


@pytest.mark.parametrize("field", ShardSpec.__struct_fields__)
@given(shard=shards, other=shards)
def test_shards_have_equal_digests_exactly_when_every_field_is_equal(field, shard, other):
    changed = with_field(shard, field, other)

    assert (changed.digest == shard.digest) == (getattr(other, field) == getattr(shard, field))


@pytest.mark.parametrize(
    ("field", "value"),
    [("engine", "x"), ("version", "2"), ("isa", ""), ("block_tokens", 32), ("block_bytes", 1)],
)
def test_every_field_of_an_opaque_layout_is_part_of_the_digest(field, value):
    fields = {name: getattr(OPAQUE, name) for name in OPAQUE.__struct_fields__}
    changed = OpaqueLayout(**{**fields, field: value})

    digests = {
        ShardSpec(layout=layout, layers=(0, 1), heads=(0, 1)).digest
        for layout in (OPAQUE, changed, CanonicalLayout(128), CanonicalLayout(64))
    }

    assert len(digests) == 4


def test_text_that_moves_between_two_fields_changes_the_digest():
    one = SpaceIdentity(model="ab", revision="c", kv_dtype="uint8", page_tokens=1)
    two = SpaceIdentity(model="a", revision="bc", kv_dtype="uint8", page_tokens=1)

    assert one.digest != two.digest


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"model": ""}, "model"),
        ({"kv_dtype": "float12"}, "kv_dtype"),
        ({"page_tokens": 0}, "page_tokens"),
        ({"page_tokens": 65_537}, "page_tokens"),
    ],
)
def test_a_space_that_names_nothing_is_refused_by_name(arguments, field):
    with pytest.raises(InvalidArgument) as refusal:
        SpaceIdentity(**{"model": "m", "kv_dtype": "uint8", "page_tokens": 64, **arguments})

    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"layers": (3, 3)}, "layers"),
        ({"layers": (-1, 3)}, "layers"),
        ({"heads": (4, 3)}, "heads"),
        ({"window_pages": -1}, "window_pages"),
    ],
)
def test_a_shard_that_holds_nothing_is_refused_by_name(arguments, field):
    with pytest.raises(InvalidArgument) as refusal:
        ShardSpec(**{"layout": OPAQUE, "layers": (0, 1), "heads": (0, 1), **arguments})

    assert refusal.value.field == field


# Bytes


def test_a_canonical_page_of_the_bench_is_eight_mebibytes():
    assert SHARD.page_bytes(SPACE) == 8 << 20


@pytest.mark.parametrize(
    ("kv_dtype", "item_bytes"),
    [("float32", 4), ("float16", 2), ("bfloat16", 2), ("float8_e4m3", 1), ("float8_e5m2", 1)],
)
def test_canonical_page_bytes_count_layers_k_and_v_tokens_heads_and_dims(kv_dtype, item_bytes):
    space = SpaceIdentity(model="m", kv_dtype=kv_dtype, page_tokens=16)
    shard = ShardSpec(layout=CanonicalLayout(24), layers=(3, 8), heads=(2, 5))

    assert shard.page_bytes(space) == 5 * 2 * 16 * 3 * 24 * item_bytes


def test_opaque_page_bytes_count_layers_and_blocks():
    shard = ShardSpec(layout=OPAQUE, layers=(4, 6), heads=(0, 1))

    assert shard.page_bytes(SPACE) == 2 * (64 // 16) * 4_096


@pytest.mark.parametrize(
    ("layout", "field"),
    [
        (CanonicalLayout(0), "head_dim"),
        (OpaqueLayout("e", "1", "", block_tokens=48, block_bytes=1), "block_tokens"),
        (OpaqueLayout("e", "1", "", block_tokens=0, block_bytes=1), "block_tokens"),
        (OpaqueLayout("e", "1", "", block_tokens=16, block_bytes=0), "block_bytes"),
    ],
)
def test_a_layout_that_does_not_fit_its_space_is_refused_by_name(layout, field):
    with pytest.raises(LayoutMismatch) as refusal:
        ShardSpec(layout=layout, layers=(0, 1), heads=(0, 1)).page_bytes(SPACE)

    assert refusal.value.field == field


# Seeds of digests


def test_page_seeds_are_the_spaces_and_shards_hash_and_the_key_combined():
    keys = page_keys(range(12), 3)
    seed = digest_seed(SPACE, SHARD)

    seeds = page_seeds(keys.packed, seed)

    expected = int.from_bytes(hashlib.sha256(SPACE.digest + SHARD.digest).digest()[:8], "little")
    assert seed == expected
    assert seeds.dtype == np.uint64
    assert seeds.tolist() == [int.from_bytes(key[:8], "little") ^ seed for key in keys]


@given(space=spaces, other_space=spaces, shard=shards, other_shard=shards)
def test_another_space_or_shard_has_another_seed(space, other_space, shard, other_shard):
    same = (space, shard) == (other_space, other_shard)

    assert (digest_seed(space, shard) == digest_seed(other_space, other_shard)) == same


def test_no_keys_have_no_seeds():
    assert page_seeds(b"", digest_seed(SPACE, SHARD)).shape == (0,)


@pytest.mark.parametrize("seed", [b"", b"salt"])
def test_a_chain_that_is_extended_is_the_chain_of_all_tokens(seed):
    tokens = list(range(1000, 1070))
    known = page_keys(tokens[:20], 8, seed=seed)

    longer = extend_keys(known, tokens[16:50])
    longer = extend_keys(longer, tokens[48:])

    whole = page_keys(tokens, 8, seed=seed)
    assert longer == whole
    assert longer.tokens is not None
    assert longer.tokens.tolist() == tokens[:64]


def test_only_a_whole_chain_with_its_tokens_is_extended():
    keys = page_keys(list(range(32)), 8)

    for known in (keys[1:], PrefixKeys(keys.packed)):
        with pytest.raises(InvalidArgument, match="known"):
            extend_keys(known, list(range(8)))
