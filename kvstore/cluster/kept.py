"""How long pages that another node lends may be kept here. Pure."""

from typing import Final

import numpy as np

from kvstore.protocol import wire
from kvstore.state.tree.node import Retention

_MS: Final = 1_000_000


def retentions(kept: bytes, asked_ns: int) -> list[Retention]:
    """How long pages may be kept here, counted from the request, so never too long."""
    found: list[Retention] = []
    for left_ms, read_once, memory_only in np.frombuffer(kept, dtype=wire.KEPT).tolist():
        left_ns = min(left_ms, wire.TTL_MS_MAX) * _MS
        expires_ns = asked_ns + left_ns if left_ms != wire.NO_TTL else 0
        found.append(Retention(expires_ns, bool(read_once), bool(memory_only)))
    return found
