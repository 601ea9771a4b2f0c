"""Ranges that are digested, sent and received: the library and its stand-in do the same."""

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash

from kvstore.mover import ranges
from kvstore.mover.binary import LIBRARY, load
from kvstore.mover.ranges import (
    FrameBuffer,
    NativeRanges,
    PlainRanges,
    digest_ranges,
    range_seeds,
    receive_frame,
    receive_ranges,
    send_ranges,
)
from kvstore.protocol.errors import InvalidArgument, PeerUnreachable, TransferTimeout

LENGTHS = (0, 1, 63, 64, 65, 240, 241, 1024, 1025, 4096, 70_001, 300_000, 0)
LONG_S, SHORT_S = 30.0, 0.05
U64 = (1 << 64) - 1


def implementations() -> Iterator[tuple[str, NativeRanges | PlainRanges]]:
    yield "plain", PlainRanges()
    library = load(LIBRARY)
    if library is not None:
        for isa in range(library.kv_best_isa() + 1):
            yield f"native {isa}", NativeRanges(library, isa)


@pytest.fixture(autouse=True, params=[pytest.param(it, id=name) for name, it in implementations()])
def implementation(request, monkeypatch):
    monkeypatch.setattr(ranges, "_chosen", request.param)


@pytest.fixture
def pair():
    made = socket.socketpair()
    yield made
    for one in made:
        one.close()


class Scattered:
    """Ranges of some lengths in one piece of memory, in any order and with gaps."""

    def __init__(self, lengths=LENGTHS, seed=1):
        rng = np.random.default_rng(seed)
        self.memory = rng.integers(0, 256, sum(lengths) + 8 * len(lengths), dtype=np.uint8)
        base, at = int(self.memory.ctypes.data), 3
        self.offsets = [0] * len(lengths)
        for index in rng.permutation(len(lengths)):
            self.offsets[index] = at
            at += lengths[index] + 5
        self.lengths = lengths
        self.places = [
            (base + offset, size) for offset, size in zip(self.offsets, lengths, strict=True)
        ]
        numbers = rng.integers(0, 1 << 32, 3 * len(lengths), dtype=np.uint64)
        self.seeds = range_seeds(7, numbers.astype("<u4").tobytes())

    def contents(self) -> list[bytes]:
        pieces = zip(self.offsets, self.lengths, strict=True)
        return [self.memory[at : at + size].tobytes() for at, size in pieces]

    def wanted(self, contents: list[bytes]) -> bytes:
        numbers = np.frombuffer(self.seeds, dtype=np.uint64).tolist()
        return b"".join(
            xxhash.xxh3_128_digest(one, seed) if one else bytes(16)
            for one, seed in zip(contents, numbers, strict=True)
        )


def mixed(word: int) -> int:
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & U64
    word = (word ^ word >> 27) * 0x94D049BB133111EB & U64
    return word ^ word >> 31


def test_a_seed_follows_from_room_plane_first_and_size():
    places = [(0, 0, 1), (5, 1 << 20, 125), ((1 << 32) - 1, 3, 70_000)]
    of_room = 0xF123_4567_89AB_CDEF

    found = range_seeds(of_room, np.array(places, dtype="<u4").tobytes())

    wanted = [mixed(mixed(of_room ^ (p << 32 | f)) ^ size) for p, f, size in places]
    assert np.frombuffer(found, dtype=np.uint64).tolist() == wanted


def test_digests_are_those_of_the_xxhash_package():
    here = Scattered()

    assert digest_ranges(here.places, here.seeds) == here.wanted(here.contents())
    assert digest_ranges([], b"") == b""


@pytest.mark.parametrize("step", [1 << 30, 7_919, 61])
def test_ranges_arrive_where_they_belong_and_are_digested(pair, step):
    lengths = LENGTHS if step > 61 else (1, 240, 0, 4_097)
    sent, there = Scattered(lengths, 2), Scattered(lengths, 3)
    stream = b"head" + b"".join(sent.contents())
    before = there.memory.copy()
    for offset, size in zip(there.offsets, there.lengths, strict=True):
        before[offset : offset + size] = 0

    def drip() -> None:
        for at in range(0, len(stream), step):
            pair[0].sendall(stream[at : at + step])

    sender = threading.Thread(target=drip)
    sender.start()
    assert pair[1].recv(4, socket.MSG_WAITALL) == b"head"
    found = receive_ranges(pair[1].fileno(), there.places, there.seeds, LONG_S)
    sender.join()

    assert there.contents() == sent.contents()
    assert found == there.wanted(sent.contents())
    for offset, size in zip(there.offsets, there.lengths, strict=True):
        there.memory[offset : offset + size] = 0
    assert (there.memory == before).all(), "bytes outside of the ranges were written"


def test_what_follows_the_ranges_is_left_in_the_connection(pair):
    there = Scattered((10, 20))
    pair[0].sendall(bytes(30) + b"next")

    assert receive_ranges(pair[1].fileno(), there.places, b"", LONG_S) == b""

    assert pair[1].recv(10) == b"next"
    assert there.contents() == [bytes(10), bytes(20)]


def test_a_frame_is_received_with_its_tail_and_left_if_it_is_too_long(pair):
    frame, descriptor = FrameBuffer(9), pair[1].fileno()
    pair[0].sendall((5).to_bytes(4, "little") + b"bodyxtail" + (6).to_bytes(4, "little") + b"more")

    assert receive_frame(descriptor, frame, 4, LONG_S) == 9
    assert frame.read(9) == b"bodyxtail"
    assert receive_frame(descriptor, frame, 4, LONG_S) == 10
    assert pair[1].recv(20) == b"more"

    pair[0].sendall(b"abc")
    with pytest.raises(TransferTimeout):
        receive_frame(descriptor, frame, 4, SHORT_S)
    pair[0].sendall(b"\xff\xff\xff\xff")
    assert receive_frame(descriptor, frame, 0, LONG_S) == (1 << 32) - 1
    pair[0].sendall((5).to_bytes(4, "little") + b"bo")
    pair[0].close()
    with pytest.raises(PeerUnreachable, match="closed"):
        receive_frame(descriptor, frame, 4, LONG_S)


def test_ranges_are_sent_behind_their_head(pair):
    here = Scattered(LENGTHS + (9,) * 200)
    wanted = b"head" + b"".join(here.contents())
    descriptor = pair[0].fileno()

    sender = threading.Thread(target=lambda: send_ranges(descriptor, b"head", here.places, LONG_S))
    sender.start()
    found = pair[1].recv(len(wanted), socket.MSG_WAITALL)
    sender.join()

    assert found == wanted


def test_a_peer_that_is_silent_is_noticed_even_if_bytes_drip(pair):
    there = Scattered((100_000,))
    over = threading.Event()

    def drip() -> None:
        while not over.wait(SHORT_S / 20):
            pair[0].send(b"x")

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        with pytest.raises(TransferTimeout):
            receive_ranges(pair[1].fileno(), there.places, there.seeds, SHORT_S)
    finally:
        over.set()
        dripping.join()


def test_a_peer_that_does_not_read_is_noticed(pair):
    here = Scattered((8 << 20,))

    with pytest.raises(TransferTimeout):
        send_ranges(pair[0].fileno(), b"head", here.places, SHORT_S)


def test_a_closed_connection_is_noticed(pair):
    here = Scattered()
    pair[0].sendall(b"some")
    pair[0].close()

    with pytest.raises(PeerUnreachable, match="closed"):
        receive_ranges(pair[1].fileno(), here.places, here.seeds, LONG_S)
    with pytest.raises(PeerUnreachable):
        send_ranges(pair[1].fileno(), b"head", here.places, LONG_S)


def test_who_shuts_the_connection_down_ends_a_call(pair):
    there = Scattered()
    failures: list[Exception] = []

    def receive() -> None:
        try:
            receive_ranges(pair[1].fileno(), there.places, there.seeds, LONG_S)
        except PeerUnreachable as error:
            failures.append(error)

    receiver = threading.Thread(target=receive)
    receiver.start()
    pair[1].shutdown(socket.SHUT_RDWR)
    receiver.join(LONG_S)

    assert not receiver.is_alive()
    assert len(failures) == 1


def test_a_descriptor_of_nothing_is_refused():
    number, here = (1 << 20) + 1, Scattered()

    with pytest.raises(PeerUnreachable):
        receive_ranges(number, here.places, here.seeds, LONG_S)
    with pytest.raises(PeerUnreachable):
        send_ranges(number, b"head", here.places, LONG_S)


def test_an_address_that_cannot_be_is_refused(pair):
    for call in (
        lambda: digest_ranges([(0, 5)], bytes(8)),
        lambda: digest_ranges([(4096, 5)], bytes(16)),
        lambda: receive_ranges(pair[1].fileno(), [(0, 5)], bytes(8), LONG_S),
        lambda: send_ranges(pair[0].fileno(), b"head", [(0, 5)], LONG_S),
    ):
        with pytest.raises(InvalidArgument):
            call()
