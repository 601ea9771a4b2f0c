"""Values for tests of the session with a peer."""

from typing import Any

import numpy as np

from kvstore.cluster.greeting import LocalNode
from kvstore.protocol import wire
from kvstore.protocol.page import CanonicalLayout, PrefixKeys, ShardSpec, SpaceIdentity, page_keys
from kvstore.state.remote.jobs import PeerFetch
from kvstore.state.tree.slots import Slot

PLACE = "10.0.0.1:7400"
LOCAL = LocalNode("blue", "b", b"b" * 16, "scheme 1")
SHARD = ShardSpec(layout=CanonicalLayout(1024), layers=(0, 1), heads=(0, 1))
KEYS = page_keys(range(8), 2)


def identity(scope: str = "") -> SpaceIdentity:
    return SpaceIdentity(model="m", kv_dtype="uint8", page_tokens=2, scope=scope)


def job(number: int, deadline_ns: int, keys: PrefixKeys = KEYS, scope: str = "") -> PeerFetch:
    slots = [Slot(at) for at in range(len(keys))]
    return PeerFetch(number, "a", identity(scope), SHARD, b"", keys.packed, slots, deadline_ns)


def addresses(pages: int) -> bytes:
    return np.array([(1, 7, at * 4096) for at in range(pages)], wire.ADDRESS).tobytes()


def welcome(number: int, **fields: Any) -> wire.PeerWelcome:
    told = {
        "minor": wire.PROTOCOL_MINOR,
        "node": "a",
        "boot": b"a" * 16,
        "transports": {"x": "a:0", "tcp": "a:1"},
        **fields,
    }
    return wire.PeerWelcome(number, 1, **told)
