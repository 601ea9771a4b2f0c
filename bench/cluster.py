"""A whole installation on this machine, as the processes an operator would start.

One daemon, or several in a cluster, one Conductor, prefill and decode engines, and one engine on
its own (mono, no store) to compare with. Every process is ended by its own pid.
"""

import json
import os
import queue
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from bench.store_programs import NoProgramError
from bench.store_servers import EtcdServer, ForgetfulRedisServer, ServerStartError
from kvstore.cli.remote import Remote
from kvstore.process.privatefile import token_for
from kvstore.protocol.counts import NodeStats

READY_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 15.0
_HTTP_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.05
DAEMON_READY: Final = r"kvstore-server ready: socket (\S+) http (\S+) events (\S+) replay (\S+)"
LISTENING: Final = r"listening on (\S+)"
_PEERS_PORT: Final = 7400
_PAGES_PORT: Final = 7401
_INDEX_PAGES_MAX: Final = 100_000
_MOONCAKE: Final = {
    "cluster.transports": '["mooncake", "tcp"]',
    "cluster.mooncake_protocol": "tcp",
    "cluster.rdma_tenants": '["default"]',
}


class ClusterError(Exception):
    """A process did not start or did not answer; its log says why."""


class Service:
    """One process and its ready line.

    Args:
        name: names its log.
        arguments: the command.
        ready: regular expression of the line on stdout that says it serves.
        directory: where its log goes.
        environment: of the process; this one's by default.
    """

    def __init__(
        self, name: str, arguments: Sequence[str], ready: str, directory: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.log = directory / f"{name}.log"
        self._ready = re.compile(ready)
        self._lines: queue.Queue[str] = queue.Queue()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                arguments, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )
        self._reader = threading.Thread(target=self._read, name=f"{name}-stdout", daemon=True)
        self._reader.start()

    def wait_ready(self) -> re.Match[str]:
        """The match of its ready line.

        Raises:
            ClusterError: it ended, or the time ran out.
        """
        deadline = time.monotonic() + READY_TIMEOUT_S
        while (left := deadline - time.monotonic()) > 0:
            try:
                line = self._lines.get(timeout=left)
            except queue.Empty:
                break
            if not line:
                break
            found = self._ready.search(line)
            if found:
                return found
        log = self.log.read_text(errors="replace")[-2000:]
        raise ClusterError(f"{self.name} did not become ready; the end of {self.log}:\n{log}")

    def ask_to_end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send it a signal; :meth:`stop` waits for its end."""
        if self.process.poll() is None:
            self.process.send_signal(number)
            self.process.send_signal(signal.SIGCONT)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it, at last with SIGKILL, then with all that descend from it.

        A descendant that lived on would keep the pipe open that the reader waits for.
        """
        descendants = family(self.process.pid)
        self.ask_to_end(number)
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            for pid in descendants:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait(STOP_TIMEOUT_S)
        self._reader.join(STOP_TIMEOUT_S)
        if self._reader.is_alive():  # closing would wait for it without a limit
            return
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # a thread that just ended
            for child in tasks.read_text().split():
                found += family(int(child))
    return found


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the cluster is made of.

    Attributes:
        model: one of the reference engine's models.
        capacity_bytes: of the daemon's host memory.
        nodes: number of daemons; prefill engines are at the first, decode engines at the last.
        membership: how several find each other: ``local`` (a list), ``etcd`` or ``redis``.
        directory: how they know of each other's pages: ``peers`` or ``redis``.
        transport: how pages are read from other nodes: ``tcp``, or ``mooncake`` over its own TCP,
            which needs a network where nobody else reaches its ports.
        prefills: number of prefill engines.
        decodes: number of decode engines.
        kv_blocks: blocks of 16 tokens in each engine's pool.
        policy: of the Conductor.
        conductor: further settings of the Conductor, each ``section.key=value``.
        prefix_cache: whether the engines' own prefix caches are on; off, every reused token came
            through the store.
        kv_hashes: whether engines hash each request's K and V.
        handoff: how prefill hands K/V over: through the ``store``, or by ``push``.
        handoff_transport: of pushes: ``tcp``, or ``mooncake`` over its own TCP, which needs a
            network where nobody else reaches its ports.
        push_after: what the prefill engines compute before they push, each its own, in turns.
    """

    model: str = "demo"
    capacity_bytes: int = 1 << 30
    nodes: int = 1
    membership: str = "local"
    directory: str = "peers"
    transport: str = "tcp"
    prefills: int = 1
    decodes: int = 1
    kv_blocks: int = 640
    policy: str = "longest-prefix"
    conductor: tuple[str, ...] = ()
    prefix_cache: bool = False
    kv_hashes: bool = True
    handoff: str = "store"
    handoff_transport: str = "tcp"
    push_after: tuple[str, ...] = ("layer",)


class NodeAt(NamedTuple):
    """A daemon: its name, its socket, its HTTP address, and its admin socket."""

    name: str
    store_url: str
    url: str
    admin: str


class Cluster:
    """The processes; a context manager that ends them all."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.services: dict[str, Service] = {}
        self.nodes: list[NodeAt] = []
        self.stores: dict[str, EtcdServer | ForgetfulRedisServer] = {}
        self.store_url = self.node_url = self.conductor_url = self.mono_url = ""
        self.node_admin = ""
        self.engine_urls: dict[str, str] = {}
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name in self.engine_urls:  # all at once, and before what they use
            self.services[name].ask_to_end()
        self._undo.close()

    def _start(self) -> None:
        options = self.options
        self.directory = Path(self._undo.enter_context(tempfile.TemporaryDirectory(prefix="kv-")))
        daemons = self._daemons()
        conductor = self._launch(
            "conductor",
            [script("kvstore-conductor"), "--port", "0", "--policy", options.policy],
            LISTENING,
            *options.conductor,
        )
        for name, daemon in daemons.items():
            socket, url, _, _ = daemon.wait_ready().groups()
            self.nodes.append(NodeAt(name, socket, url, f"{socket}.admin"))
        _, self.store_url, self.node_url, self.node_admin = self.nodes[0]
        self.conductor_url = conductor.wait_ready().group(1)
        for node in self.nodes:
            register(self.conductor_url, "nodes", {"url": node.admin})
        roles = ["prefill"] * options.prefills + ["decode"] * options.decodes
        names = [f"P{n + 1}" for n in range(options.prefills)]
        names += [f"D{n + 1}" for n in range(options.decodes)]
        engines = [self._engine(name, role) for name, role in zip(names, roles, strict=True)]
        mono = self._engine("mono", "mono")
        for engine in engines:
            self.engine_urls[engine.name] = engine.wait_ready().group(1)
        self.mono_url = mono.wait_ready().group(1)
        self._wait_registered(names)
        if options.nodes > 1:
            self._wait_met()

    def _daemons(self) -> dict[str, Service]:
        """Start the daemons; by name."""
        options = self.options
        if options.nodes == 1:
            return {"local": self._daemon("node", "kvstore.sock")}
        stores = self._start_stores()
        hosts = {f"node-{letter}": loopback() for letter in "abcdefgh"[: options.nodes]}
        found: dict[str, Service] = {}
        for name in hosts:
            settings = cluster_settings(name, hosts, _INDEX_PAGES_MAX) | stores
            if options.membership != "local":
                settings.pop("cluster.nodes")
            if options.transport == "mooncake":
                settings |= _MOONCAKE
            sets = [f"{key}={value}" for key, value in settings.items()]
            found[name] = self._daemon(name, f"{name}.sock", *sets)
        return found

    def _start_stores(self) -> dict[str, object]:
        """Start the etcd and the Redis that are needed; the settings of nodes that use them."""
        used = {self.options.membership, self.options.directory}
        try:
            if "etcd" in used:
                etcd = EtcdServer(self.directory / "etcd")
                self.stores["etcd"] = self._undo.enter_context(etcd)
            if "redis" in used:
                redis = ForgetfulRedisServer(self.directory / "redis")
                self.stores["redis"] = self._undo.enter_context(redis)
        except (NoProgramError, ServerStartError) as error:
            raise ClusterError(str(error)) from error
        return {
            "cluster.membership": self.options.membership,
            "cluster.directory": self.options.directory,
            **{f"{name}.endpoints": server.endpoint for name, server in self.stores.items()},
        }

    def _daemon(self, service: str, socket: str, *sets: str) -> Service:
        options = self.options
        return self._launch(
            service,
            [script("kvstore-server"), "--log-level", "WARNING"],
            DAEMON_READY,
            f"socket.path={self.directory}/{socket}",
            "http.port=0",
            f"host.capacity_bytes={options.capacity_bytes}",
            f"host.extent_bytes={min(64 << 20, options.capacity_bytes)}",
            *sets,
        )

    def _engine(self, name: str, mode: str) -> Service:
        options = self.options
        arguments = [sys.executable, "-m", "engine_adapters.reference", "--mode", mode]
        arguments += ["--id", name, "--model", options.model, "--kv-blocks", str(options.kv_blocks)]
        arguments += ["--prefix-cache", "on" if options.prefix_cache else "off"]
        arguments += ["--kv-hashes", "on" if options.kv_hashes else "off", "--max-waiting", "1024"]
        if mode != "mono":
            node = self.nodes[0 if mode == "prefill" else -1]
            arguments += ["--store", node.store_url, "--node", node.name]
            arguments += ["--conductor", self.conductor_url]
            if options.handoff == "push":
                arguments += ["--handoff", "push", "--handoff-secret-file", str(self.secret())]
                after = options.push_after[(int(name[1:]) - 1) % len(options.push_after)]
                arguments += ["--push-after", after]
                arguments += ["--handoff-transport", options.handoff_transport]
                arguments += ["--mooncake-protocol", "tcp"]
        if mode != "mono" and options.prefix_cache:
            events = f"ipc://{self.directory}/{name}"
            arguments += ["--events", f"{events}.events", "--events-replay", f"{events}.replay"]
        return self._launch(name, arguments, LISTENING)

    def secret(self) -> Path:
        """The file with the secret of the engines, made when it is first needed."""
        path = self.directory / "handoff-secret"
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text(secrets.token_hex(16))
        return path

    def _launch(self, name: str, arguments: list[str], ready: str, *sets: str) -> Service:
        for item in sets:
            arguments += ["--set", item]
        service = Service(name, arguments, ready, self.directory)
        self.services[name] = service
        self._undo.callback(service.stop)
        return service

    def _wait_registered(self, names: Sequence[str]) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            known = json.dumps(request("GET", f"{self.conductor_url}/v1/engines"))
            if all(f'"{name}"' in known for name in names):
                return
            time.sleep(_POLL_S)
        raise ClusterError(f"the Conductor does not know all of {', '.join(names)}")

    def _wait_met(self) -> None:
        """Wait until each node reaches every other one."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not all(self._has_met(node) for node in self.nodes):
            if time.monotonic() >= deadline:
                raise ClusterError(f"the nodes do not reach each other; see {self.directory}")
            time.sleep(_POLL_S)

    def _has_met(self, node: NodeAt) -> bool:
        others = [one.name for one in self.nodes if one is not node]
        return has_met(node_stats(node), others)


def cluster_settings(
    name: str, hosts: Mapping[str, str], index_pages_max: int
) -> dict[str, object]:
    """Settings of one daemon of a cluster on this machine.

    Args:
        name: of the daemon.
        hosts: name → :func:`loopback` address of each daemon that it knows, itself included.
        index_pages_max: maximum entries of its index.
    """
    return {
        "node.name": name,
        "cluster.name": "demo",
        "cluster.listen": f"{hosts[name]}:{_PEERS_PORT}",
        "cluster.transfer_listen": f"{hosts[name]}:{_PAGES_PORT}",
        "cluster.nodes": json.dumps([f"{one}={at}:{_PEERS_PORT}" for one, at in hosts.items()]),
        "cluster.index_pages_max": index_pages_max,
    }


def has_met(stats: Mapping[str, Any], others: Sequence[str]) -> bool:
    """Whether a daemon with these statistics reaches all the others, and its directory is current.

    That is: it follows the others' events, or has announced its pages in Redis.
    """
    known = stats["cluster"]
    directory = known["directory"]
    follows = dict.fromkeys(others, directory.get("shared")) | directory["peers"]
    return all(
        known["peers"].get(name, {"up": False})["up"] and (follows[name] or {}).get("current")
        for name in others
    )


def node_stats(node: NodeAt) -> dict[str, Any]:
    """The statistics of a daemon."""
    found: dict[str, Any] = Remote(node.admin).get("/v1/stats", NodeStats).raw
    return found


def loopback() -> str:
    """An address of this machine that nobody else uses, so that nodes can have known ports."""
    number = int.from_bytes(os.urandom(3)) % (1 << 22)
    return f"127.{64 + (number >> 16)}.{(number >> 8) & 255}.{1 + number % 254}"


def script(name: str) -> str:
    """A console script beside the interpreter that runs this."""
    return str(Path(sys.executable).with_name(name))


def register(conductor_url: str, kind: str, body: dict[str, Any]) -> None:
    """Tell a Conductor that we started of an engine or node (``kind`` is the plural).

    Raises:
        ClusterError: it does not answer, or refuses.
    """
    token = token_for("conductor", conductor_url)
    request("POST", f"{conductor_url}/v1/{kind}", body, token)


def request(method: str, url: str, body: dict[str, Any] | None = None, token: str = "") -> Any:
    """One JSON request to a process of this machine, with a token if need be.

    Raises:
        ClusterError: it does not answer, or not with success.
    """
    data = json.dumps(body).encode() if body is not None else None
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    call = urllib.request.Request(url, data=data, method=method, headers=headers)
    try:
        with urllib.request.urlopen(call, timeout=_HTTP_TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise ClusterError(f"{url}: {error.code} {error.read().decode()[:500]}") from error
    except OSError as error:
        raise ClusterError(f"{url}: {error}") from error


def memory_bytes(pid: int) -> int:
    """Resident memory of a process."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
