"""How much memory does another node's page take in the index of a node?

Two real nodes with ``cluster.directory=peers``: a client stores small pages at one of them, and
``directory/peers`` is what the other one's index process grows by for each, its shared memory
included.
"""

from collections.abc import Iterator
from typing import Any, Final

from bench import server
from bench.measure import Result
from bench.remote_announce import RUN_PAGES, SmallPages, wait
from bench.remote_nodes import running
from kvstore.testing.server import Server

NAME: Final = "directory/peers"
POOL_BYTES: Final = 512 << 20
RUNS: Final = 50
BYTES_MAX: Final = 48


def names() -> list[str]:
    """The case."""
    return [NAME]


def results(name: str, seconds: float) -> Iterator[Result]:
    """Measure it; it takes as long as its puts do."""
    del seconds
    with (
        running(POOL_BYTES, {"a": ["b"], "b": ["a"]}, prefault=False) as nodes,
        server.connected(nodes["a"].address) as store,
    ):
        small = SmallPages(store)
        small.put()  # the first run pays for what is there once
        before = _index(nodes["b"], RUN_PAGES)
        for _ in range(RUNS):
            small.put()
        after = _index(nodes["b"], (1 + RUNS) * RUN_PAGES)
    size = (after["resident_bytes"] - before["resident_bytes"]) / (RUNS * RUN_PAGES)
    yield Result(name, size, "B", "largest allowed", BYTES_MAX, BYTES_MAX / size)


def _index(node: Server, entries: int) -> dict[str, Any]:
    """What a node says of its index when that has so many pages."""
    found: dict[str, Any] = {}

    def all_there() -> bool:
        found.update(node.get("/v1/nodes")["index"])
        return bool(found["entries"] >= entries)

    wait(all_there)
    assert found["entries"] == entries, found
    return found
