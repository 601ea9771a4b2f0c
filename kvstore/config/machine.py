"""Checks whether the memory of a node fits the machine, its control group and its limits.

``kvstore doctor`` shows these checks, and ``kvstore-server`` does not start if one of them fails:
the kernel would kill a node that uses more memory than there is.
"""

import resource
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, Literal

from kvstore.protocol.sizes import rounded

Status = Literal["ok", "warn", "fail"]

DISTRIBUTION: Final = "kvstore-server"
"""Name of the distribution; ``kvstore`` on PyPI is another project."""
OVERHEAD_BYTES: Final = 128 << 20
"""Minimum memory in addition to pages: 75 MiB for an idle node, plus its HTTP process and its
index."""
_TIGHT: Final = 0.9
_LEAVE: Final = "leave a tenth for memory besides pages"
_UNLIMITED: Final = 1 << 60
"""Values above this mean no limit: cgroup v1 reports 2^63, rounded to pages."""
_ADDRESSES_BYTES: Final = 1 << 30
"""Address space of an idle node: 512 MiB, plus the stacks of threads."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    Attributes:
        name: name of the check; stable.
        status: ``warn`` = a node works, but not as well as it could; ``fail`` = it will not work.
        found: the value found.
        advice: what to do; empty if nothing.
    """

    name: str
    status: Status
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Needs:
    """The resources that a node needs.

    Attributes:
        capacity_bytes: size of its host tier; 0 = unknown, nothing is compared.
        extent_bytes: size of an extent; each extent is a memory file.
        mapped_bytes: bytes of it that the node maps itself at a time.
        running: the node already runs, so its memory is no longer counted as available.
    """

    capacity_bytes: int
    extent_bytes: int = 0
    mapped_bytes: int = 0
    running: bool = False

    @property
    def memory_bytes(self) -> int:
        """All memory that it uses when it is full."""
        return self.capacity_bytes + OVERHEAD_BYTES if self.capacity_bytes else 0


def memory_checks(
    needs: Needs, proc: Path = Path("/proc"), system: Path = Path("/sys")
) -> list[Check]:
    """Check whether a node fits: fail if it never can, warn if it barely does.

    Args:
        needs: the resources it needs.
        proc: where the process file system is.
        system: where sysfs is.
    """
    return [_cgroup(proc, system, needs), _memory(proc, needs), _limits(needs)]


def _cgroup(proc: Path, system: Path, needs: Needs) -> Check:
    advice = "lower host.capacity_bytes, or raise the limit"
    wanted = needs.memory_bytes
    hard = min(cgroup_limits(proc, system, high=False), default=None)
    soft = min(cgroup_limits(proc, system, high=True), default=None)
    if hard is not None and wanted > hard[0]:
        return Check("cgroup", "fail", _limited(hard, needs), f"it would be killed: {advice}")
    if soft is not None and wanted > soft[0]:
        return Check("cgroup", "warn", _limited(soft, needs), f"it would be throttled: {advice}")
    if hard is None:
        return Check("cgroup", "ok", "no memory limit")
    if wanted > hard[0] * _TIGHT:
        return Check("cgroup", "warn", _limited(hard, needs), _LEAVE)
    return Check("cgroup", "ok", _limited(hard, needs))


def _limited(limit: tuple[int, Path], needs: Needs) -> str:
    return f"{rounded(limit[0])} of memory ({limit[1]}){_wanted(needs)}"


def cgroup_limits(proc: Path, system: Path, *, high: bool = False) -> list[tuple[int, Path]]:
    """The memory limits of this process's control group and of those above it, version 1 or 2.

    Args:
        proc: where the process file system is.
        system: where sysfs is.
        high: return the limits at which a process is throttled, instead of the limits at which it
            is killed.
    """
    limits: list[tuple[int, Path]] = []
    for line in read(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, name = system / "fs/cgroup", "memory.high" if high else "memory.max"
        elif "memory" in controllers.split(",") and not high:
            root, name = system / "fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be the one outside, while the root is the container's own
        # group.
        at = root / path.lstrip("/")
        for folder in (at, *at.parents):
            if folder == root.parent:
                break
            text = read(folder / name)
            if text.isdecimal() and int(text) < _UNLIMITED:
                limits.append((int(text), folder / name))
    return limits


def _memory(proc: Path, needs: Needs) -> Check:
    fields = dict(line.split(":", 1) for line in read(proc / "meminfo").splitlines() if ":" in line)
    sizes = {name: int(text.split()[0]) << 10 for name, text in fields.items() if text.split()}
    total, free = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
    if not total:
        return Check("memory", "warn", "unknown", f"{proc}/meminfo cannot be read: mount it")
    found = f"{rounded(total)} in this machine"
    if read(proc / "sys/vm/overcommit_memory") == "2" and sizes.get("CommitLimit", total) < total:
        total = sizes["CommitLimit"]
        found += f", {rounded(total)} of it may be committed (vm.overcommit_memory=2)"
    if free and not needs.running:
        found += f", {rounded(free)} available now"
    found += _wanted(needs)
    if needs.memory_bytes > total:
        return Check("memory", "fail", found, "lower host.capacity_bytes")
    if needs.memory_bytes > total * _TIGHT:
        return Check("memory", "warn", found, _LEAVE)
    if free and not needs.running and needs.memory_bytes > free:
        advice = "other processes use memory that it needs: stop them, or lower host.capacity_bytes"
        return Check("memory", "warn", found, advice)
    return Check("memory", "ok", found)


def _limits(needs: Needs) -> Check:
    """Check the limits of the process itself (``ulimit``)."""
    for name, limit, wanted, advice in (
        ("address space (ulimit -v)", resource.RLIMIT_AS,
         needs.mapped_bytes + _ADDRESSES_BYTES, "ulimit -v unlimited"),
        ("size of a file (ulimit -f)", resource.RLIMIT_FSIZE, needs.extent_bytes,
         "ulimit -f unlimited: each extent is a file in memory"),
    ):  # fmt: skip
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY and needs.capacity_bytes and wanted > soft:
            found = f"{name}: {rounded(soft)}, the node wants {rounded(wanted)}"
            return Check("limits", "fail", found, advice)
    return Check("limits", "ok", "address space and files are large enough")


def _wanted(needs: Needs) -> str:
    if not needs.capacity_bytes:
        return ""
    return (
        f"; the node wants {rounded(needs.memory_bytes)}: {rounded(needs.capacity_bytes)} for pages"
        f" and {rounded(OVERHEAD_BYTES)} for the rest"
    )


def read(path: Path) -> str:
    """The text of a file in ``/proc`` or ``/sys``; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def version_of(package: str = DISTRIBUTION) -> str:
    """The installed version of a package; of this one by default."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
