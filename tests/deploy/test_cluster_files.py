"""Goal: the nodes of ``compose-cluster.yaml`` take their settings, and would find each other."""

import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import yaml

from kvstore.config import ServerConfig, load
from kvstore.config.sizes import size_of
from tests.conftest import ROOT

INDEX_BYTES = 128 << 20
"""For the process of the index, as the file says."""


@cache
def services() -> dict[str, Any]:
    found = yaml.safe_load((ROOT / "deploy/compose-cluster.yaml").read_text())["services"]
    assert isinstance(found, dict)
    return found


def configured(name: str) -> ServerConfig:
    options = services()[name]["command"]
    sets = [one.removeprefix("--set=") for one in options]
    return load(ServerConfig, environ={}, overrides=sets).config


@pytest.mark.parametrize("name", ["a", "b"])
def test_the_command_of_each_node_is_taken(name):
    printed = subprocess.run(
        [sys.executable, "-m", "kvstore.server.daemon", *services()[name]["command"],
         "--print-config"],
        capture_output=True, text=True, check=True, timeout=60, cwd=ROOT,
    ).stdout  # fmt: skip

    assert f"/etc/kvstore/cluster/{name}.pem" in printed
    assert "b=b:7400" in printed


def test_both_have_one_list_in_which_each_is_named_and_reached():
    nodes = {name: configured(name) for name in services()}

    assert len({(one.cluster.name, one.cluster.nodes) for one in nodes.values()}) == 1
    for name, config in nodes.items():
        assert config.node.name == name
        places = config.cluster.others("")
        assert places.keys() == nodes.keys()
        assert places[name].host == name, "a service is reached by its name"
        assert str(places[name].port) == config.cluster.listen.rpartition(":")[2]
        ports = {config.cluster.listen, config.cluster.transfer_listen}
        assert len({one.rpartition(":")[2] for one in ports}) == 2


def test_each_shows_its_own_certificate_from_what_is_mounted_and_publishes_no_port():
    for name, service in services().items():
        cluster = configured(name).cluster
        mounted = [one.split(":")[-2] for one in service["volumes"] if one.endswith(":ro")]
        assert mounted == ["/etc/kvstore/cluster"]
        for field, file in (("certificate", f"{name}.pem"), ("key", f"{name}.key"),
                            ("authority", "authority.pem")):  # fmt: skip
            assert getattr(cluster, field) == f"{mounted[0]}/{file}"
        assert "ports" not in service


def test_the_nodes_share_no_sockets_and_fit_into_their_memory():
    mounts = [one for service in services().values() for one in service["volumes"]]
    own = [one.partition(":")[0] for one in mounts if not one.endswith(":ro")]
    assert len(own) == len(set(own)) == 4

    for name, service in services().items():
        limit = size_of(service["mem_limit"].replace("m", "Mi"))
        assert configured(name).needs.memory_bytes + INDEX_BYTES <= limit
        assert service["memswap_limit"] == service["mem_limit"], "pages would be swapped"
