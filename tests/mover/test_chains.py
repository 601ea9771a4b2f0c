"""Chains and names out of msgpack, in C and in Python, against the xxhash package and msgspec."""

import ctypes
import mmap
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.mover.binary import LIBRARY, load
from kvstore.mover.chains import Chains, NativeChains, PlainChains, WordBuffer, name_of

PACK = msgspec.msgpack.encode
BUILT = load(LIBRARY)
NATIVE = None if BUILT is None else NativeChains(BUILT)
EACH: list[Chains] = [PlainChains(), *([NATIVE] if NATIVE else [])]
SEED = 7

needs_library = pytest.mark.skipif(BUILT is None, reason="built without a compiler")
each = pytest.mark.parametrize("chains", EACH, ids=lambda one: type(one).__name__)
HEADS = [bytes([0x91, kind]) for kind in range(0xC0, 0xE0)] + [b"\x90", b"\xdc", b"\xdd", b"\xdd\0"]
words = st.integers(0, 2**64 - 1)


def big(count: int, value: int, kind: int) -> bytes:
    """An integer in one of the encodings of msgpack: 0xcc to 0xd3."""
    return bytes([kind]) + value.to_bytes(count, "big", signed=value < 0)


def head(count: int, wide: int) -> bytes:
    """The head of an array: in the first byte, in two more, or in four."""
    if wide == 0:
        return bytes([0x90 | count])
    return bytes([0xDC if wide == 2 else 0xDD]) + count.to_bytes(wide, "big")


@needs_library
def test_the_hash_of_64_bits_is_xxh3_at_every_length() -> None:
    assert BUILT is not None
    BUILT.kv_hash64.restype = ctypes.c_uint64
    BUILT.kv_hash64.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_uint64]
    dice = random.Random(SEED)
    for length in range(2_001):
        data = dice.randbytes(length)
        for seed in (0, 1, 2**64 - 1, *(dice.getrandbits(64) for _ in range(5))):
            assert BUILT.kv_hash64(data, length, seed) == xxhash.xxh3_64_intdigest(data, seed)


@each
@pytest.mark.parametrize("block_tokens", [1, 2, 3, 4, 5, 16, 60, 61, 64, 100, 500])
def test_a_block_is_hashed_with_the_chain_value_of_the_one_before(
    chains: Chains, block_tokens: int
) -> None:
    ids = np.random.default_rng(SEED).integers(0, 2**32, 5 * block_tokens + 3, np.uint32)
    ids = ids[: 5 * block_tokens + block_tokens // 2]
    before, expected = 99, []
    for start in range(0, 5 * block_tokens, block_tokens):
        block = ids[start : start + block_tokens].astype("<u4").tobytes()
        before = xxhash.xxh3_64_intdigest(block, before)
        expected.append(before)
    out, room = WordBuffer(20), WordBuffer(4_000, np.uint32)

    assert chains.chain(ids, block_tokens, 99).tolist() == expected
    raw = PACK(ids.tolist())
    assert chains.chain_raw(raw, room, block_tokens, 99, out, 3) == len(ids)
    assert out.array[3:8].tolist() == expected
    assert not out.array[:3].any()
    assert not out.array[8:].any()


@each
@pytest.mark.parametrize(
    ("raw", "ids"),
    [
        (head(2, 0) + b"\x00\x7f", [0, 127]),
        (head(1, 2) + big(1, 200, 0xCC), [200]),
        (head(1, 4) + big(2, 65_535, 0xCD), [65_535]),
        (head(1, 0) + big(4, 2**32 - 1, 0xCE), [2**32 - 1]),
        (head(1, 0) + big(8, 2**32 - 1, 0xCF), [2**32 - 1]),
        (head(3, 0) + big(1, 7, 0xD0) + big(2, 7, 0xD1) + big(8, 9, 0xD3), [7, 7, 9]),
        (head(0, 4), []),
        (PACK(list(range(0, 70_000, 7))), list(range(0, 70_000, 7))),
    ],
)
def test_every_encoding_of_a_token_id_is_read(chains: Chains, raw: bytes, ids: list[int]) -> None:
    room = WordBuffer(20_000, np.uint32)

    assert chains.read_ids(raw, room) == len(ids)
    assert room.array[: len(ids)].tolist() == ids


@each
@pytest.mark.parametrize(
    "raw",
    [
        b"", b"\xc0", b"\x80", b"\x92\x01", b"\x91\x01\x01", b"\xdc\x00", b"\xdd\xff\xff\xff\xff",
        head(1, 0) + big(8, 2**32, 0xCF), b"\x91\xff", head(1, 0) + big(4, -5, 0xD2), b"\x91\xc0",
        b"\x91\xc3", PACK([1.0]), PACK([[1]]), PACK(["1"]), PACK([b"1"]), b"\x91\xcd\x01",
        b"\xc4\x01\x01",
    ],
)  # fmt: skip
def test_what_is_no_array_of_token_ids_is_refused(chains: Chains, raw: bytes) -> None:
    assert chains.read_ids(raw, WordBuffer(100, np.uint32)) < 0


@each
def test_arrays_that_are_longer_than_the_room_are_refused(chains: Chains) -> None:
    assert chains.read_ids(PACK([1] * 11), WordBuffer(10, np.uint32)) < 0
    assert chains.names(PACK([1] * 11), 1, WordBuffer(10)) < 0
    assert chains.keys(PACK([bytes(32)] * 8), 1, WordBuffer(10), 3, integers=False) < 0
    assert chains.keys(PACK([bytes(32)] * 7), 1, WordBuffer(10), 3, integers=False) == 7


@each
def test_a_key_and_its_first_8_bytes_as_an_integer_are_the_same_chain_value(
    chains: Chains,
) -> None:
    keys = [random.Random(SEED).randbytes(32) for _ in range(20)]
    firsts = [int.from_bytes(key[:8], "big", signed=True) for key in keys]
    expected = [int.from_bytes(key[:8], "little") ^ 55 for key in keys]
    for hashes in (keys, firsts, [first % 2**64 for first in firsts]):
        out = WordBuffer(30)
        assert chains.keys(PACK(hashes), 55, out, 2, integers=True) == 20
        assert out.array[2:22].tolist() == expected
    for wrong in ([1], [keys[0][:31]], [keys[0] + b"x"], ["x" * 32], 5):
        assert chains.keys(PACK(wrong), 55, WordBuffer(30), 0, integers=False) < 0


@each
def test_chain_values_and_names_are_never_zero(chains: Chains) -> None:
    out = WordBuffer(1)
    chains.keys(PACK([(5).to_bytes(32, "little")]), 5, out, 0, integers=False)
    assert out.array[0] == 1
    chains.names(PACK([77]), 77, out)
    assert out.array[0] == 1 == name_of(77, 77)


@each
@given(hashes=st.lists(st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=64)), secret=words)
def test_names_are_those_of_each_hash(chains: Chains, hashes: list[Any], secret: int) -> None:
    out = WordBuffer(len(hashes) + 1)
    assert chains.names(PACK(hashes), secret, out) == len(hashes)
    assert out.array[: len(hashes)].tolist() == [name_of(one, secret) for one in hashes]
    assert chains.names(PACK([*hashes, "x"]), secret, out) < 0
    assert chains.names(PACK([*hashes, b"x" * 65]), secret, out) < 0


@pytest.fixture(scope="module")
def guarded() -> Iterator[mmap.mmap]:
    """Memory whose last page may not be touched."""
    memory = mmap.mmap(-1, 3 * mmap.PAGESIZE)
    start = np.frombuffer(memory, np.uint8).ctypes.data
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(start + 2 * mmap.PAGESIZE, mmap.PAGESIZE, 0) == 0
    memory.seek(2 * mmap.PAGESIZE)
    return memory


@needs_library
@settings(max_examples=500)
@given(
    value=st.lists(
        st.integers(0, 2**33) | st.integers(-300, 300) | st.binary(max_size=70)
        | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=3) | st.none()
        | st.binary(min_size=32, max_size=32),
        max_size=40,
    ),
    cut=st.just(0) | st.integers(0, 12),
    change=st.none() | st.tuples(st.integers(0, 2_000), st.integers(0, 255)),
    raw=st.none() | st.builds(bytes.__add__, st.sampled_from(HEADS), st.binary(max_size=6)),
)  # fmt: skip
def test_nothing_beyond_the_given_bytes_is_read_and_both_say_the_same(
    guarded: mmap.mmap,
    value: list[Any],
    cut: int,
    change: tuple[int, int] | None,
    raw: bytes | None,
) -> None:
    assert NATIVE is not None
    data = bytearray(PACK(value) if raw is None else raw)
    del data[max(1, len(data) - cut) :]
    if change is not None:
        data[change[0] % len(data)] = change[1]
    stop = 2 * mmap.PAGESIZE
    guarded[stop - len(data) : stop] = bytes(data)
    address = np.frombuffer(guarded, np.uint8, count=1).ctypes.data + stop - len(data)
    results: list[list[Any]] = []
    for chains, source in ((NATIVE, Placed(address, len(data))), (PlainChains(), bytes(data))):
        ids, out = WordBuffer(50, np.uint32), WordBuffer(50)
        results.append([])
        for call in (
            lambda c=chains, r=source, i=ids: c.read_ids(r, i),
            lambda c=chains, r=source, i=ids, o=out: c.chain_raw(r, i, 4, 9, o, 2),
            lambda c=chains, r=source, o=out: c.names(r, 3, o),
            lambda c=chains, r=source, o=out: c.keys(r, 3, o, 1, integers=True),
            lambda c=chains, r=source, o=out: c.keys(r, 3, o, 1, integers=False),
        ):
            out.array[:] = 0
            count = call()
            results[-1].append((count, out.array.tolist()) if count >= 0 else None)
    assert results[0] == results[1]


EVENTS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats()
    | st.text(max_size=40) | st.binary(max_size=300)
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary()),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=15,
)  # fmt: skip


@needs_library
@settings(max_examples=300)
@given(
    events=st.lists(
        st.dictionaries(
            st.sampled_from(["token_ids", "token_idx", "type", "a" * 40, ""]),
            EVENTS | st.lists(st.integers(-200, 2**33), max_size=20),
            max_size=4,
        ),
        max_size=5,
    ),
    cut=st.just(0) | st.integers(0, 12),
    change=st.none() | st.tuples(st.integers(0, 2_000), st.integers(0, 255)),
)
def test_the_tokens_of_a_batch_are_found_without_a_look_beyond_it(
    guarded: mmap.mmap, events: list[Any], cut: int, change: tuple[int, int] | None
) -> None:
    assert NATIVE is not None
    whole = PACK([1.5, events, None])
    data = bytearray(whole)
    del data[max(1, len(data) - cut) :]
    if change is not None:
        data[change[0] % len(data)] = change[1]
    stop = 2 * mmap.PAGESIZE
    data = data[:stop]
    guarded[stop - len(data) : stop] = bytes(data)
    address = np.frombuffer(guarded, np.uint8, count=1).ctypes.data + stop - len(data)
    spots = WordBuffer(11)

    count = NATIVE.find_tokens(Placed(address, len(data)), spots)

    for start, end in spots.array[: 2 * max(count, 0)].reshape(-1, 2).tolist():
        assert 0 <= start <= end <= len(data)
    if bytes(data) != whole:
        return
    tokens = [event.get("token_ids", []) for event in events]
    if all(isinstance(one, list) and all(type(x) is int for x in one) for one in tokens):
        assert count == len(events)
        for number, event in enumerate(events):
            start, end = spots.array[2 * number : 2 * number + 2].tolist()
            if "token_ids" in event:
                assert data[start:end] == PACK(event["token_ids"])
            else:
                assert (start, end) == (0, 0)
    else:
        assert count == -1


class Placed(int):
    """Bytes at an address, for a call that takes them and their length."""

    def __new__(cls, address: int, length: int) -> "Placed":
        placed = super().__new__(cls, address)
        placed.length = length
        return placed

    length: int

    def __len__(self) -> int:
        return self.length
