"""The etcd and the Redis of ``compose-cluster.yaml`` start with the commands that stand there."""

import socket
from pathlib import Path

import pytest
import yaml

from bench import store_programs
from bench.cluster import loopback
from tests.cluster_processes.store_scenes import start_server
from tests.conftest import ROOT, Spawn, WaitUntil

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]
SERVICES = yaml.safe_load((ROOT / "deploy/compose-cluster.yaml").read_text())["services"]


@pytest.mark.parametrize(("kind", "port"), [("etcd", 2379), ("redis", 6379)])
def test_the_server_beside_the_nodes_takes_its_command_and_listens_at_the_port_they_use(
    kind: str, port: int, spawn: Spawn, tmp_path: Path, wait_until: WaitUntil
) -> None:
    with start_server(kind, tmp_path / "try"):
        pass  # skipped where there is none
    name, *flags = SERVICES[kind]["command"]
    program, host = store_programs.find(name), loopback()
    moved = {"0.0.0.0": host, "127.0.0.1": host, "/tmp/etcd": str(tmp_path / "data")}
    for before, after in moved.items():
        flags = [flag.replace(before, after) for flag in flags]
    more = ["--bind", host, "--dir", str(tmp_path)] if kind == "redis" else []
    spawn([str(program.path), *flags, *more], env=program.environment)

    def listens() -> bool:
        with socket.socket() as one:
            return one.connect_ex((host, port)) == 0

    wait_until(listens, 20.0)
