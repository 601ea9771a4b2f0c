"""What an engine is told of pages of its prompt at another node. Pure.

The action ``kv.fetch`` 1.0 of the KV Hint Protocol 0.1. vLLM's HTTP server has no field for hints,
so they are in ``kv_transfer_params``, where the connector reads them (:mod:`kvstore.engine.hints`).
"""

from typing import Final

import msgspec
import numpy as np

from kvstore.protocol.page import KEY_BYTES, PrefixKeys

PAGES_MAX: Final = 2_048
"""Pages named in a hint: 43 KB of JSON at most. A node fetches those, and looks for more itself."""


def fetch_hint(number: int, node: str, keys: PrefixKeys) -> msgspec.Raw:
    """The envelope that names pages at a node, as JSON text.

    Args:
        number: of the request; its id in the protocol.
        node: name of the node that has the pages.
        keys: of leading pages of the prompt; no more than ``PAGES_MAX`` are named.
    """
    named = keys[:PAGES_MAX]
    hashes = np.frombuffer(named.packed, dtype="<u8")[:: KEY_BYTES // 8]
    payload = {
        "source_control_endpoint": f"kvstore://{node}",
        "mode": "copy",
        "block_hashes": hashes.tolist(),
    }
    action = {
        "action_id": "1", "action_type": "kv.fetch", "action_version": "1.0", "payload": payload,
    }  # fmt: skip
    envelope = {"protocol_version": "0.1", "message_id": str(number), "actions": [action]}
    return msgspec.Raw(msgspec.json.encode(envelope))
