"""``kvstore doctor``: checks this machine, with or without a running node.

Each check reports what it found and what to do. The checks read ``/proc`` and ``/sys``, create one
small memfd, and write one file of 64 MiB to each tested directory, which they delete again.
"""

import errno
import http.client
import json
import mmap
import os
import platform
import resource
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Final, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore.cli.decoding import Reply
from kvstore.cli.engines import conductor_checks, name_check
from kvstore.cli.peers import peer_checks
from kvstore.config import ServerConfig, load
from kvstore.config.machine import DISTRIBUTION, Check, Needs, memory_checks, read, version_of
from kvstore.protocol.counts import NodeStats
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.sizes import rounded
from kvstore.server import client
from kvstore.server.answers import Configuration, ConfigValue
from kvstore.server.installed import installed

T = TypeVar("T")

PROBE_BYTES: Final = 64 << 20
_STEP_BYTES: Final = 4 << 20
_DIRECT_BYTES: Final = 4096
_TIMEOUT_S: Final = 3.0
_PYTHON_MIN: Final = (3, 11)
_KERNEL_MIN: Final = (5, 14)
_DESCRIPTORS_MIN: Final = 4096
LAG_S_MAX: Final = 0.1
"""An event loop with a larger lag in the last half minute delayed engines."""
TOKEN_BYTES_ASSUMED: Final = 131_072
"""KV of one token of a Llama-3-8B in 16 bits: 32 layers x 8 heads x 128 x K and V x 2 bytes."""
PREFILL_TOKENS_PER_S_ASSUMED: Final = 8_000.0
"""Of one 8B model on one current GPU; used if engines have not reported their speed."""
_NOT_DIRECT: Final = (errno.EINVAL, errno.EOPNOTSUPP)
_COARSE_CLOCKS: Final = ("jiffies", "acpi_pm", "hpet", "refined-jiffies")


def run(
    url: str, token: str, directory: Path | None, config: Path | None, console: Console,
    *, as_json: bool, conductor: str | None = None,
) -> int:  # fmt: skip
    """Run all checks and print the results.

    Args:
        url: address of a node; the node need not run.
        token: token for the node; may be empty.
        directory: directory for an SSD tier; None = the directories of the configuration, else of
            the running node, else the working directory.
        config: configuration file of a node; the file and the environment override the settings of
            a running node.
        console: where the results are printed.
        as_json: print them as JSON.
        conductor: URL of a Conductor, whose engines and nodes are checked too; None = none.

    Returns:
        1 if a check failed, else 0.

    Raises:
        ConfigError: the configuration is invalid.
    """
    loaded = load(ServerConfig, config)
    wanted = loaded.config if config is not None or loaded.sources else None
    stats = _stats(url, token)
    if directory is not None:
        places = [directory]
    elif wanted is not None:
        places = [_existing(Path(path)) for path in wanted.ssd.directories]
    else:
        ssd = stats.ssd if stats is not None else None
        places = [Path(one.path) for one in ssd.directories] if ssd is not None else []
    checks = examine(places or [Path()], stats, wanted)
    if config is None and not loaded.config.cluster.name:
        checks += peer_checks(None, stats, _settings(url, token) if stats is not None else None)
    else:
        checks += peer_checks(wanted, stats)
    if conductor:
        checks += conductor_checks(conductor, token)
    if as_json:
        sys.stdout.write(json.dumps({"checks": [asdict(one) for one in checks]}, indent=2) + "\n")
    else:
        colours = {"ok": "green", "warn": "yellow", "fail": "red"}
        table = Table(title="kvstore doctor")
        for name in ("check", "", "found", "what to do"):
            table.add_column(name, overflow="fold")  # never cut a path
        for one in checks:
            table.add_row(one.name, Text(one.status, colours[one.status]), one.found, one.advice)
        console.print(table)
    return int(any(one.status == "fail" for one in checks))


def examine(
    directories: Sequence[Path], stats: NodeStats | None, wanted: ServerConfig | None = None,
    proc: Path = Path("/proc"), system: Path = Path("/sys"),
) -> list[Check]:  # fmt: skip
    """Run all checks.

    Args:
        directories: directories for an SSD tier; at least one.
        stats: statistics of the node of this machine; None = no node answers.
        wanted: configuration of a node; None = the configuration of the running node.
        proc: where the process file system is.
        system: where sysfs is.
    """
    needs = Needs(stats.host.capacity_bytes if stats is not None else 0)
    if wanted is not None:
        needs = wanted.needs
    needs = replace(needs, running=stats is not None)
    connections = wanted.socket.connections_max if wanted is not None else 0
    reported = [one.prefill_s_per_token for one in stats.sessions] if stats else []
    prefill = max((1 / one for one in reported if one > 0), default=PREFILL_TOKENS_PER_S_ASSUMED)
    return [
        _node(stats),
        *name_check(stats),
        *_versions(),
        _core(stats),
        _mover(),
        _memfd(),
        _shared_memory(Path("/dev/shm"), needs.capacity_bytes),
        _memlock(needs.capacity_bytes),
        _descriptors(needs, connections),
        *memory_checks(needs, proc, system),
        _huge_pages(system),
        _clock(system),
        *map(_direct_io, directories),
        _disk_speed(directories, prefill),
    ]


def _existing(path: Path) -> Path:
    """A directory, or the nearest existing parent."""
    return next((one for one in (path, *path.parents) if one.exists()), path)


def _stats(url: str, token: str) -> NodeStats | None:
    """The statistics of a node; None = no node answers, or it does not tell."""
    return _answer(url, token, "/v1/stats", NodeStats)


def _settings(url: str, token: str) -> list[ConfigValue] | None:
    """The settings of a node; None = it does not tell them."""
    answer = _answer(url, token, "/v1/config", Configuration)
    return answer.values if answer is not None else None


def _answer(url: str, token: str, path: str, kind: type[T]) -> T | None:
    """An answer of a node; None = there is none, or it is none."""
    url, token = client.endpoint(url, token)
    try:
        status, answer = client.send(url, "GET", path, token=token, timeout_s=_TIMEOUT_S)
        if status != http.client.OK:
            return None
        return Reply(json.loads(answer), kind).value
    except (OSError, ValueError, http.client.HTTPException, KVStoreError):
        return None


def _node(stats: NodeStats | None) -> Check:
    if stats is None:
        return Check("node", "ok", "no answer, or a token is needed; only the machine is checked")
    lag = stats.loop_lag_s
    found = f"{stats.node}: {rounded(stats.host.capacity_bytes)}, loop lag"
    found += f" {lag * 1e3:.1f} ms"
    troubles: list[tuple[str, str]] = []
    if why := stats.unready:
        troubles.append((f"not ready: {why}", "restart the engines of its previous run"))
    if lag > LAG_S_MAX:
        troubles.append(("", "its event loop is delayed: give the node a core of its own"))
    if stats.ssd is not None and stats.ssd.degraded:
        advice = "see its log and kvstore tiers; it serves from memory only"
        troubles.append(("SSD tier degraded", advice))
    if unwatched := stats.unwatched_processes:
        advice = "share the PID namespace with engines, or use Linux 6.5 (docs/containers.md)"
        troubles.append((f"{unwatched} processes whose exit it cannot detect", advice))
    if not troubles:
        return Check("node", "ok", found)
    found = ", ".join([found, *(what for what, _ in troubles if what)])
    return Check("node", "warn", found, "; ".join(advice for _, advice in troubles))


def _versions() -> list[Check]:
    python = sys.version_info[:3]
    kernel = platform.release()
    numbers = tuple(int(part) for part in kernel.split("-")[0].split(".")[:2] if part.isdecimal())
    libraries = ", ".join(
        f"{name} {version_of(name)}" for name in (DISTRIBUTION, "msgspec", "numpy")
    )
    return [
        Check("python", "ok" if python >= _PYTHON_MIN else "fail", platform.python_version(),
              "" if python >= _PYTHON_MIN else "3.11 or newer is needed"),
        Check("kernel", "ok" if numbers >= _KERNEL_MIN else "warn", kernel,
              "" if numbers >= _KERNEL_MIN else "before 5.14 memory cannot be pre-faulted at once"),
        Check("libraries", "ok", libraries),
    ]  # fmt: skip


def _core(stats: NodeStats | None) -> Check:
    found = installed().core if stats is None else stats.core or "unknown"
    faster = "decisions are slower: install the wheel of `make wheel`"
    return Check("core", "ok", found, faster if found == "pure" else "")


def _mover() -> Check:
    found = installed().mover
    if "fallback" in found or "numpy" in found:
        return Check("mover", "warn", found,
                     "copies are slow: install a C compiler and reinstall kvstore")  # fmt: skip
    return Check("mover", "ok", found)


def _memfd() -> Check:
    try:
        descriptor = os.memfd_create("kvstore-doctor", os.MFD_CLOEXEC)
    except OSError as error:
        return Check("memfd", "fail", str(error), "allow memfd_create (seccomp, container policy)")
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as memory:
            memory[0] = 1
    except OSError as error:
        return Check("memfd", "fail", str(error), "shared memory cannot be mapped")
    finally:
        os.close(descriptor)
    return Check("memfd", "ok", "created and mapped")


def _shared_memory(path: Path, capacity: int) -> Check:
    try:
        found = os.statvfs(path)
    except OSError as error:
        return Check("tmpfs", "warn", f"{path}: {error}", "engines often need it")
    free = found.f_bavail * found.f_frsize
    text = f"{path}: {rounded(free)} free"
    if free < 1 << 30:
        return Check("tmpfs", "warn", text, "the node's memfds do not need it, but engines do")
    return Check("tmpfs", "ok", text + (f"; the node has {rounded(capacity)}" if capacity else ""))


def _memlock(capacity: int) -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check("memlock", "ok", "unlimited")
    found = f"{rounded(soft)} may be locked"
    if soft < max(capacity, 1 << 30):
        return Check("memlock", "warn", found,
                     "pinned memory and RDMA need more: ulimit -l unlimited")  # fmt: skip
    return Check("memlock", "ok", found)


def _descriptors(needs: Needs, connections: int) -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} (at most {hard})"
    extents = needs.capacity_bytes // needs.extent_bytes if needs.extent_bytes else 0
    # One for the connection, and one for its process.
    wanted = max(_DESCRIPTORS_MIN, extents + 2 * connections)
    if soft < wanted:
        advice = f"ulimit -n {wanted} or more: each extent and connection takes one"
        return Check("descriptors", "fail" if soft <= extents else "warn", found, advice)
    return Check("descriptors", "ok", found)


def _huge_pages(system: Path) -> Check:
    text = read(system / "kernel/mm/transparent_hugepage/shmem_enabled")
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen in ("always", "within_size", "force"):
        return Check("huge pages", "ok", f"shared memory: {chosen}")
    return Check("huge pages", "warn", f"shared memory: {chosen or 'unknown'}",
                 "echo within_size > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
                 " makes copies faster")  # fmt: skip


def _clock(system: Path) -> Check:
    source = read(system / "devices/system/clocksource/clocksource0/current_clocksource")
    if not source:
        return Check("clock", "warn", "unknown", "the kernel does not say which clock it uses")
    if source in _COARSE_CLOCKS:
        return Check(
            "clock", "warn", source, "reading the clock is slow; tsc or kvm-clock is faster"
        )
    return Check("clock", "ok", source)


def _direct_io(directory: Path) -> Check:
    try:
        with _probe(directory) as path:
            _write(path, os.O_DIRECT, _DIRECT_BYTES)
    except OSError as error:
        if error.errno in _NOT_DIRECT:
            return Check("direct I/O", "warn", f"{directory}: not supported",
                         "an SSD tier would use the page cache; use ext4 or xfs")  # fmt: skip
        return _not_writable("direct I/O", directory, error)
    return Check("direct I/O", "ok", f"{directory}: {_DIRECT_BYTES}-byte writes")


def _not_writable(name: str, directory: Path, error: OSError) -> Check:
    advice = "give the node's user write access, or choose another directory with --directory"
    if isinstance(error, FileNotFoundError):  # the node would create it, if it may
        advice = f"create it, and {advice}"
    return Check(name, "warn", f"{directory}: {error.strerror or error}", advice)


def _disk_speed(directories: Sequence[Path], prefill: float) -> Check:
    needed = TOKEN_BYTES_ASSUMED * prefill
    speed, way = 0.0, ""
    for directory in directories:
        try:
            more, way = disk_speed(directory)
        except OSError as error:
            return _not_writable("disk speed", directory, error)
        speed += more
    found = (
        f"{speed / 1e9:.2f} GB/s {way}; computing {prefill:,.0f} tokens/s of"
        f" {TOKEN_BYTES_ASSUMED >> 10} KiB makes {needed / 1e9:.2f} GB/s"
    )
    if speed < needed:
        return Check("disk speed", "warn", found,
                     "recomputing is faster than this disk: use more disks")  # fmt: skip
    return Check("disk speed", "ok", found)


def disk_speed(directory: Path) -> tuple[float, str]:
    """Measure the read speed without the page cache, in bytes per second.

    Without direct I/O, measure a synced write instead. The second value says which.

    Raises:
        OSError: the directory is not writable.
    """
    with _probe(directory) as path:
        start = perf_counter()
        _write(path, 0, PROBE_BYTES)
        written = PROBE_BYTES / (perf_counter() - start)
        try:
            start = perf_counter()
            _read_direct(path)
            return PROBE_BYTES / (perf_counter() - start), "read past the page cache"
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                raise
    return written, "written and synced"


@contextmanager
def _probe(directory: Path) -> Iterator[Path]:
    """A temporary file, deleted at the end."""
    descriptor, name = tempfile.mkstemp(prefix="kvstore-doctor-", dir=directory)
    os.close(descriptor)
    try:
        yield Path(name)
    finally:
        Path(name).unlink()


def _write(path: Path, flags: int, size: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | flags)
    try:
        with mmap.mmap(-1, min(size, _STEP_BYTES)) as buffer:  # aligned for direct I/O
            buffer.write(os.urandom(4096) * (len(buffer) // 4096))
            for offset in range(0, size, len(buffer)):
                if os.pwrite(descriptor, buffer, offset) != len(buffer):
                    raise OSError(errno.ENOSPC, "the disk is full", str(path))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_direct(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, _STEP_BYTES) as buffer:
            for offset in range(0, PROBE_BYTES, _STEP_BYTES):
                os.preadv(descriptor, [buffer], offset)
    finally:
        os.close(descriptor)
