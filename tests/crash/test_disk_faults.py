"""Goal: a disk in trouble is said clearly, at the start or while serving; it is never a crash."""

import json
import os
import re
import resource
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvstore.client.space import Space
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.page import PrefixKeys
from kvstore.testing.crash import MIB, PAGE_BYTES, chain_keys, open_space, page_of, wrong_pages
from kvstore.testing.server import Server
from kvstore.tier import record
from tests.conftest import WaitUntil
from tests.connecting import connect

PAGES = 12
Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """``start("ssd.sync=always", wait=True) -> Server``, with a disk in ``tmp_path/ssd``."""
    started: list[Server] = []

    def make(*chosen: str, wait: bool = True) -> Server:
        settings: dict[str, object] = {
            "node.name": f"disk-faults-{os.getpid()}",
            "socket.path": tmp_path / "kv.sock",
            "host.capacity_bytes": 2 * MIB,
            "host.extent_bytes": MIB,
            "host.session_quota_bytes": 2 * MIB,
            "host.prefault": "false",
            "events.endpoint": "",
            "events.replay_endpoint": "",
            "ssd.directories": tmp_path / "ssd",
            "ssd.capacity_bytes": 64 * MIB,
            "ssd.segment_bytes": MIB,
            "ssd.sync": "always",
            "ssd.admission": "all",
        }
        settings |= dict(one.split("=", 1) for one in chosen)
        server = running.enter_context(Server(tmp_path, settings))
        started.append(server)
        if wait:
            server.wait_ready()
        return server

    with ExitStack() as running:
        yield make
        for server in started:
            if not server.ended:
                assert server.stop() == 0, server.errors
            assert "Traceback" not in server.errors


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """``mounted("size=4m")`` mounts a small disk of its own, and again changes its options."""
    path = tmp_path / "disk"
    path.mkdir()

    def mount(options: str) -> Path:
        again = "remount," if path.is_mount() else ""
        command = ["mount", "-t", "tmpfs", "-o", again + options, "tmpfs", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"this user may not mount: {done.stderr.strip()}")
        return path

    yield mount
    if path.is_mount():
        subprocess.run(["umount", "-l", str(path)], check=True)


def pages_of(keys: PrefixKeys) -> list[np.ndarray]:
    return [page_of(key) for key in keys]


def read(space: Space, keys: PrefixKeys) -> int:
    """How many pages are there, every one of them right."""
    out = [np.empty(PAGE_BYTES, dtype=np.uint8) for _ in keys]
    got = space.get(keys, out=out)
    assert wrong_pages(keys, out[:got]) == []
    return got


def metric(server: Server, name: str) -> float:
    found = re.search(rf"(?m)^{re.escape(name)} (\S+)$", server.fetch("/metrics").decode())
    return float(found[1]) if found else 0.0


def refused(server: Server, code: str, *words: object) -> None:
    """It ended at once, with status 2 and one line that says why and where."""
    assert server.wait_end() == 2
    last = server.errors.splitlines()[-1]
    assert last.startswith(f"kvstore-server: {code}: ")
    assert "Traceback" not in server.errors
    for word in words:
        assert str(word) in last


# At the start


def test_a_directory_of_another_node_is_refused_and_not_touched(start: Start, tmp_path: Path):
    assert start("node.name=first").stop() == 0
    before = {path: path.read_bytes() for path in (tmp_path / "ssd").iterdir()}

    refused(start("node.name=second", wait=False), "config", tmp_path / "ssd", "'first'")

    assert {path: path.read_bytes() for path in (tmp_path / "ssd").iterdir()} == before


def test_a_log_of_a_newer_version_is_refused_and_not_touched(start: Start, tmp_path: Path):
    assert start().stop() == 0
    identity = tmp_path / "ssd" / "kvstore-log.json"
    identity.write_text(json.dumps(json.loads(identity.read_text()) | {"format": 99}))
    before = identity.read_bytes()

    refused(start(wait=False), "config", tmp_path / "ssd", "format 99")

    assert identity.read_bytes() == before


def test_a_directory_that_another_daemon_uses_is_refused(start: Start, tmp_path: Path):
    start()

    second = start(f"socket.path={tmp_path / 'other.sock'}", wait=False)

    refused(second, "tier_unavailable", tmp_path / "ssd", "another process")


def test_a_capacity_smaller_than_a_segment_is_refused(start: Start):
    server = start("ssd.capacity_bytes=1MiB", "ssd.segment_bytes=2MiB", wait=False)

    refused(server, "config", "ssd.capacity_bytes", "ssd.segment_bytes")


def test_a_file_where_the_directory_should_be_is_refused(start: Start, tmp_path: Path):
    (tmp_path / "ssd").write_text("not a directory")

    refused(start(wait=False), "config", tmp_path / "ssd")


def test_a_capacity_larger_than_the_file_system_is_refused(
    start: Start, mounted: Callable[[str], Path]
):
    path = mounted("size=32m")

    refused(start(f"ssd.directories={path}", wait=False), "config", "ssd.capacity_bytes", path)

    assert list(path.iterdir()) == []


def test_a_read_only_directory_is_refused(start: Start, mounted: Callable[[str], Path]):
    path = mounted("ro,size=64m")

    refused(start(f"ssd.directories={path}", wait=False), "tier_unavailable", path, "Read-only")


# While it serves


def fill_until_trouble(space: Space, server: Server) -> int:
    """Store chains until the disk is in trouble; how many pages were stored."""
    stored = 0
    for chain in range(1_000, 1_200):
        keys = chain_keys(space, chain, PAGES)
        stored += space.put(keys, pages_of(keys)).stored
        if server.get("/readyz")["ssd"] == "degraded":
            return stored
    raise AssertionError("the disk took everything")


def check_degraded_but_serving(space: Space, server: Server, code: str) -> None:
    assert server.get("/readyz") | {"withheld_bytes": 0, "unwatched_processes": 0} == {
        "status": "ready", "withheld_bytes": 0, "ssd": "degraded", "unwatched_processes": 0,
        "cluster": "off", "membership": "off", "directory": "off", "registered_bytes": 0,
        "registered_huge_bytes": 0,
    }  # fmt: skip
    assert metric(server, "kvstore_ssd_degraded") == 1
    assert metric(server, f'kvstore_ssd_errors_total{{code="{code}"}}') > 0
    keys = chain_keys(space, 5, 4)
    assert space.put(keys, pages_of(keys)).stored == 4, "memory goes on"
    assert read(space, keys) == 4
    with pytest.raises(KVStoreError) as raised:
        space.persist(keys)
    assert raised.value.retryable
    assert not server.ended


def test_a_full_disk_degrades_the_daemon_and_loses_nothing_that_was_durable(
    start: Start, mounted: Callable[[str], Path], wait_until: WaitUntil
):
    path = mounted("size=64m")
    (path / "of somebody else").write_bytes(bytes(60 * MIB))
    server = start(f"ssd.directories={path}", "ssd.write=through")
    assert "are free or used by it" in server.errors
    assert "is tmpfs" in server.errors
    assert server.get("/readyz")["ssd"] == "ready"
    with connect(server.address, timeout_s=10.0) as store:
        space = open_space(store)
        safe = chain_keys(space, 1, PAGES)
        space.put(safe, pages_of(safe), durable=True)

        fill_until_trouble(space, server)

        check_degraded_but_serving(space, server, "capacity")
        assert read(space, safe) == PAGES
    server.kill()
    again = start(f"ssd.directories={path}")
    with connect(again.address, timeout_s=10.0) as store:
        assert read(open_space(store), safe) == PAGES


@pytest.mark.soak("crash", minutes=1)  # it waits until the daemon tries again
def test_a_disk_that_refuses_writes_degrades_the_daemon_until_it_takes_them_again(
    start: Start, wait_until: WaitUntil
):
    server = start("ssd.write=through")
    with connect(server.address, timeout_s=10.0) as store:
        space = open_space(store)
        keys = chain_keys(space, 2, PAGES)
        _, most = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (MIB // 2, most))

        fill_until_trouble(space, server)

        check_degraded_but_serving(space, server, "tier_unavailable")
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (most, most))
        wait_until(lambda: server.get("/readyz")["ssd"] == "ready")
        space.put(keys, pages_of(keys), durable=True)
    server.kill()
    with connect(start().address, timeout_s=10.0) as store:
        assert read(open_space(store), keys) == PAGES


# Damage


def flip(directory: Path, page: np.ndarray) -> Path:
    """Change a byte in the middle of a page where it lies on disk."""
    for path in directory.glob("*.kvlog"):
        at = path.read_bytes().find(page.tobytes())
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + PAGE_BYTES // 2)
                byte = file.read(1)[0]
                file.seek(at + PAGE_BYTES // 2)
                file.write(bytes([byte ^ 0x10]))
                file.flush()
                os.fsync(file.fileno())
            return path
    raise AssertionError("the page is not on disk")


def store_and_evict(space: Space, chains: Sequence[int]) -> None:
    """Store chains durably, then so many others that none of them stays in memory."""
    for chain in [*chains, *range(500, 506)]:
        keys = chain_keys(space, chain, PAGES)
        space.put(keys, pages_of(keys), durable=True)
    for chain in chains:
        assert space.lookup(chain_keys(space, chain, PAGES)).tiers == {"host": 0, "ssd": PAGES}


def test_a_record_damaged_while_the_daemon_runs_is_a_miss_and_counted(start: Start, tmp_path: Path):
    server = start()
    with connect(server.address, timeout_s=10.0) as store:
        space = open_space(store)
        store_and_evict(space, [1, 2])
        keys = chain_keys(space, 1, PAGES)

        flip(tmp_path / "ssd", page_of(keys[7]))

        assert read(space, keys) == 7
        assert metric(server, 'kvstore_removed_total{cause="corrupt"}') == PAGES - 7
        assert metric(server, 'kvstore_ssd_errors_total{code="page_corrupt"}') >= 1
        assert space.lookup(keys).pages == 7, "quarantined: it is not offered again"
        assert read(space, chain_keys(space, 2, PAGES)) == PAGES
        assert server.get("/readyz")["ssd"] == "ready", "one bad page is no bad disk"
        space.put(keys, pages_of(keys), durable=True)
        assert read(space, keys) == PAGES, "stored anew it is a hit again"


@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_a_record_damaged_while_the_daemon_is_down_is_a_miss(
    start: Start, tmp_path: Path, end: str
):
    first = start()
    with connect(first.address, timeout_s=10.0) as store:
        space = open_space(store)
        store_and_evict(space, [1, 2])
        keys, other = (chain_keys(space, chain, PAGES) for chain in (1, 2))
    if end == "killed":
        first.kill()
    else:
        assert first.stop() == 0

    flip(tmp_path / "ssd", page_of(keys[7]))

    server = start()
    with connect(server.address, timeout_s=10.0) as store:
        space = open_space(store)
        assert read(space, keys) == 7
        assert space.lookup(keys).pages == 7
        assert read(space, other) == PAGES


def test_a_segment_of_a_newer_version_is_left_as_it_is(start: Start, tmp_path: Path):
    first = start()
    with connect(first.address, timeout_s=10.0) as store:
        space = open_space(store)
        keys = chain_keys(space, 1, PAGES)
        space.put(keys, pages_of(keys), durable=True)
    first.kill()
    (segment,) = (tmp_path / "ssd").glob("*.kvlog")
    found = segment.read_bytes()
    header = found[:8] + (99).to_bytes(4, "little") + found[12 : record._CHECKSUM_AT]
    newer = record._closed(header) + found[record.HEADER_BYTES :]
    segment.write_bytes(newer)

    server = start()
    with connect(server.address, timeout_s=10.0) as store:
        space = open_space(store)
        assert read(space, keys) == 0
        space.put(keys, pages_of(keys), durable=True)
        assert read(space, keys) == PAGES
    assert server.stop() == 0
    assert segment.read_bytes() == newer
    assert str(segment) in server.errors
