"""Goal: the flag for vLLM names the node's socket, unless that is the default."""

import json
import shlex
from types import SimpleNamespace

import pytest

from kvstore.cli import main
from kvstore.cli.decoding import Reply
from kvstore.cli.vllm_flags import asked_flags
from kvstore.protocol.errors import NotFound


def test_the_flag_names_the_socket_of_the_node(daemon, capsys):
    assert main(["vllm-flags", "--url", daemon.admin]) == 0
    flag, value = shlex.split(capsys.readouterr().out)
    assert flag == "--kv-transfer-config"
    assert json.loads(value) == {
        "kv_connector": "KVStoreConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"address": daemon.address},
    }  # fmt: skip
    assert main(["vllm-flags", "--url", daemon.admin, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["value"] == json.loads(value)


def node(*rows):
    every = [{"source": "default", **row} for row in rows]
    return SimpleNamespace(get=lambda _path, kind: Reply({"values": every}, kind))


@pytest.mark.parametrize(
    ("path", "named"), [("/run/kvstore/kvstore.sock", False), ("/elsewhere.sock", True)]
)
def test_a_default_address_is_left_out(path, named):
    flags = asked_flags(node({"key": "socket.path", "value": path}))
    assert ("kv_connector_extra_config" in flags.value.value) is named


def test_a_node_that_does_not_tell_its_socket_is_an_error():
    with pytest.raises(NotFound, match=r"socket\.path"):
        asked_flags(node())
