"""``kvstore vllm-flags``: prints the flags that connect vLLM to this node."""

import json
import shlex
from typing import Any, Final

from msgspec import Struct
from rich.console import Console

from kvstore.cli.decoding import Reply
from kvstore.cli.remote import Remote
from kvstore.config import ServerConfig
from kvstore.protocol.errors import NotFound
from kvstore.server.answers import Configuration

_CONNECTOR: Final = "KVStoreConnector"
_SETTING: Final = "socket.path"


class Flag(Struct, frozen=True):
    """A flag of vLLM and its value."""

    flag: str
    value: dict[str, Any]


def asked_flags(node: Remote) -> Reply[Flag]:
    """The flag, for the socket of a running node.

    Raises:
        KVStoreError: no node answers.
        NotFound: it does not say where its socket is.
    """
    rows = node.get("/v1/config", Configuration).value.values
    path = next((row.value for row in rows if row.key == _SETTING), "")
    if not path:
        raise NotFound(_SETTING, "the node shows it only with its admin token")
    value: dict[str, Any] = {"kv_connector": _CONNECTOR, "kv_role": "kv_both"}
    if path != str(ServerConfig().socket.path):  # the connector's default address
        value["kv_connector_extra_config"] = {"address": f"unix://{path}"}
    return Reply({"flag": "--kv-transfer-config", "value": value}, Flag)


def vllm_flags(flag: Flag, console: Console) -> None:
    """Print the flag as a shell takes it, on one line."""
    value = shlex.quote(json.dumps(flag.value, separators=(",", ":")))
    console.out(f"{flag.flag} {value}", highlight=False)
