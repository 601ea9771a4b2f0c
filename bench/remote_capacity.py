"""Do two nodes keep as much as one node that has the memory of both?

A working set of 1.6 times one node's memory: prompts of 64 pages, each asked for again and again in
random order, at either node at random. A request gets what is there, from this node or the other,
and stores the rest. After every prompt was asked for once, ``capacity/two`` counts the pages that
were there, beside one node with both memories that gets the same requests.
"""

import random
import sys
from collections.abc import Iterator
from typing import Final

import numpy as np

from bench import server
from bench.host_pages import Shape, open_space, random_keys
from bench.measure import Result
from bench.remote_nodes import running
from kvstore.client.space import Space
from kvstore.protocol.page import PrefixKeys

NAME: Final = "capacity/two"
NODES: Final = ("a", "b")
SHAPE: Final = Shape("4KiB/x64", page_tokens=1, layers=1, pages=64)
POOL_BYTES: Final = 32 << 20
WORKING_SET: Final = 1.6
PASSES: Final = 3
"""Requests that are counted, in working sets."""
_SEED: Final = 14


def names() -> list[str]:
    """The case."""
    return [NAME]


def results(name: str, seconds: float) -> Iterator[Result]:
    """Measure it; it takes as long as its requests do."""
    del seconds
    with (
        running(POOL_BYTES, {one: [o for o in NODES if o != one] for one in NODES}) as nodes,
        server.running(len(NODES) * POOL_BYTES) as both,
        server.connected(nodes["a"].address) as a,
        server.connected(nodes["b"].address) as b,
        server.connected(both) as alone,
    ):
        spaces = [open_space(store, SHAPE) for store in (a, b)]
        single = open_space(alone, SHAPE)
        rng = np.random.default_rng(_SEED)
        count = round(WORKING_SET * POOL_BYTES / SHAPE.call_bytes)
        prompts = [random_keys(single, SHAPE.pages, rng) for _ in range(count)]
        choose = random.Random(_SEED)
        for keys in prompts:
            _request(choose.choice(spaces), keys)
            _request(single, keys)
        hits, whole = 0, 0
        requests = PASSES * count
        for _ in range(requests):
            keys = choose.choice(prompts)
            hits += _request(choose.choice(spaces), keys)
            whole += _request(single, keys)
        fetched = sum(
            node.get("/v1/stats")["counts"].get("peer_fetched_pages", 0) for node in nodes.values()
        )
    pages = requests * SHAPE.pages
    sys.stderr.write(f"{NAME}: {requests} requests, {fetched} pages read from the other node\n")
    value, bound = 100 * hits / pages, 100 * whole / pages
    yield Result(name, value, "%", "one node with both memories", bound, value / bound)


_PAGE: Final = np.full(SHAPE.page_bytes, 7, np.uint8)


def _request(space: Space, keys: PrefixKeys) -> int:
    """Serve one request as an engine does; returns the pages that were there."""
    with space.get(keys) as views:
        found = len(views)
    if found < len(keys):
        space.put(keys[found:], [_PAGE] * (len(keys) - found))
    return found
