"""kvstore in vLLM: ``KVStoreConnector``, named by ``--kv-transfer-config``; docs/engines/vllm.md.

Reading order: ``options`` (what users set), ``names`` (what tells KV apart), ``facts`` (what vLLM's
configuration says of it), ``tensors`` (its memory), ``stats``, ``connector`` (its
calls); ``tier`` is the second route. All of these translate between vLLM and :mod:`kvstore.engine`,
which decides and moves.
"""

from typing import Any

__all__ = ["KVStoreConnector"]


def __getattr__(name: str) -> Any:
    """Import the connector, and with it vLLM, when it is asked for."""
    if name != "KVStoreConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from engine_adapters.vllm.connector import KVStoreConnector

    return KVStoreConnector
