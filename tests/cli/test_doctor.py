"""Goal: ``doctor`` fails what would not work, warns of what would be slow, and says what to do."""

import json
import resource
import socket

import pytest

from kvstore.cli import doctor, main
from kvstore.cli.decoding import completed
from kvstore.cli.doctor import examine
from kvstore.config import HostConfig, ServerConfig, SocketConfig
from kvstore.config.machine import Check
from kvstore.protocol.counts import NodeStats
from tests.client.conftest import READY, Daemon, arguments

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of 8 GiB; ``machine(name, text)`` writes a file of its /proc or /sys."""
    monkeypatch.setattr(doctor, "PROBE_BYTES", 4 << 20)

    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("proc/meminfo", "MemTotal:       8388608 kB\nMemFree: 1 kB\nMemAvailable: 6291456 kB\n")
    write("proc/self/cgroup", "0::/a/b\n")
    write("sys/fs/cgroup/a/b/memory.max", "max\n")
    write("sys/fs/cgroup/a/memory.max", f"{4 * GIB}\n")
    write("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always [within_size] never\n")
    write("sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc\n")
    return write


def wanted(capacity: int, **sections) -> ServerConfig | None:
    """The configuration of a node of that size; None = nobody said."""
    host = HostConfig(capacity_bytes=capacity, extent_bytes=1 << 20) if capacity else None
    return ServerConfig(host=host, **sections) if host is not None else None


def checks(tmp_path, capacity: int = 0, stats=None, **sections) -> dict[str, Check]:
    config = wanted(capacity, **sections)
    told = completed(stats, NodeStats) if stats is not None else None
    found = examine([tmp_path], told, config, tmp_path / "proc", tmp_path / "sys")
    assert all(one.advice for one in found if one.status != "ok"), "it says what to do"
    return {one.name: one for one in found}


def test_every_subject_is_checked(machine, tmp_path):
    names = set(checks(tmp_path))

    assert names == {
        "node", "python", "kernel", "libraries", "core", "mover", "memfd", "tmpfs", "memlock",
        "descriptors", "cgroup", "memory", "limits", "huge pages", "clock", "direct I/O",
        "disk speed",
    }  # fmt: skip
    assert not list(tmp_path.glob("kvstore-doctor-*")), "nothing is left behind"


def test_the_core_is_the_running_nodes_and_a_pure_one_can_be_made_faster(machine, tmp_path):
    assert checks(tmp_path)["core"].found == "pure", "of this installation"
    node = {"host": {"capacity_bytes": GIB}, "sessions": [], "loop_lag_s": 0.0, "node": "n"}
    pure, compiled = (
        checks(tmp_path, stats={**node, "core": one})["core"] for one in ("pure", "compiled")
    )

    assert (compiled.status, compiled.found, compiled.advice) == ("ok", "compiled", "")
    assert (pure.status, pure.found) == ("ok", "pure")
    assert "make wheel" in pure.advice


def test_the_memory_of_a_node_is_held_against_the_machine(machine, tmp_path):
    found = checks(tmp_path, 5 * GIB)

    assert (found["cgroup"].status, found["memory"].status) == ("fail", "ok")
    assert "the node wants 5.1 GiB: 5.0 GiB for pages" in found["cgroup"].found
    machine("proc/self/cgroup", "")
    assert checks(tmp_path, 5 * GIB)["cgroup"].found == "no memory limit"
    assert checks(tmp_path, 8 * GIB)["memory"].status == "fail"


def test_more_descriptors_than_a_process_may_have_are_asked_for(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (20_000, 20_000))
    few = checks(tmp_path, GIB, socket=SocketConfig(connections_max=1))["descriptors"]
    many = checks(tmp_path, GIB, socket=SocketConfig(connections_max=65_536))["descriptors"]
    limited = checks(tmp_path, 64 * GIB)["descriptors"]

    assert few.status == "ok"
    assert (many.status, "132096 or more" in many.advice) == ("warn", True)
    assert limited.status == "fail", "each extent takes one: it would not start"


def test_what_a_running_node_has_is_not_asked_for_again(machine, tmp_path):
    stats = {"node": "n", "host": {"capacity_bytes": 3 * GIB}, "loop_lag_s": 0.0, "sessions": []}
    machine("proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 1048576 kB\n")

    assert checks(tmp_path, 3 * GIB)["memory"].status == "warn"
    assert checks(tmp_path, 3 * GIB, stats)["memory"].status == "ok"
    assert checks(tmp_path, 0, stats)["memory"].status == "ok"


def test_slow_clocks_and_small_pages_are_warned_of(machine, tmp_path):
    machine("sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet\n")
    machine("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always [never]\n")
    found = checks(tmp_path)

    assert found["clock"].status == found["huge pages"].status == "warn"


def test_a_directory_that_cannot_be_written_is_warned_of(machine, tmp_path):
    found = {
        one.name: one
        for one in examine([tmp_path / "none"], None, None, tmp_path / "proc", tmp_path / "sys")
    }

    assert found["direct I/O"].status == found["disk speed"].status == "warn"
    assert "--directory" in found["disk speed"].advice
    assert found["disk speed"].found == f"{tmp_path / 'none'}: No such file or directory"
    assert found["disk speed"].advice.startswith("create it, and give the node's user write access")


def test_the_disk_is_held_against_what_engines_report(machine, tmp_path):
    def stats(seconds_per_token: float) -> dict:
        return {"node": "n", "host": {"capacity_bytes": GIB}, "loop_lag_s": 0.0,
                "sessions": [{"prefill_s_per_token": seconds_per_token}]}  # fmt: skip

    assert checks(tmp_path, stats=stats(1e-12))["disk speed"].status == "warn"
    assert checks(tmp_path, stats=stats(1.0))["disk speed"].status == "ok"


def test_a_node_whose_ssd_tier_is_degraded_is_warned_of(machine, tmp_path):
    def stats(*, degraded: bool) -> dict:
        return {"node": "n", "host": {"capacity_bytes": GIB}, "loop_lag_s": 0.0, "sessions": [],
                "ssd": {"degraded": degraded}}  # fmt: skip

    assert checks(tmp_path, stats=stats(degraded=False))["node"].status == "ok"
    found = checks(tmp_path, stats=stats(degraded=True))["node"]
    assert (found.status, "degraded" in found.found) == ("warn", True)


def test_a_node_is_warned_of_for_each_thing_that_is_wrong_with_it(machine, tmp_path):
    def node(**wrong: object) -> Check:
        stats = {"node": "n", "host": {"capacity_bytes": GIB}, "loop_lag_s": 0.05, "sessions": [],
                 "unready": "", "unwatched_processes": 0, "ssd": None}  # fmt: skip
        return checks(tmp_path, stats={**stats, **wrong})["node"]

    assert node().status == "ok"
    unwatched = node(unwatched_processes=3)
    assert (unwatched.status, "3 processes" in unwatched.found) == ("warn", True)
    assert "PID namespace" in unwatched.advice
    both = node(unready="no memory", loop_lag_s=0.2)
    assert (both.status, "not ready: no memory" in both.found) == ("warn", True)
    assert "a core of its own" in both.advice


def test_the_command_needs_no_node_and_fails_when_a_check_does(machine, tmp_path, capsys):
    words = ["doctor", "--directory", str(tmp_path), "--url", "http://127.0.0.1:1"]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["checks"]
    assert {one["status"] for one in told} <= {"ok", "warn"}

    config = tmp_path / "server.toml"
    config.write_text(f"[host]\ncapacity_bytes = {1 << 47}\n")
    assert main([*words, "--config", str(config)]) == 1
    assert "host.capacity_bytes" in capsys.readouterr().out
    config.write_text("[nonsense]\na = 1\n")
    assert main([*words, "--config", str(config)]) == 2


def test_what_the_environment_says_counts_too(machine, tmp_path, capsys, monkeypatch):
    words = ["doctor", "--directory", str(tmp_path), "--url", "http://127.0.0.1:1", "--json"]
    monkeypatch.setenv("KVSTORE__HOST__CAPACITY_BYTES", "128TiB")

    assert main(words) == 1
    told = {one["name"]: one for one in json.loads(capsys.readouterr().out)["checks"]}
    assert (told["memory"]["status"], "128.0 TiB" in told["memory"]["found"]) == ("fail", True)
    monkeypatch.setenv("KVSTORE_HOST_CAPACITY_BYTES", "1GiB")
    assert main(words) == 2
    assert "did you mean KVSTORE__HOST__CAPACITY_BYTES" in capsys.readouterr().err


def test_the_directories_and_the_capacity_of_the_file_are_checked(
    daemon, machine, tmp_path, capsys, monkeypatch
):
    here, disks = tmp_path / "here", [tmp_path / "disk", tmp_path / "[b]" / "not" / "made"]
    for one in (here, disks[0], tmp_path / "[b]"):
        one.mkdir()
    config = tmp_path / "server.toml"
    listed = ", ".join(f'"{one}"' for one in disks)
    config.write_text(f"[host]\ncapacity_bytes = {1 << 47}\n[ssd]\ndirectories = [{listed}]\n")
    monkeypatch.chdir(here)
    monkeypatch.setattr(doctor, "disk_speed", lambda _directory: (0.75e9, "read"))
    words = ["doctor", "--config", str(config), "--url", daemon.admin]

    assert main([*words, "--json"]) == 1
    told = {one["name"]: one for one in json.loads(capsys.readouterr().out)["checks"]}
    assert told["memory"]["status"] == "fail", "its capacity, not that of the node that answers"
    assert told["disk speed"]["found"].startswith("1.50 GB/s")
    main(words)
    printed = capsys.readouterr().out
    assert f"{disks[0]}: 4096-byte writes" in printed
    assert f"{tmp_path / '[b]'}: 4096-byte writes" in printed
    assert str(here) not in printed


def test_a_running_node_is_asked(daemon, machine, tmp_path, capsys):
    assert main(["doctor", "--directory", str(tmp_path), "--url", daemon.admin, "--json"]) == 0

    node = json.loads(capsys.readouterr().out)["checks"][0]
    assert node["found"].startswith("local: ")


def test_a_running_node_of_a_cluster_tells_which_stores_it_uses(spawn, machine, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"127.0.0.1:{silent.getsockname()[1]}"
        command = arguments(
            tmp_path / "kv.sock", cluster__name="blue", cluster__directory="redis",
            redis__endpoints=place, cluster__listen="127.0.0.1:0",
            cluster__transfer_listen="127.0.0.1:0",
        )  # fmt: skip
        admin = Daemon(spawn(command, ready=READY)).admin
        main(["doctor", "--directory", str(tmp_path), "--url", admin, "--json"])

    told = {one["name"]: one for one in json.loads(capsys.readouterr().out)["checks"]}
    assert told[f"redis {place}"]["status"] == "ok"
