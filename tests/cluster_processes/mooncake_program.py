"""One check of the transport ``mooncake``, run as a program in a network of its own.

``python -m tests.cluster_processes.mooncake_program CHECK``: a check of the contract, or one of the
functions below.
"""

import dataclasses
import os
import select
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from kvstore.protocol.errors import CapacityError, ConfigError, KVStoreError, TransferTimeout
from kvstore.testing.mooncake import CHECKS, MEMORY_BYTES, MooncakePair
from kvstore.testing.transfer_pages import TransferPages
from kvstore.testing.transport import TransportContract, TransportDriver
from kvstore.transport.base import PageArrival, TicketEnded, TransportEvent
from kvstore.transport.mooncake import MooncakeTransport

SIZE, COUNT = 1 << 20, 24


class Scene(TransportDriver):
    """A pair, and the processes of its engines."""

    def __init__(self) -> None:
        super().__init__(MooncakePair)

    def engine(self, transport: object, name: str) -> int:
        """The process of an engine."""
        return int(getattr(transport, name).process._process.pid)

    def begin(self, number: int, pages: TransferPages, left_s: float = 20.0) -> int:
        deadline_ns = self.after(left_s)
        ticket = number.to_bytes(16, "big")
        self.owner.grant(ticket, pages.granted(), deadline_ns)
        self.reader.read(pages.transfer(number, self.owner.endpoint, ticket, deadline_ns))
        return deadline_ns

    def stop_owner(self) -> int:
        pid = self.engine(self.owner, "_owner")
        os.kill(pid, signal.SIGSTOP)
        status = Path(f"/proc/{pid}/stat")
        while status.read_text().rpartition(")")[2].split()[0] != "T":
            pass
        return pid


def owner_is_stopped_during_a_read() -> None:
    scene = Scene()
    first, pages = scene.pages(4096, 1), scene.pages(SIZE, COUNT)
    scene.begin(1, first)
    assert scene.end(1).good == b"\1"
    pid = scene.stop_owner()
    deadline_ns = scene.begin(2, pages, 3.0)
    end = scene.end(2)
    assert scene.now_ns() < deadline_ns + 300_000_000, "long after its deadline"
    assert isinstance(end.error, TransferTimeout), end
    assert not end.settled, f"bytes may still come: {end}, {scene.reader.stats()}"
    scene.settle(end)
    kept = pages.arrived.copy()
    assert scene.reader.stats()["in_flight_bytes"] == 0

    os.kill(pid, signal.SIGCONT)
    others = scene.pages(SIZE, 8)
    number = 3
    while True:  # the peer is asked again after a while
        scene.begin(number, others)
        if scene.end(number).good == b"\1" * 8:
            break
        number += 1
        assert number < 500
        scene._pair.wait()
    assert (pages.arrived == kept).all(), "bytes came after it was settled"
    assert not pages.arrived.all(axis=1).all(), "the read was not under way"
    scene.close()


def owner_is_stopped_before_the_first_contact() -> None:
    scene, other = Scene(), MooncakePair()
    pages = scene.pages(SIZE, 2)
    free = TransferPages(SIZE, 2, memory=other.memory)
    free.addresses = other.owner.addresses(free.granted()) or b""
    pid = scene.stop_owner()
    scene.begin(1, pages)
    into = scene.pages(SIZE, 2)
    later = scene.after(2.0)
    asked = free.transfer(2, other.owner.endpoint, bytes(16), later)
    asked.local[:] = into.transfer(2, "", bytes(16), later).local
    scene.reader.read(asked)
    assert scene.end(2).good == b"\1\1", "a peer that says nothing holds up others"
    assert (into.arrived == free.owned).all()
    end = scene.end(1)
    assert isinstance(end.error, TransferTimeout), end
    scene.settle(end)
    os.kill(pid, signal.SIGCONT)
    other.close()
    scene.close()


def owner_is_killed_during_a_read() -> None:
    scene = Scene()
    pages = scene.pages(SIZE, COUNT)
    scene.begin(1, scene.pages(4096, 1))
    assert scene.end(1).good == b"\1"
    pid = scene.stop_owner()
    scene.begin(2, pages)
    os.kill(pid, signal.SIGKILL)
    end = scene.end(2)
    assert isinstance(end.error, KVStoreError), end
    assert PageArrival.WRONG not in end.good
    scene.settle(end)
    assert scene.reader.stats()["in_flight_bytes"] == 0
    scene.close()


def reading_process_is_killed_and_the_read_goes_on() -> None:
    scene = Scene()
    pages = scene.pages(SIZE, COUNT)
    scene.begin(1, scene.pages(4096, 1))
    assert scene.end(1).good == b"\1"
    owner = scene.stop_owner()
    scene.begin(2, pages)
    os.kill(scene.engine(scene.reader, "_reader"), signal.SIGKILL)
    os.kill(owner, signal.SIGCONT)
    end = scene.end(2)
    assert end.good == b"\1" * COUNT, end
    assert (pages.arrived == pages.owned).all()
    assert scene.reader.stats()["replaced_processes"] == 1
    scene.close()


def pages_that_are_written_can_be_read_at_their_end() -> None:
    scene = Scene()
    pages, source = scene.pages(SIZE, 6), scene.pages(SIZE, 7)
    before, pid = pages.owned.copy(), scene.engine(scene.owner, "_owner")
    source.arrived[:] = 7  # what a transfer calls local
    for number in range(20):
        pages.owned[:] = before
        later, ticket = scene.after(20.0), number.to_bytes(16, "big")
        scene.owner.grant(ticket, pages.granted()[1:5], later, write=True)
        asked = source.transfer(number, scene.owner.endpoint, ticket, later, slice(1, 5))
        told = scene.owner.addresses(pages.granted()[1:5]) or b""
        scene.reader.write(dataclasses.replace(asked, addresses=told))
        end = scene.end(number)
        assert end.good == b"\1" * 4, end
        assert (pages.owned[1:5] == 7).all(), "they cannot be read yet"
        assert (pages.owned[[0, 5]] == before[[0, 5]]).all()
        assert scene.owner.revoke(ticket, ended=True)
    assert scene.reader.stats()["written_pages"] == 80
    assert scene.engine(scene.owner, "_owner") == pid, "nobody is in doubt"
    scene.close()


def memory_of_a_failed_write_is_free_when_its_ticket_has_ended() -> None:
    scene = Scene()
    pages, source = scene.pages(SIZE, COUNT), scene.pages(SIZE, COUNT)
    scene.begin(1, scene.pages(4096, 1))
    assert scene.end(1).good == b"\1"
    scene.stop_owner()
    deadline_ns, ticket = scene.after(1.0), bytes(16)
    scene.owner.grant(ticket, pages.granted(), deadline_ns, write=True)
    asked = source.transfer(2, scene.owner.endpoint, ticket, deadline_ns)
    scene.reader.write(dataclasses.replace(asked, addresses=pages.addresses))
    end = scene.end(2)
    assert isinstance(end.error, TransferTimeout), end
    scene.settle(end)
    assert not scene.owner.revoke(ticket), "nobody knows whether bytes still come"
    told: list[TransportEvent] = []
    while not told:
        select.select([scene.owner], [], [], 10.0)
        told = scene.owner.poll()
    assert told == [TicketEnded(ticket)]
    kept = pages.owned.copy()

    while (again := scene.owner.addresses(pages.granted())) is None:
        scene._pair.wait()
    pages.addresses = again
    number = 3
    while True:  # the peer is asked again after a while
        scene.begin(number, pages)
        if scene.end(number).good == b"\1" * COUNT:
            break
        number += 1
        assert number < 500
        scene._pair.wait()
    assert (pages.owned == kept).all(), "bytes came after the ticket had ended"
    scene.close()


def a_read_of_many_scattered_pages_leaves_its_peer_usable() -> None:
    scene = Scene()
    pages = scene.pages(4096, 5_000, gap=64)
    for number in range(3):
        pages.arrived[:] = 0
        scene.begin(number, pages)
        assert scene.end(number).good == b"\1" * 5_000
        assert (pages.arrived == pages.owned).all()
    scene.close()


def memory_that_was_unregistered_cannot_be_read() -> None:
    scene = Scene()
    pages = scene.pages(SIZE, 2)
    asked = pages.transfer(1, scene.owner.endpoint, bytes(16), scene.after(5.0))
    assert scene.reader.takes(asked)
    start = int(scene.owner._known._starts[0])  # type: ignore[attr-defined]
    scene.owner.unregister(start)
    assert scene.owner.addresses(pages.granted()) is None
    scene.reader.read(asked)
    end = scene.end(1)
    while end.error is None:  # the process of the owner had not done it yet
        pages.arrived[:] = 0
        scene.reader.read(asked)
        end = scene.end(1)
    assert isinstance(end.error, KVStoreError)
    scene.settle(end)
    scene.close()


def memory_at_an_address_that_is_used_again_is_the_new_one() -> None:
    scene = Scene()
    pages = scene.pages(SIZE, 2)
    start = int(scene.owner._known._starts[0])  # type: ignore[attr-defined]
    for number in range(20):
        descriptor = os.memfd_create("kvstore-test")
        os.ftruncate(descriptor, MEMORY_BYTES)
        os.pwrite(descriptor, bytes([number + 1]) * (2 * SIZE), pages.granted()[0][1] - start)
        scene.owner.unregister(start)
        scene.owner.register(start, MEMORY_BYTES, descriptor)
        os.close(descriptor)
    while (told := scene.owner.addresses(pages.granted())) is None:
        scene._pair.wait()
    pages.addresses = told
    scene.begin(1, pages)
    assert scene.end(1).good == b"\2\2", "other bytes than those that the digests are of"
    assert (pages.arrived == 20).all()
    scene.close()


def rdma_without_a_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="no device"):
        MooncakeTransport("127.0.0.1", 1 << 20)


def a_read_into_other_memory_ends_and_harms_nobody() -> None:
    scene = Scene()
    pages = scene.pages(4096, 2)
    asked = pages.transfer(1, scene.owner.endpoint, bytes(16), scene.after(5.0))
    asked.local[:] = np.zeros(2, dtype=np.uint64) + 4096
    assert not scene.reader.takes(asked)
    scene.reader.read(asked)
    end = scene.end(1)
    assert end.settled
    assert isinstance(end.error, KVStoreError)
    assert not isinstance(end.error, CapacityError)
    assert scene.reader.stats()["replaced_processes"] == 0
    scene.close()


if __name__ == "__main__":
    check = sys.argv[1]
    if check in CHECKS:
        getattr(TransportContract(MooncakePair), check)()
    else:
        globals()[check]()
    sys.stdout.write("kept\n")
