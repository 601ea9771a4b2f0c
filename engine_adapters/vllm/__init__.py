"""kvstore in vLLM: ``KVStoreConnector`` for ``--kv-transfer-config``; see docs/engines/vllm.md.

Reading order: ``options``, ``names`` (the identity of KV), ``facts`` (from vLLM's configuration),
``tensors`` (its memory), ``stats``, ``connector`` (its calls); ``tier`` is the alternative for
vLLM's own offloading. All of these translate between vLLM and :mod:`kvstore.engine`, which makes
the decisions and copies.
"""

from typing import Any

__all__ = ["KVStoreConnector"]


def __getattr__(name: str) -> Any:
    """Import the connector, and with it vLLM, on first use."""
    if name != "KVStoreConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from engine_adapters.vllm.connector import KVStoreConnector

    return KVStoreConnector
