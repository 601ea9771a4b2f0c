"""``kvstore doctor``: is this machine fit for a node? Needs none, and asks one when it is there.

Each check says what was found and what to do. It reads ``/proc`` and ``/sys``, makes one small
memfd, and writes one file of 64 MiB in the directory it is pointed at, which it removes again.
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
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any, Final, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore import mover
from kvstore.config import ServerConfig, load
from kvstore.server import client

Status = Literal["ok", "warn", "fail"]

PROBE_BYTES: Final = 64 << 20
_STEP_BYTES: Final = 4 << 20
_DIRECT_BYTES: Final = 4096
_TIMEOUT_S: Final = 3.0
_PYTHON_MIN: Final = (3, 11)
_KERNEL_MIN: Final = (5, 14)
_DESCRIPTORS_MIN: Final = 4096
TOKEN_BYTES_ASSUMED: Final = 131_072
"""KV of one token of a Llama-3-8B in 16 bits: 32 layers x 8 heads x 128 x K and V x 2 bytes."""
PREFILL_TOKENS_PER_S_ASSUMED: Final = 8_000.0
"""Of one 8B model on one current GPU; what engines report to a node is used instead."""
_NOT_DIRECT: Final = (errno.EINVAL, errno.EOPNOTSUPP)
_COARSE_CLOCKS: Final = ("jiffies", "acpi_pm", "hpet", "refined-jiffies")


@dataclass(frozen=True, slots=True)
class Check:
    """What one check found.

    Attributes:
        name: of the check; stable.
        status: ``warn`` = it works, but worse than it could; ``fail`` = a node will not work.
        found: what there is.
        advice: what to do; empty when nothing is to be done.
    """

    name: str
    status: Status
    found: str
    advice: str = ""


def run(
    url: str, token: str, directory: Path | None, config: Path | None, console: Console,
    *, as_json: bool,
) -> int:  # fmt: skip
    """Make all checks and print them.

    Args:
        url: where a node may be; nobody there is fine.
        token: shown to it; may be empty.
        directory: where an SSD tier would be; None = where the configuration says, else where the
            node has one, else here.
        config: a node's configuration file; its capacity counts, not that of a node that answers.
        console: where they are printed.
        as_json: print them as JSON.

    Returns:
        1 when one of them failed, else 0.

    Raises:
        ConfigError: the configuration cannot be used.
    """
    wanted = load(ServerConfig, config).config if config is not None else None
    stats = _stats(url, token)
    if directory is not None:
        places = [directory]
    elif wanted is not None:
        places = [_existing(Path(path)) for path in wanted.ssd.directories]
    else:
        ssd = stats.get("ssd") if stats is not None else None
        places = [Path(one["path"]) for one in ssd["directories"]] if ssd else []
    capacity = wanted.host.capacity_bytes if wanted is not None else 0
    checks = examine(places or [Path()], stats, capacity)
    if as_json:
        sys.stdout.write(json.dumps({"checks": [asdict(one) for one in checks]}, indent=2) + "\n")
    else:
        colours = {"ok": "green", "warn": "yellow", "fail": "red"}
        table = Table(title="kvstore doctor")
        for name in ("check", "", "found", "what to do"):
            table.add_column(name, overflow="fold")  # a path that is cut helps nobody
        for one in checks:
            table.add_row(one.name, Text(one.status, colours[one.status]), one.found, one.advice)
        console.print(table)
    return int(any(one.status == "fail" for one in checks))


def examine(
    directories: Sequence[Path], stats: dict[str, Any] | None, capacity_bytes: int = 0,
    proc: Path = Path("/proc"), system: Path = Path("/sys"),
) -> list[Check]:  # fmt: skip
    """All checks.

    Args:
        directories: where an SSD tier would be; at least one.
        stats: what a node of this machine says of itself; None = there is none.
        capacity_bytes: what a node is to have; 0 = what it says it has.
        proc: where the process file system is.
        system: where sysfs is.
    """
    capacity = capacity_bytes or (int(stats["host"]["capacity_bytes"]) if stats is not None else 0)
    reported = [one["prefill_s_per_token"] for one in stats["sessions"]] if stats else []
    prefill = max((1 / one for one in reported if one > 0), default=PREFILL_TOKENS_PER_S_ASSUMED)
    return [
        _node(stats),
        *_versions(),
        _mover(),
        _memfd(),
        _shared_memory(Path("/dev/shm"), capacity),
        _memlock(capacity),
        _descriptors(),
        _cgroup(proc, system, capacity),
        _memory(proc, capacity),
        _huge_pages(system),
        _clock(system),
        *map(_direct_io, directories),
        _disk_speed(directories, prefill),
    ]


def _existing(path: Path) -> Path:
    """A directory, or the one that it would be made in."""
    return next((one for one in (path, *path.parents) if one.exists()), path)


def _stats(url: str, token: str) -> dict[str, Any] | None:
    url, token = client.reach(url, token)
    try:
        status, answer = client.send(url, "GET", "/v1/stats", token=token, timeout_s=_TIMEOUT_S)
        stats = json.loads(answer)
    except (OSError, ValueError, http.client.HTTPException):
        return None
    known = isinstance(stats, dict) and {"host", "sessions", "loop_lag_s"} <= stats.keys()
    return stats if known and status == 200 else None


def _node(stats: dict[str, Any] | None) -> Check:
    if stats is None:
        return Check("node", "ok", "none answers (or it wants a token); the machine is checked")
    lag = stats["loop_lag_s"] * 1e3
    found = f"{stats['node']}: {_gib(stats['host']['capacity_bytes'])}, loop lag {lag:.1f} ms"
    if lag > 20:
        return Check("node", "warn", found, "its loop is late: give it a core of its own")
    if (ssd := stats.get("ssd")) and ssd["degraded"]:
        advice = "look at its log and at kvstore tiers; it serves on from memory"
        return Check("node", "warn", f"{found}, SSD tier degraded", advice)
    return Check("node", "ok", found)


def _versions() -> list[Check]:
    python = sys.version_info[:3]
    kernel = platform.release()
    numbers = tuple(int(part) for part in kernel.split("-")[0].split(".")[:2] if part.isdecimal())
    libraries = ", ".join(f"{name} {_version(name)}" for name in ("kvstore", "msgspec", "numpy"))
    return [
        Check("python", "ok" if python >= _PYTHON_MIN else "fail", platform.python_version(),
              "" if python >= _PYTHON_MIN else "3.11 or newer is needed"),
        Check("kernel", "ok" if numbers >= _KERNEL_MIN else "warn", kernel,
              "" if numbers >= _KERNEL_MIN else "before 5.14 memory cannot be pre-faulted at once"),
        Check("libraries", "ok", libraries),
    ]  # fmt: skip


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _mover() -> Check:
    if "fallback" in mover.description or "numpy" in mover.description:
        return Check("mover", "warn", mover.description,
                     "copies are slow: install a C compiler and build again")  # fmt: skip
    return Check("mover", "ok", mover.description)


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
    return Check("memfd", "ok", "made and mapped")


def _shared_memory(path: Path, capacity: int) -> Check:
    try:
        found = os.statvfs(path)
    except OSError as error:
        return Check("tmpfs", "warn", f"{path}: {error}", "engines themselves often need it")
    free = found.f_bavail * found.f_frsize
    text = f"{path}: {_gib(free)} free"
    if free < 1 << 30:
        return Check("tmpfs", "warn", text, "the node's memfds do not need it, but engines do")
    return Check("tmpfs", "ok", text + (f"; the node has {_gib(capacity)}" if capacity else ""))


def _memlock(capacity: int) -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check("memlock", "ok", "unlimited")
    found = f"{_gib(soft)} may be locked"
    if soft < max(capacity, 1 << 30):
        return Check("memlock", "warn", found,
                     "pinned memory and RDMA need more: ulimit -l unlimited")  # fmt: skip
    return Check("memlock", "ok", found)


def _descriptors() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} (at most {hard})"
    if soft < _DESCRIPTORS_MIN:
        advice = f"ulimit -n {_DESCRIPTORS_MIN} or more: each extent and connection takes one"
        return Check("descriptors", "warn", found, advice)
    return Check("descriptors", "ok", found)


def _cgroup(proc: Path, system: Path, capacity: int) -> Check:
    limit = cgroup_limit(proc, system)
    if limit is None:
        return Check("cgroup", "ok", "no memory limit")
    found = f"{_gib(limit)} of memory" + (f", the node wants {_gib(capacity)}" if capacity else "")
    if capacity > limit:
        return Check("cgroup", "fail", found,
                     "it would be killed: lower host.capacity_bytes or raise this")  # fmt: skip
    if capacity > limit * 0.9:
        return Check("cgroup", "warn", found, "leave a tenth for everything besides pages")
    return Check("cgroup", "ok", found)


def cgroup_limit(proc: Path, system: Path) -> int | None:
    """The lowest memory limit of this process's control groups, version 1 or 2; None = none."""
    limits: list[int] = []
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, name = system / "fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            root, name = system / "fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        at = root / path.lstrip("/")
        for folder in (at, *at.parents):
            if folder == root.parent:
                break
            text = _read(folder / name)
            if text.isdecimal() and int(text) < 1 << 60:
                limits.append(int(text))
    return min(limits, default=None)


def _memory(proc: Path, capacity: int) -> Check:
    fields = dict(
        line.split(":", 1) for line in _read(proc / "meminfo").splitlines() if ":" in line
    )
    total = int(fields.get("MemTotal", "0 kB").split()[0]) << 10
    found = f"{_gib(total)} in this machine"
    if capacity > total * 0.9:
        return Check("memory", "fail", found, f"host.capacity_bytes is {_gib(capacity)}: lower it")
    return Check("memory", "ok", found)


def _huge_pages(system: Path) -> Check:
    text = _read(system / "kernel/mm/transparent_hugepage/shmem_enabled")
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen in ("always", "within_size", "force"):
        return Check("huge pages", "ok", f"shared memory: {chosen}")
    return Check("huge pages", "warn", f"shared memory: {chosen or 'unknown'}",
                 "echo within_size > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
                 " makes copies faster")  # fmt: skip


def _clock(system: Path) -> Check:
    source = _read(system / "devices/system/clocksource/clocksource0/current_clocksource")
    if not source:
        return Check("clock", "warn", "unknown", "the kernel does not say which clock it uses")
    if source in _COARSE_CLOCKS:
        return Check(
            "clock", "warn", source, "reading the time is slow; tsc or kvm-clock is better"
        )
    return Check("clock", "ok", source)


def _direct_io(directory: Path) -> Check:
    try:
        with _probe(directory) as path:
            _write(path, os.O_DIRECT, _DIRECT_BYTES)
    except OSError as error:
        if error.errno in _NOT_DIRECT:
            return Check("direct I/O", "warn", f"{directory}: not supported",
                         "an SSD tier goes through the page cache; use ext4 or xfs")  # fmt: skip
        return _not_writable("direct I/O", directory, error)
    return Check("direct I/O", "ok", f"{directory}: {_DIRECT_BYTES}-byte writes")


def _not_writable(name: str, directory: Path, error: OSError) -> Check:
    advice = "let the node's user write there, or name another one with --directory"
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
                     "for such a model recomputing is faster: use more disks")  # fmt: skip
    return Check("disk speed", "ok", found)


def disk_speed(directory: Path) -> tuple[float, str]:
    """Bytes a second that :data:`PROBE_BYTES` are read at, past the page cache.

    Where that is not possible they are those of a write with a sync; the second value says which.

    Raises:
        OSError: nothing can be written there.
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
    """An empty file that is gone afterwards."""
    descriptor, name = tempfile.mkstemp(prefix="kvstore-doctor-", dir=directory)
    os.close(descriptor)
    try:
        yield Path(name)
    finally:
        Path(name).unlink()


def _write(path: Path, flags: int, size: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | flags)
    try:
        with mmap.mmap(-1, min(size, _STEP_BYTES)) as buffer:  # aligned, as direct I/O wants
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


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 1 << 28 else f"{size / 2**20:,.2f} MiB"
