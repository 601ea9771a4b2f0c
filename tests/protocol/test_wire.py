"""Goal: what is sent arrives, however it is cut up; what is no message is refused, never more."""

import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol import wire
from kvstore.protocol.errors import InvalidArgument, ProtocolError
from kvstore.protocol.page import CanonicalLayout, OpaqueLayout, ShardSpec, SpaceIdentity

IDENTITY = SpaceIdentity(model="m", kv_dtype="bfloat16", page_tokens=64, scope="s")
MANY = 15 << 20
SHARDS = [
    ShardSpec(layout=CanonicalLayout(64), layers=(0, 2), heads=(0, 2), window_pages=3, group="g"),
    ShardSpec(layout=OpaqueLayout("vllm", "1", "avx2", 16, 4096), layers=(2, 4), heads=(0, 2)),
]
REQUESTS = [
    wire.Hello(1, 1, 0, "engine", b"s" * 16, b"o", 7),
    wire.OpenSpace(2, IDENTITY, SHARDS),
    wire.Lookup(3, 0, [0, 1], b"k" * 64, 10),
    wire.Acquire(4, 9, 0, 1, b"k" * 32, 30_000),
    wire.Release(9),
    wire.BeginPut(5, 8, 0, 0, b"k" * 32, b"p" * 32, b"t" * 256),
    wire.CommitPut(6, 8, b"d" * 16, 5, read_once=True),
    wire.AbortPut(8),
    wire.StorePage(9, 8, 0, 0, b"k" * 32, b"p" * 32, b"d" * 16, b"t" * 256, 5, ahead=10),
    wire.KeepConversation(0, "chat", b"k" * 32, 5, 1 << 30),
    wire.Corrupt(0, 1, b"k" * 32, 77),
    wire.Settled(6),
    wire.ReportPrefill(0.25),
    wire.Stats(7),
    wire.FetchExtents(b"s" * 16, [3, 4], [1, 2], b"b" * 16),
    wire.PeerHello(8, 1, 5, "cluster", "b", b"b" * 16, "sha256/xxh3_128 1"),
    wire.FollowEvents("cluster", "b", "sha256/xxh3_128 1", replay=True),
]
ANSWERS = [
    wire.Welcome(1, 1, 0, b"b" * 16, "node", b"s" * 16, 1 << 28, 1 << 29),
    wire.SpaceOpened(2, 5, [0, 3]),
    wire.Found(3, 10, 2, 1, 30, 0.25),
    wire.Acquired(4, b"a" * 32, b"d" * 32, 1, 2, 30_000),
    wire.PutGranted(5, bytes([0, 1, 2]), b"a" * 16),
    wire.Committed(6, bytes([5]), b"a" * 16),
    wire.StatsReply(7, b"{}"),
    wire.ExtentsFollow([3, 4], [1]),
    wire.Failure(8, "capacity", "full", "field"),
    wire.PeerWelcome(9, 1, 5, "a", b"a" * 16, {"tcp": "10.0.0.1:7401"}),
    wire.Lent(10, b"a" * 32, b"d" * 32, 1, 2, 2_000, b"t" * 16),
]


@pytest.mark.parametrize("message", REQUESTS, ids=lambda message: type(message).__name__)
def test_requests_arrive_as_they_were_sent(message):
    assert wire.decode_request(wire.encode(message)[4:]) == message


@pytest.mark.parametrize("message", ANSWERS, ids=lambda message: type(message).__name__)
def test_answers_arrive_as_they_were_sent(message):
    assert wire.decode_answer(wire.encode(message)[4:]) == message


def test_a_lease_tells_places_to_nodes_that_know_them_and_others_read_it_too():
    lent = ANSWERS[-1]
    assert isinstance(lent, wire.Lent)
    lent = msgspec.structs.replace(lent, places={"mooncake": ("a:1", b"p" * 16)})
    body = wire.encode(lent)[4:]
    assert wire.decode_answer(body) == lent
    fields = msgspec.msgpack.decode(body)
    older = msgspec.msgpack.encode(fields[:-1])
    assert wire.decode_answer(older) == ANSWERS[-1]
    newer = msgspec.msgpack.encode([*fields, 1])
    assert wire.decode_answer(newer) == lent


@given(st.lists(st.integers(0, len(REQUESTS) - 1), max_size=8), st.data())
def test_frames_are_found_however_the_stream_is_cut(chosen, data):
    stream = b"".join(wire.encode(REQUESTS[at]) for at in chosen)
    reader = wire.FrameReader()
    bodies: list[bytes] = []
    while stream:
        size = data.draw(st.integers(1, min(len(stream), 200)))
        bodies += reader.feed(stream[:size])
        stream = stream[size:]

    assert [wire.decode_request(body) for body in bodies] == [REQUESTS[at] for at in chosen]


def test_an_empty_frame_is_a_frame():
    assert wire.FrameReader().feed(bytes(4) + wire.encode(REQUESTS[4])) == [
        b"",
        wire.encode(REQUESTS[4])[4:],
    ]


def test_a_frame_over_the_limit_is_refused_from_its_length_alone():
    most = wire.FRAME_BYTES_MAX.to_bytes(4, "little")
    assert wire.FrameReader().feed(most + b"x") == []
    with pytest.raises(ProtocolError, match="limit"):
        wire.FrameReader().feed((wire.FRAME_BYTES_MAX + 1).to_bytes(4, "little"))


@given(st.binary(max_size=300))
def test_garbage_is_refused_and_nothing_else(garbage):
    for decode in (wire.decode_request, wire.decode_answer):
        try:
            message = decode(garbage)
        except ProtocolError:
            continue
        assert isinstance(message, msgspec.Struct)


@given(st.integers(0, len(REQUESTS) - 1), st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_message_is_refused_or_still_a_message(at, position, value):
    body = bytearray(wire.encode(REQUESTS[at])[4:])
    body[position % len(body)] = value

    try:
        message = wire.decode_request(bytes(body))
    except ProtocolError:
        return
    assert isinstance(message, msgspec.Struct)


@pytest.mark.parametrize(
    "body",
    [
        msgspec.msgpack.encode([3, 1, {"model": "", "kv_dtype": "uint8", "page_tokens": 1}, []]),
        b"\x92\x09" + b"\x91" * 100_000,
        b"\x93\x10" + b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x92\xcc\xff\x01",
    ],
    ids=["a refused value", "deep", "deep where nothing is expected", "long array", "long bytes",
         "unknown tag"],
)  # fmt: skip
def test_hostile_bodies_are_protocol_errors(body):
    with pytest.raises(ProtocolError):
        wire.decode_request(body)


def test_a_later_minor_version_may_add_fields_at_the_end():
    longer = msgspec.msgpack.encode([9, 5, True, "a field of a later protocol"])

    assert wire.decode_request(longer) == wire.Release(5)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"\x95\x05\x02\x00\xdd" + MANY.to_bytes(4, "big") + bytes(MANY), id="shards"),
        pytest.param(
            b"\x94\x03\x02\x83\xa5model\xdb" + MANY.to_bytes(4, "big") + b"\xc3\xa9" * (MANY // 2),
            id="name",
        ),
        pytest.param(b"\x96\xcc\x03\x02\xdb" + MANY.to_bytes(4, "big") + bytes(MANY), id="tag"),
        pytest.param(b"\x93\x14\xc4\x00\xdd" + MANY.to_bytes(4, "big") + bytes(MANY), id="extents"),
    ],
)
def test_a_long_message_is_refused_before_its_parts_become_objects(body):
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            wire.decode_request(body)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes < 1 << 20


@given(st.lists(st.sampled_from([0, 1]), min_size=1, max_size=40))
def test_a_key_of_zeros_is_refused_wherever_it_stands_and_nothing_that_looks_like_one(kinds):
    """Keys that begin with zeros, and zeros that begin in the middle of a key, are usual ones."""
    keys = [bytes(32) if not kind else bytes(20) + b"k" * 4 + bytes(8) for kind in kinds]
    packed = b"".join(keys)
    if 0 in kinds:
        with pytest.raises(InvalidArgument, match="32 zero bytes"):
            wire.count_keys(packed)
    else:
        assert wire.count_keys(packed) == len(kinds)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -float("inf"), -1.0, 1e300])
def test_seconds_that_are_none_are_refused(seconds):
    """They would be in every later estimate of what a load takes."""
    frame = wire.encode(wire.Found(3, 10, 2, 1, 30, seconds))
    with pytest.raises(ProtocolError):
        wire.decode_answer(frame[4:])


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("pages", [-1, wire.BATCH_KEYS_MAX + 1])
def test_numbers_of_pages_that_cannot_be_are_refused(at, pages):
    counts = [0, 0, 0, 0]
    counts[at] = pages
    with pytest.raises(ProtocolError):
        wire.decode_answer(wire.encode(wire.Found(3, *counts))[4:])
