"""Goal: the nodes of ``compose-cluster.yaml`` take their settings, and would find each other."""

import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import yaml

from kvstore.config import ServerConfig, load
from kvstore.protocol.sizes import size_of
from tests.conftest import ROOT

INDEX_BYTES = 128 << 20
"""For the process of the index, as the file says."""


NODES = ("a", "b")


@cache
def services() -> dict[str, Any]:
    found = yaml.safe_load((ROOT / "deploy/compose-cluster.yaml").read_text())["services"]
    assert isinstance(found, dict)
    return found


def nodes() -> dict[str, Any]:
    return {name: services()[name] for name in NODES}


def configured(name: str) -> ServerConfig:
    options = services()[name]["command"]
    sets = [one.removeprefix("--set=") for one in options]
    return load(ServerConfig, environ={}, overrides=sets).config


@pytest.mark.parametrize("name", NODES)
def test_the_command_of_each_node_is_taken(name):
    printed = subprocess.run(
        [sys.executable, "-m", "kvstore.server.daemon", *services()[name]["command"],
         "--print-config"],
        capture_output=True, text=True, check=True, timeout=60, cwd=ROOT,
    ).stdout  # fmt: skip

    assert f"/etc/kvstore/cluster/{name}.pem" in printed
    assert 'endpoints = ["etcd:2379"]' in printed
    assert 'endpoints = ["redis:6379"]' in printed


def test_both_use_the_etcd_and_the_redis_beside_them_and_are_reached_by_their_names():
    assert services().keys() == {"etcd", "redis", *NODES}
    clusters = [configured(name).cluster for name in NODES]

    assert len({one.name for one in clusters}) == 1
    assert {(one.membership, one.directory, one.nodes) for one in clusters} == {
        ("etcd", "redis", ())
    }
    for name in NODES:
        config = configured(name)
        assert config.node.name == name
        assert config.cluster.advertise == f"{name}:7400", "a service is reached by its name"
        assert config.cluster.listen.endswith(":7400")
        ports = {config.cluster.listen, config.cluster.transfer_listen}
        assert len({one.rpartition(":")[2] for one in ports}) == 2
    assert (
        f"--advertise-client-urls=http://{configured('a').etcd.endpoints[0]}"
        in (services()["etcd"]["command"])
    )
    assert configured("a").redis.endpoints == ("redis:6379",), "the port that Redis has by itself"


def test_the_image_of_the_nodes_has_the_clients_of_etcd_and_redis():
    build = (ROOT / "deploy/Containerfile").read_text()
    pinned = (ROOT / "requirements/stores.txt").read_text()

    assert "-r requirements/stores.txt" in build
    for client in ("aetcd", "redis", "hiredis"):
        assert f"\n{client}==" in pinned


def test_each_shows_its_own_certificate_from_what_is_mounted_and_publishes_no_port():
    assert not [name for name, service in services().items() if "ports" in service]
    for name, service in nodes().items():
        cluster = configured(name).cluster
        mounted = [one.split(":")[-2] for one in service["volumes"] if one.endswith(":ro")]
        assert mounted == ["/etc/kvstore/cluster"]
        for field, file in (("certificate", f"{name}.pem"), ("key", f"{name}.key"),
                            ("authority", "authority.pem")):  # fmt: skip
            assert getattr(cluster, field) == f"{mounted[0]}/{file}"


def test_the_nodes_share_no_sockets_and_fit_into_their_memory():
    mounts = [one for service in nodes().values() for one in service["volumes"]]
    own = [one.partition(":")[0] for one in mounts if not one.endswith(":ro")]
    assert len(own) == len(set(own)) == 4

    for name, service in nodes().items():
        limit = size_of(service["mem_limit"].replace("m", "Mi"))
        assert configured(name).needs.memory_bytes + INDEX_BYTES <= limit
        assert service["memswap_limit"] == service["mem_limit"], "pages would be swapped"
