"""Nodes of one cluster as real processes on this machine, and clients of theirs."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvstore.client.jobs import StoreJob
from kvstore.client.space import Space
from kvstore.client.store import KVStore
from kvstore.protocol import wire
from kvstore.protocol.page import PrefixKeys
from kvstore.server import client
from kvstore.state.remote.located import FRESH_NS
from tests.conftest import Process, Spawn, wait_for
from tests.faults import content

READY = r"kvstore-server ready: socket (\S+) .*\badmin (unix://\S+)"
JOIN_WAIT_S = 30.0
CLEAN_WAIT_S = 10.0
FETCH_WAIT_S = 5.0
"""The client waits 2 s for pages, and that must suffice whatever happens to other nodes."""
CAPACITY_BYTES = 64 << 20
PEERS_PORT, PAGES_PORT = 7400, 7401
_places = count(1)


def _next_host() -> str:
    """A loopback address that no other test uses, so that the ports can be the same always."""
    number = os.getpid() * 256 + next(_places)
    return f"127.{64 + (number >> 16) % 64}.{(number >> 8) & 255}.{number & 255}"


class ClusterNode:
    """One ``kvstore-server`` in a cluster.

    Attributes:
        name: its name.
        host: its address; a restarted node has the same one.
        run_in: makes the command that runs it where it is to run.
    """

    def __init__(self, name: str, spawn: Spawn, folder: Path) -> None:
        self.name = name
        self.host = _next_host()
        self._spawn = spawn
        self._folder = folder
        self._gates = folder / f"{name}.gates"
        self._gates.mkdir()
        self._program: list[str] = []
        self.run_in: Callable[[Sequence[str]], list[str]] = list
        self._process: Process | None = None

    @property
    def entry(self) -> str:
        """Its entry in ``cluster.nodes``."""
        return f"{self.name}={self.host}:{PEERS_PORT}"

    def start(self, nodes: "list[ClusterNode]", **changed: object) -> None:
        """Start it, with settings ``section__key=value``."""
        self._program = self._command(nodes, changed)
        self.restart()

    def _command(
        self, nodes: "list[ClusterNode]", changed: Mapping[str, object]
    ) -> list[str]:  # fmt: skip
        settings: dict[str, object] = {
            "node__name": self.name, "socket__path": self._folder / f"{self.name}.sock",
            "http__port": 0, "host__capacity_bytes": CAPACITY_BYTES,
            "host__extent_bytes": 16 << 20, "host__prefault": "false", "events__endpoint": "",
            "events__replay_endpoint": "", "cluster__name": "blue",
            "cluster__listen": f"{self.host}:{PEERS_PORT}",
            "cluster__transfer_listen": f"{self.host}:{PAGES_PORT}",
            "cluster__nodes": json.dumps([one.entry for one in nodes]),
            "cluster__index_pages_max": 10_000, "debug__check_every_step": "true", **changed,
        }  # fmt: skip
        flags = [
            part
            for key, value in settings.items()
            for part in ("--set", f"{key.replace('__', '.')}={value}")
        ]
        program = [sys.executable, "-m", "tests.cluster_processes.gated", str(self._gates)]
        return self.run_in([*program, *flags])

    def move(self) -> None:
        """Let it have another address when it is started again."""
        self.host = _next_host()

    def restart(self) -> None:
        """Start it as it was started before."""
        self._process = self._spawn(self._program, ready=READY)

    def refusal(self, nodes: "list[ClusterNode]", **changed: object) -> str:
        """What it says when it does not start with these settings."""
        self._process = self._spawn(self._command(nodes, changed))
        assert self._process.wait() == 2, self._process.report()
        return self._process.stderr.splitlines()[-1]

    @property
    def process(self) -> Process:
        """Its process."""
        assert self._process is not None
        return self._process

    @property
    def index_pid(self) -> int:
        """Process id of its index process; 0 = it has none now."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for child in path.read_text().split():
            if b"kvstore.cluster.child" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        return 0

    @property
    def runs(self) -> bool:
        """Whether it was started, and has not been killed."""
        return self._process is not None and self._process.returncode is None

    @property
    def address(self) -> str:
        """Its socket."""
        return self.process.ready.group(1)

    def close_gate(self, name: str) -> None:
        """Close a gate of :mod:`tests.cluster_processes.gated`."""
        os.mkfifo(self._gates / name)

    def at_gate(self, name: str) -> None:
        """Wait until it stands there."""
        if not wait_for((self._gates / f"{name}.held").exists, CLEAN_WAIT_S):
            pytest.fail(f"{self.name} never came to gate {name}\n{self.process.report()}")

    def open_gate(self, name: str) -> None:
        """Let it go on."""
        with (self._gates / f"{name}.held").open("w") as opened:
            opened.write("go\n")

    def signal(self, number: signal.Signals) -> None:
        """SIGSTOP, SIGCONT or SIGKILL; returns when it has had its effect."""
        self.process.send_signal(number)
        if number is signal.SIGKILL:
            self.process.wait()
        if number is signal.SIGSTOP:
            status = Path(f"/proc/{self.process.pid}/stat")
            assert wait_for(lambda: status.read_text().rpartition(")")[2].split()[0] == "T")

    def stats(self) -> dict[str, Any]:
        """Its ``/v1/stats``."""
        status, body = client.send(
            self.process.ready.group(2), "GET", "/v1/stats", timeout_s=JOIN_WAIT_S
        )
        assert status == 200, body
        found: dict[str, Any] = json.loads(body)
        return found

    def begin_job(self, path: str, **body: object) -> int:
        """Start a job; its number."""
        return int(self._operate("POST", path, body, 202)["job"])

    def job(self, number: int) -> dict[str, Any]:
        """What a job has done."""
        return self._operate("GET", f"/v1/jobs/{number}", None, 200)

    def finished(self, number: int, wait_s: float = 30.0) -> dict[str, Any]:
        """What a job has done at its end."""
        if not wait_for(lambda: self.job(number)["state"] != "running", wait_s):
            pytest.fail(f"job {number} of {self.name} did not end: {self.job(number)}")
        return self.job(number)

    def cancel(self, number: int) -> None:
        """Cancel a job."""
        self._operate("DELETE", f"/v1/jobs/{number}", None, 200)

    def _operate(
        self, method: str, path: str, body: Mapping[str, object] | None, wanted: int
    ) -> dict[str, Any]:
        packed = json.dumps(body).encode() if body is not None else None
        status, answer = client.send(
            self.process.ready.group(2), method, path, body=packed, timeout_s=JOIN_WAIT_S
        )
        assert status == wanted, answer
        found: dict[str, Any] = json.loads(answer)
        return found

    def reaches(self, other: "ClusterNode") -> bool:
        """Whether it has a session with another node, and follows its events."""
        cluster = self.stats()["cluster"]
        follows = cluster["directory"]["peers"].get(other.name, {"current": False})
        session = cluster["peers"].get(other.name, {"up": False})
        return bool(session["up"] and follows["current"])

    def ready(self) -> dict[str, Any]:
        """Its ``/readyz``, which must say that it is ready."""
        status, body = client.send(
            self.process.ready.group(2), "GET", "/readyz", timeout_s=JOIN_WAIT_S
        )
        assert status == 200, body
        found: dict[str, Any] = json.loads(body)
        return found

    def metrics(self) -> str:
        """Its ``/metrics``."""
        status, body = client.send(
            self.process.ready.group(2), "GET", "/metrics", timeout_s=JOIN_WAIT_S
        )
        assert status == 200, body
        return body.decode()

    def knows(self, other: "ClusterNode", pages: int) -> None:
        """Wait until its directory has so many pages of another node, summed over shards."""

        def known() -> int:
            told = self.stats()["cluster"]["directory"]["peers"].get(other.name, {"pages": {}})
            return sum(told["pages"].values())

        if not wait_for(lambda: known() == pages, JOIN_WAIT_S):
            pytest.fail(f"{self.name} knows of {known()} pages of {other.name}, not {pages}")

    def held(self) -> dict[str, Any]:
        """What it holds for others now; empty when that is nothing."""
        stats = self.stats()
        held = {name: stats["host"][f"{name}_bytes"] for name in ("writing", "pinned", "limbo")}
        held |= {name: stats[name] for name in ("leases", "puts", "waiting_requests")}
        held |= {name: stats["remote"][name] for name in ("jobs", "unsettled_jobs", "locating")}
        held["in_flight"] = stats["remote"]["in_flight_bytes"]
        held["transfers"] = stats["cluster"]["transfers"]
        held["loans"] = stats["cluster"]["service"]["loans"]["open"]
        return {name: value for name, value in held.items() if value}


class ClusterScene:
    """The nodes and clients of one test."""

    def __init__(self, spawn: Spawn, folder: Path) -> None:
        self._spawn = spawn
        self._folder = folder
        self._stores: list[KVStore] = []
        self.nodes: list[ClusterNode] = []

    def add(self, *names: str) -> list[ClusterNode]:
        """Nodes that are not started yet."""
        made = [ClusterNode(name, self._spawn, self._folder) for name in names]
        self.nodes += made
        return made

    def start(self, *names: str, **changed: object) -> list[ClusterNode]:
        """Nodes that have found each other."""
        made = self.add(*names)
        for node in made:
            node.start(made, **changed)
        self.meet(*made)
        return made

    def meet(self, *nodes: ClusterNode) -> None:
        """Wait until nodes have found each other."""
        for one in nodes:
            for other in nodes:
                if one is not other and not wait_for(lambda: one.reaches(other), JOIN_WAIT_S):  # noqa: B023
                    pytest.fail(f"{one.name} does not reach {other.name}: {one.stats()['cluster']}")

    def connect(self, node: ClusterNode, timeout_s: float = 5.0) -> KVStore:
        """A client of a node."""
        store = KVStore.connect(node.address, name="test", timeout_s=timeout_s)
        self._stores.append(store)
        return store

    def space(self, node: ClusterNode, timeout_s: float = 5.0) -> Space:
        """The space of :mod:`tests.faults.content` at a node."""
        return content.open_space(self.connect(node, timeout_s))

    def end(self) -> None:
        """All clients leave; then no node holds anything, and none has failed."""
        for store in self._stores:
            store.close()
        for node in self.nodes:
            if not node.runs:
                continue
            if not wait_for(lambda: not node.held(), CLEAN_WAIT_S):  # noqa: B023
                pytest.fail(f"{node.name} still holds {node.held()}", pytrace=False)
            assert "Traceback" not in node.process.stderr, node.process.report()


@pytest.fixture
def scene(spawn: Spawn, tmp_path: Path) -> Iterator[ClusterScene]:
    """Nodes and clients, and the check that ends the test."""
    made = ClusterScene(spawn, tmp_path)
    yield made
    made.end()


def begin_fetch(space: Space, keys: PrefixKeys, shard: int = 0) -> StoreJob[int]:
    """Begin to bring pages of other nodes here; the result is how many are here then."""
    space.lookup(keys, [shard], wait_s=2.0)
    return space.prefetch(keys, shard)


def fetch(space: Space, keys: PrefixKeys, shard: int = 0) -> int:
    """Bring pages of other nodes here; returns how many are here then.

    A node takes its directory for empty when a busy machine keeps it from answering for 50 ms. If
    that happened, the pages are fetched again until the node asks the directory anew.
    """
    late, found, again_until = _locates_timed_out(space), -1, 0.0

    def came() -> bool:
        nonlocal late, found, again_until
        found = begin_fetch(space, keys, shard).result(FETCH_WAIT_S)
        before, late = late, _locates_timed_out(space)
        if late > before:
            again_until = time.monotonic() + 1.5 * FRESH_NS / 1e9
        return found == len(keys) or time.monotonic() >= again_until

    wait_for(came, CLEAN_WAIT_S)
    return found


def _locates_timed_out(space: Space) -> int:
    answer = space._resources.link.request(wire.Stats(0), FETCH_WAIT_S)
    assert isinstance(answer, wire.StatsReply)
    found: int = json.loads(answer.json)["counts"].get("locates_timed_out", 0)
    return found


def read(space: Space, keys: PrefixKeys, shard: int = 0) -> list[bytes]:
    """The bytes of the pages that are here."""
    with space.get(keys, shard=shard) as views:
        return [bytes(one) for one in views.arrays]


def is_chain(chain: int, pages: list[bytes]) -> bool:
    """Whether these are the first pages of a chain of :mod:`tests.faults.content`."""
    return all(one == bytes(content.page(chain, at)) for at, one in enumerate(pages))
