"""``kvstore vllm-flags``: prints the flags that connect vLLM to this node."""

import json
import shlex
from typing import Any, Final

from rich.console import Console

from kvstore.cli.remote import Remote
from kvstore.config import ServerConfig
from kvstore.protocol.errors import NotFound

_CONNECTOR: Final = "KVStoreConnector"
_SETTING: Final = "socket.path"


def asked_flags(node: Remote) -> dict[str, Any]:
    """The flag, for the socket of a running node.

    Returns:
        ``flag`` and its ``value``.

    Raises:
        KVStoreError: no node answers.
        NotFound: it does not say where its socket is.
    """
    rows = node.get("/v1/config")["values"]
    path = next((row["value"] for row in rows if row["key"] == _SETTING), "")
    if not path:
        raise NotFound(_SETTING, "the node shows it only with its admin token")
    value: dict[str, Any] = {"kv_connector": _CONNECTOR, "kv_role": "kv_both"}
    if path != str(ServerConfig().socket.path):  # the connector's default address
        value["kv_connector_extra_config"] = {"address": f"unix://{path}"}
    return {"flag": "--kv-transfer-config", "value": value}


def vllm_flags(answer: dict[str, Any], console: Console) -> None:
    """Print the flag as a shell takes it, on one line."""
    value = shlex.quote(json.dumps(answer["value"], separators=(",", ":")))
    console.out(f"{answer['flag']} {value}", highlight=False)
