"""Goal: whatever comes to the data port, it serves others, and only granted pages change."""

import contextlib
import socket
import struct
import time
from random import Random, SystemRandom

import pytest

from kvstore.testing.transfer_pages import TransferPages
from kvstore.transport.frames import MAGIC, VERSION
from kvstore.transport.tcp import TcpTransport

SECONDS = 3.0
READS, WRITES = b"r" * 16, b"w" * 16
TICKET_S = 3600.0


def a_message(chance, pages):
    """A request, more or less damaged, and perhaps bytes behind it."""
    ranges = [chance.choice(pages.ranges) for _ in range(chance.choice((0, 1, 1, 2, 4, 30)))]
    count = chance.choice((len(ranges), len(ranges), 0, 1025, 2**32 - 1))
    head = struct.pack(
        "<4sBBHII16s", MAGIC, chance.choice((VERSION, VERSION, VERSION, 0, 2)),
        chance.choice((1, 1, 2, 2, 0, 9)), chance.choice((0, 0, 0, 1)), count,
        chance.choice((1, 20, 200, 0, 2**32 - 1)), chance.choice((READS, WRITES, b"x" * 16)),
    )  # fmt: skip
    words = bytearray(head + b"".join(struct.pack("<IIQQ", *one) for one in ranges))
    words += chance.randbytes(chance.choice((0, 0, 100, 10_000)))
    for _ in range(chance.choice((0, 0, 0, 1, 5))):
        words[chance.randrange(len(words))] ^= 1 << chance.randrange(8)
    return bytes(words[: chance.choice((len(words), len(words), chance.randrange(len(words) + 1)))])


def send_some(chance, pages, port):
    """One connection of a stranger."""
    with socket.create_connection(("127.0.0.1", port)) as stranger, contextlib.suppress(OSError):
        stranger.settimeout(0.05)
        for _ in range(chance.randint(1, 4)):
            stranger.sendall(a_message(chance, pages))
            if chance.random() < 0.7:
                stranger.recv(chance.choice((1, 16, 1 << 16)))


def fuzz(seed, seconds, wait_until):
    chance, pages, written = Random(seed), TransferPages(4096, 8), TransferPages(4096, 8)
    owner, reader = TcpTransport("127.0.0.1:0", 1), TcpTransport("", 1 << 20)
    port = int(owner.endpoint.rpartition(":")[2])
    ticket_ns = time.monotonic_ns() + int((seconds + TICKET_S) * 1e9)
    owner.grant(READS, pages.granted(), ticket_ns)
    owner.grant(WRITES, written.granted()[2:4], ticket_ns, write=True)
    before, beside = pages.owned.copy(), written.owned.copy()
    end_s, number = time.monotonic() + seconds, 0
    with contextlib.closing(owner), contextlib.closing(reader):
        while time.monotonic() < end_s:
            number += 1
            for _ in range(20):
                send_some(chance, pages, port)
            deadline_ns = time.monotonic_ns() + 10 * 10**9
            reader.read(pages.transfer(number, owner.endpoint, READS, deadline_ns))
            ends = []
            wait_until(lambda ends=ends: ends.extend(reader.poll()) or ends)
            assert ends[0].good == b"\1" * 8, f"seed {seed}: {ends}"
        assert (pages.owned == before).all(), f"seed {seed}: a read has written"
        kept = [0, 1, 4, 5, 6, 7]
        assert (written.owned[kept] == beside[kept]).all(), f"seed {seed}: beside a ticket"
        reader.close()
        wait_until(lambda: not owner.stats()["connections_in"], what=f"seed {seed}: left behind")


def test_whatever_comes_to_the_data_port_others_are_served(wait_until):
    fuzz(20_261_122, SECONDS, wait_until)


@pytest.mark.soak("socket", minutes=10)
def test_whatever_comes_to_the_data_port_for_long_others_are_served(wait_until, soak_s):
    fuzz(SystemRandom().getrandbits(32), soak_s, wait_until)
