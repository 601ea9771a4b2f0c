"""Nodes of one cluster as processes on this machine, for ``python -m bench remote``."""

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from bench.cluster import cluster_settings, has_met, loopback
from bench.host_pages import Shape, open_space, random_keys
from bench.server import EXTENT_BYTES_MAX, NodeError, connected
from kvstore.client.space import Space
from kvstore.protocol.page import PrefixKeys
from kvstore.testing.server import Server, wait_for

MEET_WAIT_S: Final = 60.0
_LAG_S: Final = 0.02
"""Until events are known elsewhere, as a rule; doubled after a question that found nothing."""
_TRIES_MAX: Final = 8
_INDEX_PAGES_MAX: Final = 1_000_000


@contextmanager
def running(
    pool_bytes: int, knows: Mapping[str, Sequence[str]], *, prefault: bool = True
) -> Iterator[dict[str, Server]]:
    """Run nodes until the block ends; inside, they have met.

    Args:
        pool_bytes: capacity of the host tier of each; a whole number of 4 extents.
        knows: name of each → names of the others that it knows.
        prefault: whether they touch their memory before it is used.

    Raises:
        NodeError: they do not find each other.
    """
    hosts = {name: loopback() for name in knows}
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder, ExitStack() as undo:
        nodes: dict[str, Server] = {}
        for name, others in knows.items():
            settings = {
                "socket.path": Path(folder, f"{name}.sock"),
                "host.capacity_bytes": pool_bytes,
                "host.extent_bytes": min(pool_bytes // 4, EXTENT_BYTES_MAX),
                "host.prefault": str(prefault).lower(),
                "events.endpoint": "",
                "events.replay_endpoint": "",
            }
            known = {one: hosts[one] for one in (name, *others)}
            settings |= cluster_settings(name, known, _INDEX_PAGES_MAX)
            home = Path(folder, name)
            home.mkdir()
            nodes[name] = undo.enter_context(Server(home, settings))
        for node in nodes.values():
            node.wait_ready()
        for name, node in nodes.items():
            if not wait_for(lambda: has_met(node.get("/v1/stats"), knows[name]), MEET_WAIT_S):  # noqa: B023
                raise NodeError(f"{name} does not reach {', '.join(knows[name])}")
        yield nodes
        for node in nodes.values():
            node.stop()


class Pair(NamedTuple):
    """One space at the node that has pages, and at the one that gets them from there.

    Attributes:
        shape: of the pages.
        owner: the space at the first one.
        reader: the space at the other.
    """

    shape: Shape
    owner: Space
    reader: Space

    def store(self, runs: int) -> list[PrefixKeys]:
        """Store runs of fresh pages at the owner, and wait until the reader's node knows of them.

        Raises:
            NodeError: it takes too long.
        """
        random = np.random.default_rng()
        pages = [np.full(self.shape.page_bytes, 7, np.uint8)] * self.shape.pages
        stored = [random_keys(self.owner, self.shape.pages, random) for _ in range(runs)]
        for keys in stored:
            assert self.owner.put(keys, pages).stored == len(keys)
        for attempt in range(_TRIES_MAX):
            # Events come in order. A page that nobody has asked for is looked for each time: the
            # node remembers for a while that nobody has one.
            last = random_keys(self.owner, 1, random)
            self.owner.put(last, pages[:1])
            time.sleep(_LAG_S * 2**attempt)
            if self.reader.lookup(last, wait_s=1.0).remote:
                return stored
        raise NodeError(f"pages are not known at the other node after {_TRIES_MAX} questions")


@contextmanager
def pair(pool_bytes: int, shape: Shape) -> Iterator[Pair]:
    """Run two nodes of this size, connected for pages of this shape."""
    with (
        running(pool_bytes, {"a": ["b"], "b": ["a"]}) as nodes,
        connected(nodes["a"].address) as owner,
        connected(nodes["b"].address) as reader,
    ):
        for name in nodes:
            node = nodes[name]
            if not wait_for(
                lambda: node.get("/v1/stats")["populated_bytes"] >= pool_bytes,  # noqa: B023
                MEET_WAIT_S,
            ):
                raise NodeError("the nodes' memory is not populated")
        yield Pair(shape, open_space(owner, shape), open_space(reader, shape))
