"""kvstore in vLLM: ``KVStoreConnector``, named by ``--kv-transfer-config``; docs/engines/vllm.md.

Reading order: ``options`` (what users set), ``identity`` and ``chain`` (what may be shared under
which key), ``messages`` (scheduler to workers and back), ``scheduler`` (what to load and store),
``worker`` (the moves); all of these know nothing of vLLM. ``facts``, ``tensors``, ``stats`` and
``connector`` translate between them and vLLM.
"""

from typing import Any

__all__ = ["KVStoreConnector"]


def __getattr__(name: str) -> Any:
    """Import the connector, and with it vLLM, when it is asked for."""
    if name != "KVStoreConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from engine_adapters.vllm.connector import KVStoreConnector

    return KVStoreConnector
