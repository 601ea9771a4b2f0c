"""Nodes that find each other and their pages in real stores, which tests harm."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

from bench.store_servers import EtcdServer, RedisServer
from kvstore.client.space import Space
from tests.cluster_processes.conftest import ClusterNode, ClusterScene, read
from tests.cluster_processes.store_scenes import start_server
from tests.conftest import wait_for
from tests.faults import content

MEET_S = 30.0
OWN = 7
"""A chain that is local."""
OWN_PAGES = 2
LOOK_S = 0.01
LONG_S, STALL_S, STALLS_MAX = 1.0, 10.0, 3
"""A busy machine may make so many reads long, and none longer than a stall."""
MANY = 20

Server = EtcdServer | RedisServer


class ClusterStores:
    """The stores that a membership and a directory need."""

    def __init__(self, membership: str, directory: str, folder: Path) -> None:
        self.membership = membership
        self.directory = directory
        with ExitStack() as undo:
            self.servers: list[Server] = []
            for kind in sorted({membership, directory} & {"etcd", "redis"}):
                self.servers.append(undo.enter_context(start_server(kind, folder / kind)))
            self._undo = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._undo.close()

    @property
    def settings(self) -> dict[str, object]:
        """Of a node."""
        found: dict[str, object] = {
            "cluster__membership": self.membership, "cluster__directory": self.directory,
        }  # fmt: skip
        for server in self.servers:
            kind = "etcd" if isinstance(server, EtcdServer) else "redis"
            found[f"{kind}__endpoints"] = server.endpoint
        return found

    def each(self, what: Callable[[Server], None]) -> None:
        """Do this to each server."""
        for server in self.servers:
            what(server)

    def start(self, scene: ClusterScene, *names: str) -> list[ClusterNode]:
        """Nodes that have found each other."""
        made = scene.add(*names)
        for node in made:
            node.start([], **self.settings)
        for node in made:
            self.meet(node, [one for one in made if one is not node])
        return made

    def meet(self, node: ClusterNode, others: list[ClusterNode]) -> None:
        """Wait until a node has joined, and reaches others."""
        told = [one.name for one in others]
        assert wait_for(lambda: self.has_met(node, told), MEET_S), node.stats()["cluster"]

    def has_met(self, node: ClusterNode, others: list[str]) -> bool:
        """Whether a node has joined, and has sessions with just these and finds their pages."""
        cluster = node.stats()["cluster"]
        if cluster["membership"]["state"] != "joined":
            return False
        if {name for name, one in cluster["peers"].items() if one["up"]} != set(others):
            return False
        directory = cluster["directory"]
        if self.directory == "redis":
            return bool(directory["shared"]["current"])
        return all(directory["peers"].get(one, {"current": False})["current"] for one in others)

    def directory_is(self, state: str, node: ClusterNode) -> bool:
        """Whether ``/readyz`` and the metric of a node say so of the directory; it is ready."""
        exported = f"kvstore_cluster_directory_current {float(state == 'current')}"
        return node.ready()["directory"] == state and exported in node.metrics()

    def is_away(self, node: ClusterNode) -> bool:
        """Whether a node has noticed that the stores are away."""
        cluster = node.stats()["cluster"]
        faults = shared(node)["faults"] if self.directory == "redis" else {"away": 1}
        return cluster["membership"]["state"] == "away" and bool(faults.keys() & {"away", "late"})


def shared(node: ClusterNode) -> dict[str, Any]:
    """What a node says of the directory in Redis."""
    found: dict[str, Any] = node.stats()["cluster"]["directory"]["shared"]
    return found


def index_process(node: ClusterNode) -> int:
    """Process id of a node's index process; 0 = there is none."""
    path = Path(f"/proc/{node.process.pid}/task/{node.process.pid}/children")
    for child in path.read_text().split():
        if b"kvstore.cluster.child" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    return 0


def descriptors(node: ClusterNode) -> int:
    """Open descriptors of a node and its index process."""
    pids = (node.process.pid, index_process(node))
    return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids)


def threads(node: ClusterNode) -> int:
    """Threads of a node and its index process."""
    pids = (node.process.pid, index_process(node))
    return sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in pids)


class LocalHits:
    """A client that reads local pages all the time.

    Attributes:
        long_s: durations of the reads that were long.
        reads: how many there were.
    """

    def __init__(self, space: Space) -> None:
        """Store the local chain; the space is not used by anybody else."""
        keys = content.keys(OWN, OWN_PAGES)
        assert space.put(keys, content.pages(OWN, OWN_PAGES)).stored == OWN_PAGES
        self.long_s = list[float]()
        self.reads = 0
        self.wrong: list[object] = []
        self._space = space
        self._keys = keys
        self._right = [bytes(one) for one in content.pages(OWN, OWN_PAGES)]
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="local hits")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._end.set()
        self._thread.join()

    def go_on(self) -> None:
        """Wait for more reads than there could be if each of them waited for others."""
        wanted = self.reads + MANY
        assert wait_for(lambda: self.reads >= wanted, STALL_S), (self.reads, wanted, self.wrong)

    def check(self) -> None:
        """Assert that all reads brought the right bytes, and that nothing stalled them."""
        assert self.wrong == []
        assert self.reads > 0
        assert len(self.long_s) <= STALLS_MAX, self.long_s
        assert max(self.long_s, default=0.0) < STALL_S

    def _run(self) -> None:
        while not self._end.wait(LOOK_S):
            begun = monotonic()
            try:
                found = self._space.lookup(self._keys).pages, read(self._space, self._keys)
            except Exception as error:  # noqa: BLE001 -- the test says so
                self.wrong.append(error)
                return
            if (took_s := monotonic() - begun) >= LONG_S:
                self.long_s.append(took_s)
            self.reads += 1
            if found != (OWN_PAGES, self._right):
                self.wrong.append(found[0])
