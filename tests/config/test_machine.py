"""Goal: a node that cannot fit is known before it starts, whatever it is that limits it."""

import resource

import pytest

from kvstore.config import HostConfig, ServerConfig, SSDConfig
from kvstore.config.machine import OVERHEAD_BYTES, Check, Needs, cgroup_limits, memory_checks

GIB = 1 << 30
MAX = 9223372036854771712
"""What version 1 says for no limit."""


@pytest.fixture
def tree(tmp_path):
    """``tree(name=text, ...)`` writes files below a false /proc and /sys."""

    def write(files: dict[str, object]) -> None:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

    write({"proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 16777216 kB\n"})
    return write


def checked(tmp_path, capacity_bytes: int, **needs) -> dict[str, Check]:
    found = memory_checks(Needs(capacity_bytes, **needs), tmp_path / "proc", tmp_path / "sys")
    assert all(one.advice for one in found if one.status != "ok"), "it says what to do"
    return {one.name: one for one in found}


def limit(tmp_path) -> int | None:
    found = cgroup_limits(tmp_path / "proc", tmp_path / "sys")
    return min(found)[0] if found else None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/memory.max": "max",
          "sys/fs/cgroup/a/memory.max": 4 * GIB}, 4 * GIB),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/memory.max": 2 * GIB,
          "sys/fs/cgroup/a/memory.max": 4 * GIB}, 2 * GIB),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": 3 * GIB}, 3 * GIB),
        ({"proc/self/cgroup": "0::/../outside", "sys/fs/cgroup/memory.max": 3 * GIB}, 3 * GIB),
        ({"proc/self/cgroup": "4:memory:/x\n9:name=systemd:/x\n0::/",
          "sys/fs/cgroup/memory/x/memory.limit_in_bytes": GIB,
          "sys/fs/cgroup/memory/memory.limit_in_bytes": MAX}, GIB),
        ({"proc/self/cgroup": "7:cpu,memory:/docker/0a1b",
          "sys/fs/cgroup/memory/memory.limit_in_bytes": GIB}, GIB),
        ({"proc/self/cgroup": "4:memory:/x",
          "sys/fs/cgroup/memory/x/memory.limit_in_bytes": MAX}, None),
        ({"proc/self/cgroup": "3:cpuset:/x", "sys/fs/cgroup/memory.max": GIB}, None),
        ({}, None),
    ],
    ids=["of the parent", "of its own", "of the container it is root of", "of a namespace's root",
         "of version 1", "of a container whose path is that outside", "none in version 1",
         "of another controller", "no control groups"],
)  # fmt: skip
def test_the_limit_is_the_lowest_on_the_way_up(tree, tmp_path, files, expected):
    tree(files)

    assert limit(tmp_path) == expected


@pytest.mark.parametrize(
    ("room", "status"),
    [(-1, "fail"), (0, "warn"), (GIB, "ok")],
)
def test_what_is_over_a_group_fails_and_what_is_near_it_is_warned_of(tree, tmp_path, room, status):
    tree({"proc/self/cgroup": "0::/a",
          "sys/fs/cgroup/a/memory.max": 4 * GIB + OVERHEAD_BYTES + room})  # fmt: skip

    assert checked(tmp_path, 4 * GIB)["cgroup"].status == status


def test_a_group_that_slows_down_is_warned_of(tree, tmp_path):
    tree({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/memory.high": 4 * GIB})

    assert checked(tmp_path, 4 * GIB)["cgroup"].status == "warn"
    assert "throttled" in checked(tmp_path, 4 * GIB)["cgroup"].advice
    tree({"sys/fs/cgroup/a/memory.max": 2 * GIB})
    assert checked(tmp_path, 4 * GIB)["cgroup"].status == "fail"


def test_nothing_is_compared_with_a_node_that_nobody_described(tree, tmp_path):
    tree({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/memory.max": 1 << 20})

    assert {one.status for one in checked(tmp_path, 0).values()} == {"ok"}


@pytest.mark.parametrize(
    ("total", "available", "status"),
    [(4 * GIB, 4 * GIB, "fail"), (4 * GIB + (200 << 20), 5 * GIB, "warn"),
     (8 * GIB, 8 * GIB, "ok"), (8 * GIB, 3 * GIB, "warn")],
)  # fmt: skip
def test_the_memory_of_the_machine_bounds_too(tree, tmp_path, total, available, status):
    tree({"proc/meminfo": f"MemTotal: {total >> 10} kB\nMemAvailable: {available >> 10} kB"})

    assert checked(tmp_path, 4 * GIB)["memory"].status == status


def test_a_machine_that_promises_no_more_than_it_has_bounds_by_what_it_promises(tree, tmp_path):
    tree({"proc/meminfo": "MemTotal: 8388608 kB\nCommitLimit: 4194304 kB"})
    assert checked(tmp_path, 4 * GIB)["memory"].status == "ok"
    tree({"proc/sys/vm/overcommit_memory": 2})
    assert checked(tmp_path, 4 * GIB)["memory"].status == "fail"


def test_a_machine_that_does_not_say_is_warned_of(tmp_path):
    assert checked(tmp_path, 4 * GIB)["memory"].status == "warn"


def test_limits_of_the_process_count_where_the_node_would_meet_them(tree, tmp_path, monkeypatch):
    limits = {resource.RLIMIT_AS: resource.RLIM_INFINITY, resource.RLIMIT_FSIZE: 1 << 20}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], limits[which]))

    assert "ulimit -f" in checked(tmp_path, GIB, extent_bytes=2 << 20)["limits"].found
    assert checked(tmp_path, GIB, extent_bytes=1 << 20)["limits"].status == "ok"
    limits[resource.RLIMIT_AS] = 3 * GIB
    assert checked(tmp_path, 4 * GIB, mapped_bytes=1 << 20)["limits"].status == "ok"
    assert checked(tmp_path, 4 * GIB, mapped_bytes=4 * GIB)["limits"].status == "fail"


def test_a_node_wants_whole_extents_and_maps_all_of_them_only_with_ssds():
    host = HostConfig(capacity_bytes=1000 << 20, extent_bytes=256 << 20)
    ssd = SSDConfig(directories=("/d",))

    assert ServerConfig(host=host).needs == Needs(768 << 20, 256 << 20, 256 << 20)
    assert ServerConfig(host=host, ssd=ssd).needs == Needs(768 << 20, 256 << 20, 768 << 20)
