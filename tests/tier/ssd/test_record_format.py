"""The bytes of the log say what was written, and nothing that was not."""

from dataclasses import replace

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import assume, given

from kvstore.config import HostConfig, SSDConfig
from kvstore.protocol.errors import ConfigError, InvalidArgument
from kvstore.protocol.page import (
    KEY_BYTES,
    PAIR_BYTES_MAX,
    CanonicalLayout,
    OpaqueLayout,
    ShardSpec,
    SpaceIdentity,
    pack_pair,
)
from kvstore.state.tree.places import BLOCK_BYTES, HEADER_BYTES, Place, footer_bytes, record_bytes
from kvstore.tier.record import (
    ENTRY,
    PAYLOAD_BYTES_MAX,
    SEGMENT_BYTES_MAX,
    SEQUENCE_MAX,
    ForeignLog,
    Header,
    Identity,
    Kind,
    decode_footer,
    decode_header,
    decode_identity,
    encode_footer,
    encode_header,
    encode_identity,
    entry_of,
    refuse_foreign,
    trailer_records,
    unpack_pair,
)

LOG = b"l" * 16
names = st.text(max_size=30)
spaces = st.builds(
    SpaceIdentity,
    model=st.text(min_size=1, max_size=60),
    kv_dtype=st.sampled_from(["bfloat16", "uint8"]),
    page_tokens=st.integers(1, 65_536),
    tenant=names,
    revision=names,
    scope=names,
)
ranges = st.tuples(st.integers(0, 50), st.integers(51, 100))
layouts = st.one_of(
    st.builds(CanonicalLayout, head_dim=st.integers(1, 512)),
    st.builds(
        OpaqueLayout,
        engine=names,
        version=names,
        isa=names,
        block_tokens=st.integers(1, 64),
        block_bytes=st.integers(1, 1 << 40),
    ),
)
shards = st.builds(
    ShardSpec,
    layout=layouts,
    layers=ranges,
    heads=ranges,
    group=names,
    window_pages=st.integers(0, 9),
)
u63 = st.integers(0, 2**63)
headers = st.builds(
    Header,
    kind=st.sampled_from(Kind),
    sequence=st.integers(0, SEQUENCE_MAX),
    place=st.builds(Place, u63, u63),
    payload_bytes=st.integers(1, PAYLOAD_BYTES_MAX),
    key=st.binary(min_size=32, max_size=32),
    parent=st.one_of(st.just(b""), st.binary(min_size=32, max_size=32)),
    digest=st.binary(min_size=16, max_size=16),
    pair=st.builds(pack_pair, spaces, shards),
    tokens=st.binary(max_size=2048),
)


@given(spaces, shards)
def test_a_space_and_its_shard_come_back_equal(space, shard):
    assert unpack_pair(pack_pair(space, shard)) == (space, shard)


@given(headers)
def test_a_header_comes_back_equal(header):
    block = encode_header(LOG, header)

    assert len(block) == HEADER_BYTES
    assert decode_header(block, LOG, header.place) == header


@given(headers, st.integers(0, HEADER_BYTES * 8 - 1))
def test_a_header_with_a_flipped_bit_is_none(header, bit):
    block = bytearray(encode_header(LOG, header))
    block[bit // 8] ^= 1 << bit % 8

    assert decode_header(bytes(block), LOG, header.place) is None


@given(headers, u63, u63)
def test_a_header_counts_only_where_it_was_written_and_in_its_own_log(header, segment, offset):
    block = encode_header(LOG, header)
    other = Place(segment, offset)

    assume(other != header.place)
    assert decode_header(block, LOG, other) is None
    assert decode_header(block, b"m" * 16, header.place) is None


def test_tokens_that_do_not_fit_are_left_out():
    pair = pack_pair(SpaceIdentity(model="m", kv_dtype="uint8", page_tokens=1), SHARD)
    header = Header(
        Kind.PAGE, 1, Place(0, 0), 1, bytes(32), b"", bytes(16), pair, bytes(HEADER_BYTES)
    )

    decoded = decode_header(encode_header(LOG, header), LOG, Place(0, 0))

    assert decoded is not None
    assert decoded.tokens == b""


SHARD = ShardSpec(layout=CanonicalLayout(head_dim=1), layers=(0, 1), heads=(0, 1))


def test_names_too_long_for_the_format_are_refused():
    space = SpaceIdentity(model="m" * PAIR_BYTES_MAX, kv_dtype="uint8", page_tokens=1)

    with pytest.raises(InvalidArgument, match="space"):
        pack_pair(space, SHARD)


def test_a_header_of_more_than_a_log_ever_writes_is_none():
    header = Header(Kind.PAGE, 1, Place(1, 0), 1, bytes(32), b"", bytes(16), b"", b"")
    for wrong in ({"sequence": SEQUENCE_MAX + 1}, {"payload_bytes": PAYLOAD_BYTES_MAX + 1}):
        block = encode_header(LOG, replace(header, **wrong))
        assert decode_header(block, LOG, header.place) is None


def test_no_setting_makes_a_segment_or_a_page_larger_than_a_start_takes():
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"segment_bytes": 2 * SEGMENT_BYTES_MAX}, SSDConfig)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"extent_bytes": 2 * PAYLOAD_BYTES_MAX}, HostConfig)


def laid_out(listed: list[Header]) -> tuple[list[Header], int]:
    """The same headers, one behind the other, and where they end."""
    placed, at = [], 0
    for header in listed:
        placed.append(replace(header, place=Place(header.place.segment, at)))
        at += record_bytes(header.payload_bytes)
    return placed, at


@given(st.lists(headers, max_size=40), u63)
def test_a_footer_comes_back_equal(listed, segment):
    listed, end = laid_out(listed)
    pairs = list(dict.fromkeys(header.pair for header in listed))
    entries = b"".join(entry_of(header, pairs.index(header.pair)) for header in listed)

    footer = encode_footer(LOG, segment, entries, pairs, end)

    assert len(footer) == footer_bytes(len(listed))
    assert trailer_records(footer[-BLOCK_BYTES:], LOG, segment) == len(listed)
    decoded = decode_footer(footer, len(listed), end + len(footer))
    assert decoded is not None
    assert decoded.pairs == pairs
    assert decoded.end == end
    assert decoded.entries["key"].tolist() == [header.key for header in listed]
    parents = [header.parent for header in listed]
    assert decoded.entries["parent"].tolist() == [one or bytes(KEY_BYTES) for one in parents]
    assert (decoded.entries["flags"] & 1).tolist() == [bool(one) for one in parents]
    for column, name in (("sequence", "sequence"), ("payload_bytes", "payload_bytes")):
        assert decoded.entries[column].tolist() == [getattr(header, name) for header in listed]
    assert decoded.entries["offset"].tolist() == [header.place.offset for header in listed]


def three_entries(pair_count: int = 1) -> np.ndarray:
    """Of three pages of 4096 bytes."""
    entries = np.zeros(3, ENTRY)
    entries["payload_bytes"], entries["kind"] = 4096, Kind.PAGE
    entries["offset"] = np.arange(3) * 8192
    entries["pair"] = np.arange(3) % pair_count
    return entries


END, SIZE = 3 * 8192, 3 * 8192 + footer_bytes(3)


def test_the_largest_table_of_pairs_fits_its_room():
    pairs = [bytes([index]) * PAIR_BYTES_MAX for index in range(64)]

    footer = encode_footer(LOG, 1, three_entries(64).tobytes(), pairs, END)

    decoded = decode_footer(footer, 3, SIZE)
    assert decoded is not None
    assert decoded.pairs == pairs


def test_every_flipped_bit_of_a_footer_is_noticed():
    footer = encode_footer(LOG, 1, three_entries().tobytes(), [b"pair"], END)
    assert decode_footer(footer, 3, SIZE) is not None

    for bit in range(0, len(footer) * 8, 997):
        broken = bytearray(footer)
        broken[bit // 8] ^= 1 << bit % 8
        count = trailer_records(broken[-BLOCK_BYTES:], LOG, 1)
        assert count is None or decode_footer(bytes(broken), count, SIZE) is None


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("offset", 8191), ("offset", 4096), ("offset", 1 << 40), ("offset", (1 << 64) - 4096),
        ("payload_bytes", 0), ("payload_bytes", 4097), ("payload_bytes", (1 << 64) - 1),
        ("pair", 1), ("kind", 0), ("kind", 3), ("sequence", SEQUENCE_MAX + 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("row", range(3))
def test_a_footer_with_a_record_that_no_log_writes_is_none(column, value, row):
    entries = three_entries()
    entries[column][row] = value
    footer = encode_footer(LOG, 1, entries.tobytes(), [b"pair"], END)

    assert trailer_records(footer[-BLOCK_BYTES:], LOG, 1) == 3
    assert decode_footer(footer, 3, SIZE) is None


@pytest.mark.parametrize(("end", "size"), [(END - 4096, SIZE), (END, SIZE - 1), (1 << 63, SIZE)])
def test_a_footer_with_an_end_that_cannot_be_is_none(end, size):
    footer = encode_footer(LOG, 1, three_entries().tobytes(), [b"pair"], end)
    assert decode_footer(footer, 3, size) is None


def test_a_footer_whose_table_has_not_so_many_pairs_is_none():
    footer = bytearray(encode_footer(LOG, 1, three_entries().tobytes(), [b"p"] * 3, END))
    for count in (65, 1 << 20, (1 << 63) + 1):
        footer[-BLOCK_BYTES + 48 : -BLOCK_BYTES + 56] = count.to_bytes(8, "little")
        assert decode_footer(bytes(footer), 3, SIZE) is None
    table = len(footer) - BLOCK_BYTES - 65536
    footer[-BLOCK_BYTES + 48 : -BLOCK_BYTES + 56] = (2).to_bytes(8, "little")
    footer[table : table + 2] = b"\xff\xff"  # longer than the table
    checksum = xxhash.xxh3_128_digest(bytes(footer[:-BLOCK_BYTES]))
    footer[-BLOCK_BYTES + 64 : -BLOCK_BYTES + 80] = checksum
    assert decode_footer(bytes(footer), 3, SIZE) is None


def test_a_block_of_another_log_or_a_newer_format_is_refused():
    footer = encode_footer(LOG, 1, b"", [], 0)
    trailer = footer[-BLOCK_BYTES:]

    refuse_foreign(trailer, LOG)
    refuse_foreign(bytes(BLOCK_BYTES), LOG)
    with pytest.raises(ForeignLog, match="belongs to log"):
        refuse_foreign(trailer, b"m" * 16)


def test_an_identity_comes_back_equal_and_a_damaged_or_newer_one_is_refused():
    identity = Identity(LOG, "node", 3, b"id", {b"id".hex(): "/log"}, 77)
    content = encode_identity(identity)

    assert decode_identity(content) == identity
    with pytest.raises(ConfigError, match="format 2"):
        decode_identity(content.replace(b'"format": 1', b'"format": 2'))
    for broken in (
        b"", b"{}", b"\xff", content[:20], content.replace(b"6c", b"zz"), b"[]", b"[" * 100_000,
        content.replace(b'"format": 1', b'"format": 1e999'),
        content.replace(b": 77", b": -1"), content.replace(b": 77", b": 1152921504606846976"),
        content.replace(b'"id": "', b'"id": "x'), content.replace(b"{\n  ", b"[\n  "),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="damaged"):
            decode_identity(broken)
