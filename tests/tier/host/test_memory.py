"""Extents as memory: what clients cannot do to them, and what the system may refuse."""

import errno
import fcntl
import mmap
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore import mover
from kvstore.protocol.errors import TierUnavailable
from kvstore.state.tree.slots import Replacement
from kvstore.tier import host, kernel
from kvstore.tier.host import HostMemory

EXTENT_BYTES = 1 << 20
BOOT = bytes(16)
WAIT_S = 20.0


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    made = HostMemory("n", BOOT, EXTENT_BYTES, prefault=False)
    made.create(range(2))
    yield made
    made.close()


@pytest.fixture
def as_client(memory: HostMemory) -> Iterator[Callable[[int], int]]:
    """``as_client(number)``: a descriptor of an extent, as a client gets it."""
    given: list[int] = []

    def give(number: int) -> int:
        descriptor = memory.descriptor(number)
        assert descriptor is not None
        given.append(os.dup(descriptor))
        return given[-1]

    yield give
    for descriptor in given:
        os.close(descriptor)


@contextmanager
def refusing(monkeypatch: pytest.MonkeyPatch, where: object, call: str, number: int):
    """A call of the system fails."""
    calls: list[object] = []

    def fails(*arguments: object) -> None:
        calls.append(arguments)
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(where, call, fails)
        yield calls


def allocated_bytes(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * 512


def exchange(memory: HostMemory, *replaced: Replacement) -> None:
    """Exchange memory and wait until all of it is there."""
    memory.replace(list(replaced))
    assert all(memory.wait(one.new, WAIT_S) for one in replaced)
    settle(memory)


def settle(memory: HostMemory) -> None:
    """Wait until every attempt that was begun has ended, and take note of it; none begins."""
    for one in list(memory._exchanges.values()):
        assert one.thread is not None
        one.thread.join(WAIT_S)
    memory._retry_s = float("inf")
    memory.replace([])


def again(memory: HostMemory) -> None:
    """The attempt after the pause between two."""
    settle(memory)
    memory._retry_s = 0.0
    memory.replace([])
    settle(memory)


# What a client can do with a descriptor


@pytest.mark.parametrize("size", [0, EXTENT_BYTES - 4096, EXTENT_BYTES + 4096, 1 << 40])
def test_nobody_makes_an_extent_shorter_or_longer(as_client, size):
    with pytest.raises(PermissionError):
        os.ftruncate(as_client(0), size)
    with pytest.raises(PermissionError):
        os.posix_fallocate(as_client(0), EXTENT_BYTES, 4096)

    assert os.fstat(as_client(0)).st_size == EXTENT_BYTES


@pytest.mark.parametrize("seal", [fcntl.F_SEAL_WRITE, 0x10])
def test_nobody_seals_an_extent_against_the_node(as_client, seal):
    with pytest.raises(PermissionError):
        fcntl.fcntl(as_client(0), fcntl.F_ADD_SEALS, seal)


def test_a_client_that_gives_pages_back_ends_nobody(memory, as_client):
    """It can only make zeros of its tenant's bytes, which digests notice."""
    at = memory.address(0)
    with mmap.mmap(as_client(0), EXTENT_BYTES) as mapped:
        mapped[:] = b"\7" * EXTENT_BYTES
        kernel.punch(as_client(0), EXTENT_BYTES)
        mapped.madvise(mmap.MADV_REMOVE)
        into = bytearray(EXTENT_BYTES)
        assert memory.read(0, 0, memoryview(into)) == EXTENT_BYTES

    assert into == bytes(EXTENT_BYTES)
    assert memory.address(0) == at


# Memory that changes tenants


def test_memory_that_changes_tenants_is_given_back_also_by_those_who_map_it(memory, as_client):
    descriptor = as_client(0)
    with mmap.mmap(descriptor, EXTENT_BYTES) as mapped:
        mapped[:] = b"\7" * EXTENT_BYTES
        assert allocated_bytes(descriptor) == EXTENT_BYTES

        exchange(memory, Replacement(0, 7, in_use=False))

        assert allocated_bytes(descriptor) == 0
        assert mapped[:] == bytes(EXTENT_BYTES), "no byte of the tenant before"
    assert memory.descriptor(0) is None
    assert memory.descriptor(7) is not None
    assert os.fstat(as_client(7)).st_ino != os.fstat(descriptor).st_ino


def test_memory_that_somebody_may_still_read_keeps_its_bytes(memory, as_client):
    with mmap.mmap(as_client(0), EXTENT_BYTES) as mapped:
        mapped[:] = b"\7" * EXTENT_BYTES

        exchange(memory, Replacement(0, 7, in_use=True))

        assert mapped[:] == b"\7" * EXTENT_BYTES
    assert memory.descriptor(7) is not None


def test_memory_is_exchanged_where_no_descriptor_is_left(memory):
    """The old one goes before the new one comes, and nothing else is needed meanwhile."""
    memory.address(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
        exchange(memory, Replacement(0, 2, in_use=False), Replacement(1, 3, in_use=False))
        assert memory.address(2) != memory.address(3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (memory.missing_bytes(), memory.failures) == (0, 0)


@pytest.mark.parametrize("replaced", [1, 2])
def test_memory_that_cannot_be_had_is_said_counted_and_made_later(
    memory, monkeypatch, caplog, replaced
):
    pairs = [Replacement(number, number + 2, in_use=False) for number in range(replaced)]
    memory._retry_s = float("inf")
    with refusing(monkeypatch, os, "memfd_create", errno.EMFILE):
        memory.replace(pairs)
        again(memory)

        assert memory.missing_bytes() == replaced * EXTENT_BYTES
        assert memory.failures == 1
        assert memory.pending(2)
        assert not memory.wait(2, 0.0)
        assert memory.descriptor(2) is None
        with pytest.raises(TierUnavailable, match="extent 2 has no memory"):
            memory.address(2)
        with pytest.raises(TierUnavailable):
            memory.read(2, 0, memoryview(bytearray(1)))
        again(memory)
        assert memory.failures == 2
    (said,) = caplog.records
    assert f"{replaced} extents have no memory" in said.getMessage()
    assert "ulimit -n" in said.getMessage()
    assert pairs == []

    for _ in range(replaced):
        again(memory)

    assert memory.missing_bytes() == 0
    assert memory.address(2)
    assert not memory.pending(2)
    assert "all extents have memory again" in caplog.text


def test_what_failed_is_tried_again_ten_times_a_second_and_not_at_every_call(memory, monkeypatch):
    now = 100.0
    monkeypatch.setattr(host, "monotonic", lambda: now)
    with refusing(monkeypatch, os, "memfd_create", errno.ENFILE) as calls:
        memory.replace([Replacement(0, 2, in_use=False)])
        for attempts in (2, 3, 4):  # the first is tried again at once
            for _ in range(100):
                for one in memory._exchanges.values():
                    one.thread.join(WAIT_S)
                memory.replace([])
            assert len(calls) == attempts
            now += host.RETRY_S


def test_memory_that_the_kernel_holds_back_stops_nobody(memory, monkeypatch, as_client):
    """Whoever has the descriptor can hold up who gives its memory back, for as long as he likes."""
    gate, punch = threading.Event(), kernel.punch
    stuck = memory.descriptor(0)

    def held_up(descriptor: int, size_bytes: int) -> None:
        if descriptor == stuck:
            gate.wait(WAIT_S)
        punch(descriptor, size_bytes)

    monkeypatch.setattr(kernel, "punch", held_up)
    try:
        memory.replace([Replacement(0, 2, in_use=False), Replacement(1, 3, in_use=False)])
        assert memory.wait(3, WAIT_S)
        memory.replace([])
        assert (memory.pending(2), memory.pending(3)) == (True, False)
        memory.replace([Replacement(2, 4, in_use=False)])
        assert not memory.pending(2), "nobody asks for it any more"
        assert memory.pending(4)
    finally:
        gate.set()
    assert memory.wait(4, WAIT_S)
    assert memory.descriptor(2) is None


def test_memory_that_comes_while_it_gets_another_number_is_made_once(memory, monkeypatch):
    gate, punch, taken_out = threading.Event(), kernel.punch, memory._taken_out

    def held_up(*arguments: int) -> None:
        assert gate.wait(WAIT_S)
        punch(*arguments)

    def slow(old: int, new: int, *, in_use: bool) -> Any:
        found = taken_out(old, new, in_use=in_use)
        gate.set()
        found.thread.join(WAIT_S)
        return found

    monkeypatch.setattr(kernel, "punch", held_up)
    memory.replace([Replacement(0, 2, in_use=False)])
    monkeypatch.setattr(memory, "_taken_out", slow)
    made: list[int] = []
    new = memory._new
    monkeypatch.setattr(memory, "_new", lambda number: made.append(number) or new(number))

    exchange(memory, Replacement(2, 4, in_use=False))
    memory.replace([])

    assert made == [4]
    assert memory.descriptor(2) is None
    assert memory.missing_bytes() == 0


def test_memory_that_cannot_be_given_back_yet_has_none_for_the_next_tenant(
    memory, monkeypatch, as_client
):
    descriptor = as_client(0)
    os.pwrite(descriptor, b"\7" * EXTENT_BYTES, 0)
    with refusing(monkeypatch, kernel, "punch", errno.ENOMEM):
        memory.replace([Replacement(0, 2, in_use=False)])
        settle(memory)
        assert memory.descriptor(2) is None, "else there would be twice as much"
        assert allocated_bytes(descriptor) == EXTENT_BYTES

    again(memory)

    assert memory.descriptor(2) is not None
    assert allocated_bytes(descriptor) == 0


def test_an_extent_that_never_got_its_memory_can_be_exchanged_and_closed(memory, monkeypatch):
    with refusing(monkeypatch, kernel, "punch", errno.ENOMEM):
        memory.replace([Replacement(0, 2, in_use=False)])
        settle(memory)
        memory.replace([Replacement(2, 3, in_use=False)])
        assert memory.missing_bytes() == EXTENT_BYTES
        again(memory)
    again(memory)
    assert memory.descriptor(2) is None
    assert memory.descriptor(3) is not None

    with refusing(monkeypatch, kernel, "punch", errno.ENOMEM):
        memory.replace([Replacement(3, 4, in_use=False)])
        settle(memory)
        memory.close()  # the leak check of every test looks at the descriptors


def test_memory_that_was_given_back_while_it_was_touched_takes_none(monkeypatch, wait_until):
    """Pre-faulting must not bring back what an exchange has just given up."""
    memory = HostMemory("n", BOOT, EXTENT_BYTES, prefault=True)
    try:
        populate, kept = host.mover.populate, list[int]()

        def held_up(address: int, length: int, write: bool) -> None:
            descriptor = memory.descriptor(0)
            if descriptor is not None:
                kept.append(os.dup(descriptor))
                exchange(memory, Replacement(0, 1, in_use=False))
            populate(address, length, write=write)

        monkeypatch.setattr(host.mover, "populate", held_up)
        memory.create([0])
        wait_until(lambda: memory.populated_bytes() == EXTENT_BYTES)
        (descriptor,) = kept
        assert allocated_bytes(descriptor) == 0
        os.close(descriptor)
    finally:
        memory.close()


def test_without_the_native_mover_nothing_is_written_to_memory_that_clients_may_write_to(
    monkeypatch, wait_until
):
    """What is read and written back takes away what a client wrote in between."""
    fallback, writes = mover.Fallback(), list[bool]()

    def watched(address: int, length: int, write: bool) -> None:
        writes.append(write)
        fallback.populate(address, length, write=write)

    monkeypatch.setattr(mover, "is_native", False)
    monkeypatch.setattr(mover, "populate", watched)
    memory = HostMemory("n", BOOT, EXTENT_BYTES, prefault=True)
    try:
        memory.create([0])
        wait_until(lambda: memory.populated_bytes() == EXTENT_BYTES)
        descriptor = memory.descriptor(0)
        assert descriptor is not None
        assert allocated_bytes(descriptor) == EXTENT_BYTES, "reading makes it be there too"
    finally:
        memory.close()

    assert writes == [False]


def test_a_mapping_that_cannot_be_kept_from_children_is_undone(memory, monkeypatch):
    def refuse(_address: int, _size: int) -> None:
        raise OSError(errno.ENOMEM, "no")

    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("kvstore")

    before = mappings()
    memory.address(0)
    assert mappings() == before + 1
    monkeypatch.setattr(host, "keep_from_children", refuse)

    with pytest.raises(TierUnavailable, match="cannot be mapped"):
        memory.address(1)

    assert mappings() == before + 1
