"""Goal: the node in this process keeps on disk what its memory has no room for."""

import os
import socket
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvstore.client.store import KVStore
from kvstore.mover.kvpool import KVPool
from kvstore.node import ssd
from kvstore.protocol import wire
from kvstore.protocol.errors import (
    DurabilityUnavailable,
    InvalidArgument,
    KVStoreError,
    TierUnavailable,
)
from kvstore.state.disk.jobs import DiskRules
from kvstore.testing.disk import DiskFault, FaultyDisk
from kvstore.tier.disk import OSDisk
from tests.client.conftest import content, identity, new_keys, open_space

MEMORY_BYTES = 1 << 20
DISK_BYTES = 32 << 20
PAGES = 40


def open_store(folder, **options):
    options = {"sync": "always", "ssd_capacity_bytes": DISK_BYTES, **options}
    return KVStore.open(MEMORY_BYTES, extent_bytes=1 << 18, ssd_directories=[folder], **options)


def open_descriptors():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def large_space(store, **fields):
    """Pages of 64 KiB: memory holds 16."""
    return open_space(store, page_tokens=32, **fields)


def read(space, keys):
    out = [np.zeros(space.page_bytes[0], dtype=np.uint8) for _ in range(len(keys))]
    return [bytes(page) for page in out[: space.get(keys, out)]]


def test_what_memory_has_no_room_for_comes_back_from_disk_byte_equal(tmp_path):
    with open_store(tmp_path) as store:
        space = large_space(store)
        pages = content(PAGES, space.page_bytes[0])
        prompts = [
            (new_keys(space, 4, start=1000 * at), pages[at : at + 4]) for at in range(0, PAGES, 4)
        ]
        for keys, parts in prompts:
            assert space.put(keys, parts).stored == 4
        assert PAGES * space.page_bytes[0] > MEMORY_BYTES

        for keys, parts in prompts:
            assert read(space, keys) == [bytes(page) for page in parts]
        assert store.stats()["counts"]["evicted_to_disk"] > 0
        assert store.stats()["ssd"] is not None


def test_restores_from_memory_do_not_wait_behind_one_from_a_disk_that_hangs(
    tmp_path, monkeypatch, wait_until
):
    with open_store(tmp_path) as store:
        space, tier = large_space(store), store._link._disk
        size = space.page_bytes[0]
        old, new = new_keys(space, 2), new_keys(space, 2, start=10_000)
        pages = content(4, size)
        space.put(old, pages[:2])
        space.persist(old)
        for at in range(8):
            space.put(new_keys(space, 4, start=100_000 * (at + 1)), content(4, size))
        wait_until(lambda: space.lookup(old).tiers.get("ssd") == 2)
        space.put(new, pages[2:])
        poll, hangs = tier._log.poll, threading.Event()
        monkeypatch.setattr(tier._log, "poll", lambda: poll() if hangs.is_set() else [])

        target = np.zeros((4, size), dtype=np.uint8)
        pool = KVPool((target.ctypes.data,), size, size, 4, 1)
        from_disk = space.restore_to_kvpool(old, pool, [0, 1])
        wait_until(lambda: store.stats()["ssd"]["loads"])
        assert space.restore_to_kvpool(new, pool, [2, 3]).result().pages == 2
        assert not from_disk.done
        hangs.set()
        assert from_disk.result().pages == 2
        assert [bytes(page) for page in target] == [bytes(page) for page in pages]


def test_the_node_is_told_of_all_that_ended_before_its_store_is_closed(
    tmp_path, monkeypatch, wait_until
):
    monkeypatch.setattr(ssd, "COMPLETIONS_TURN", 1)
    store = open_store(tmp_path)
    space, tier = large_space(store), store._link._disk
    poll, close, late = tier._log.poll, tier._log.close, threading.Event()
    monkeypatch.setattr(tier._log, "poll", lambda: poll() if late.is_set() else [])
    monkeypatch.setattr(tier._log, "close", lambda: (close(), late.set()))

    def put() -> None:
        with suppress(KVStoreError):  # the store is closed before it is durable
            space.put(new_keys(space, 6), content(6, space.page_bytes[0]), durable=True)

    putting = threading.Thread(target=put)
    putting.start()
    wait_until(lambda: len(tier._jobs) > 1)
    store.close()
    putting.join(30)

    assert not putting.is_alive()
    assert not tier.behind
    assert not tier._jobs


def test_a_durable_page_is_there_when_the_directory_is_opened_again(tmp_path):
    model = identity().model
    with open_store(tmp_path) as store:
        space = large_space(store, model=model)
        keys, pages = new_keys(space, 5), content(5, space.page_bytes[0])
        space.put(keys, pages)
        space.persist(keys)
    with open_store(tmp_path) as store:
        space = large_space(store, model=model)
        assert space.lookup(keys).pages == 5
        assert read(space, keys) == [bytes(page) for page in pages]


def test_a_forked_child_keeps_neither_the_directory_nor_memory_of_its_parent(tmp_path):
    store = open_store(tmp_path)
    space = large_space(store)
    space.put(new_keys(space, 5), content(5, space.page_bytes[0]), durable=True)
    here, there = socket.socketpair()
    child = os.fork()
    if not child:
        here.close()
        there.sendall(b"!")
        there.recv(1)  # until the test ends
        os._exit(0)
    there.close()
    try:
        assert here.recv(1) == b"!"
        store.close()
        held = [str(entry.readlink()) for entry in Path(f"/proc/{child}/fd").iterdir()]
        mapped = Path(f"/proc/{child}/maps").read_text()
        assert [name for name in held if "memfd:kvstore" in name or str(tmp_path) in name] == []
        assert "memfd:kvstore" not in mapped

        open_store(tmp_path).close()
    finally:
        here.close()
        os.waitpid(child, 0)


def test_a_fork_after_the_store_was_closed_closes_no_file_of_others(tmp_path):
    store = open_store(tmp_path)
    space = large_space(store)
    space.put(new_keys(space, 5), content(5, space.page_bytes[0]), durable=True)
    store.close()
    others = [os.open("/dev/null", os.O_RDONLY) for _ in range(64)]  # numbers are used again
    try:
        child = os.fork()
        if not child:
            there = Path("/proc/self/fd")
            os._exit(0 if all((there / str(number)).exists() for number in others) else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        for number in others:
            os.close(number)


def test_a_lookup_reckons_with_what_the_disk_takes_and_learns_it(tmp_path):
    model = identity().model
    with open_store(tmp_path) as store:
        space = large_space(store, model=model)
        keys = new_keys(space, 5)
        space.put(keys, content(5, space.page_bytes[0]), durable=True)
    with open_store(tmp_path) as store:
        space = large_space(store, model=model)
        resources = store._resources
        memory_rate, disk_rate = resources.load_bytes_per_s, resources.disk_bytes_per_s
        size = 5 * space.page_bytes[0]
        cold = space.lookup(keys)
        assert cold.tiers == {"host": 0, "ssd": 5}
        assert cold.load_seconds == pytest.approx(size / memory_rate + size / disk_rate)

        assert len(read(space, keys)) == 5
        assert resources.disk_bytes_per_s != disk_rate
        assert resources.load_bytes_per_s == memory_rate, "the disk's time says nothing of memory"

        assert len(read(space, keys)) == 5
        assert resources.load_bytes_per_s != memory_rate
        warm = space.lookup(keys)
        assert warm.load_seconds == pytest.approx(size / resources.load_bytes_per_s)


def test_a_sync_comes_at_its_interval_without_anybody_calling(tmp_path, wait_until):
    with open_store(tmp_path, sync="interval") as store:
        space = large_space(store)
        keys = new_keys(space, 2)
        space.put(keys, content(2, space.page_bytes[0]))
        opened, link = space.numbers(), store._link
        persist = wire.Persist(1 << 40, opened.space, opened.shards[0], keys.packed, 30_000)
        link.send(persist)
        wait_until(lambda: 1 << 40 in link._line.answers)
        assert isinstance(link._line.answers[1 << 40], wire.Persisted)


def test_nothing_is_durable_where_nothing_is_synced(tmp_path):
    with open_store(tmp_path, sync="none") as store:
        space = large_space(store)
        keys = new_keys(space, 1)
        space.put(keys, content(1, space.page_bytes[0]))
        with pytest.raises(DurabilityUnavailable):
            space.persist(keys)


def test_a_closed_store_leaves_no_thread_and_no_descriptor(tmp_path, wait_until):
    with open_store(tmp_path / "warm"):
        pass  # what the first store of a process loads stays open
    threads, descriptors = threading.active_count(), open_descriptors()
    for at in range(2):
        with open_store(tmp_path / str(at)) as store:
            space = large_space(store)
            space.put(new_keys(space, 3), content(3, space.page_bytes[0]))
    assert open_descriptors() == descriptors
    wait_until(lambda: threading.active_count() == threads)


def test_a_directory_in_use_is_refused_and_nothing_stays_open(tmp_path):
    with open_store(tmp_path):
        descriptors = open_descriptors()
        with pytest.raises(TierUnavailable, match=str(tmp_path)):
            open_store(tmp_path)
        assert open_descriptors() == descriptors


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"ssd_capacity_bytes": 100}, "ssd_capacity_bytes"),
        ({"sync": "sometimes"}, "sync"),
        ({"ssd_directories": "/one"}, "ssd_directories"),
        ({"ssd_directories": ["/one", "/one"]}, "ssd_directories"),
    ],
)
def test_ssd_options_that_cannot_be_are_refused_by_name(options, field):
    with pytest.raises(InvalidArgument) as refused:
        KVStore.open(MEMORY_BYTES, extent_bytes=1 << 18, **options)
    assert refused.value.field == field


def test_one_prompt_longer_than_memory_is_stored_and_read_whole(tmp_path):
    with open_store(tmp_path) as store:
        space = large_space(store)
        keys, pages = new_keys(space, PAGES), content(PAGES, space.page_bytes[0])
        assert PAGES * space.page_bytes[0] > 2 * MEMORY_BYTES

        assert space.put(keys, pages).stored == PAGES

        assert space.lookup(keys).pages == PAGES
        assert read(space, keys) == [bytes(page) for page in pages]


def test_after_a_failed_sync_nothing_is_called_durable_until_its_segment_is_given_up(
    tmp_path, monkeypatch, wait_until
):
    disk = FaultyDisk(OSDisk())
    monkeypatch.setattr("kvstore.tier.ssd.OSDisk", lambda: disk)
    soon = partial(DiskRules, retry_ns=2_000_000_000)
    monkeypatch.setattr("kvstore.node.ssd.DiskRules", soon)
    model = identity().model
    with open_store(tmp_path) as store:
        space = large_space(store, model=model)
        keys, pages = new_keys(space, 2), content(2, space.page_bytes[0])
        disk.arm("sync", DiskFault.IO_ERROR)
        for _ in range(2):
            with pytest.raises(KVStoreError):
                space.put(keys, pages, durable=True)
        assert disk.hits == 1, "the second one was refused for the first one's sake"
        assert store.stats()["ssd"]["degraded"]
        assert read(space, keys) == [bytes(page) for page in pages], "it serves on"
        wait_until(lambda: not store.stats()["ssd"]["degraded"])
        assert not store.stats()["ssd"]["failed_segments"]
        space.put(keys, pages, durable=True)
    with open_store(tmp_path) as store:
        assert read(large_space(store, model=model), keys) == [bytes(page) for page in pages]


def test_more_jobs_than_the_log_takes_at_a_time_wait_and_cost_no_page(tmp_path, monkeypatch):
    """Small pages: one request can want more of them from disk than may be under way."""
    model = identity().model
    with open_store(tmp_path) as store:
        space = large_space(store, model=model)
        keys, pages = new_keys(space, 12), content(12, space.page_bytes[0])
        space.put(keys, pages, durable=True)
    monkeypatch.setattr("kvstore.tier.ssd.JOBS_MAX", 2)
    with open_store(tmp_path) as store:
        space = large_space(store, model=model)
        assert read(space, keys) == [bytes(page) for page in pages]
        assert "removed_unreadable" not in store.stats()["counts"]
        assert not store.stats()["ssd"]["degraded"]

        more, others = new_keys(space, 12, start=5000), content(12, space.page_bytes[0])
        space.put(more, others, durable=True)
        assert not store.stats()["ssd"]["degraded"]
        assert read(space, more) == [bytes(page) for page in others]


def test_names_too_long_for_the_log_are_refused_before_they_cost_anybody_the_disk(tmp_path):
    """A write that the format cannot hold would fail a segment and stop all others for a while."""
    with open_store(tmp_path) as store:
        space = large_space(store)
        space.put(new_keys(space, 1), content(1, space.page_bytes[0]), durable=True)
        with pytest.raises(InvalidArgument) as refused:
            large_space(store, model="m" * 1000)
        assert refused.value.field == "space"
        assert "1022" in str(refused.value)
        assert not store.stats()["ssd"]["degraded"]


def test_files_of_another_log_take_their_room_and_the_rest_is_reclaimed_as_ever(tmp_path):
    """They count against the directory, so room must be made before the directory has none."""
    with open_store(tmp_path / "other") as store:
        space = large_space(store)
        space.put(new_keys(space, 1), content(1, space.page_bytes[0]), durable=True)
    [foreign] = (tmp_path / "other").glob("segment-*")
    folder, segment_bytes = tmp_path / "mine", 256 << 10
    with open_store(folder, ssd_capacity_bytes=8 * segment_bytes):
        pass
    for number in range(100, 103):
        with (folder / f"segment-{number:016x}.kvlog").open("wb") as file:
            file.write(foreign.read_bytes()[:segment_bytes])
    with open_store(folder, ssd_capacity_bytes=8 * segment_bytes) as store:
        space = large_space(store)
        for at in range(30):
            keys = new_keys(space, 1, start=1000 * at)
            space.put(keys, content(1, space.page_bytes[0]), durable=True)
        stats = store.stats()["ssd"]
        assert not stats["degraded"]
        assert stats["reclaimed_segments"] > 0
        assert stats["capacity_bytes"] == 5 * segment_bytes
        assert stats["directories"][0]["used_bytes"] <= 8 * segment_bytes


def test_a_page_waits_on_disk_while_the_memory_for_it_is_being_made(
    tmp_path, wait_until, monkeypatch
):
    """Memory that changes hands is not there for a moment; that costs no page on disk."""
    with open_store(tmp_path) as store:
        space = large_space(store)
        keys, pages = new_keys(space, 2), content(2, space.page_bytes[0])
        space.put(keys, pages)
        space.persist(keys)
        for at in range(1, 10):
            space.put(new_keys(space, 4, start=1000 * at), content(4, space.page_bytes[0]))
        link = store._link
        assert space.lookup(keys).tiers == {"ssd": 2, "host": 0}
        monkeypatch.setattr(link.memory, "missing_bytes", lambda: 1 << 18)
        monkeypatch.setattr(link.memory, "pending", lambda _number: True)
        got: list[list[bytes]] = []
        reading = threading.Thread(target=lambda: got.append(read(space, keys)))
        reading.start()
        try:
            wait_until(lambda: len(link._disk.pages.jobs) == 2, what="they wait for their memory")
            with link._answered:
                link._disk.flush()
                assert len(link._disk.pages.jobs) == 2
        finally:
            monkeypatch.undo()
            reading.join()

        assert got == [[bytes(page) for page in pages]]
        assert "removed_unreadable" not in store.stats()["counts"]
