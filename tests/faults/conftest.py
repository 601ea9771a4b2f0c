"""Real daemons and real clients for fault tests, and the leak check that ends each of them."""

import contextlib
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.client.store import KVStore
from kvstore.server import client
from tests.conftest import READY_WAIT_S, Process, Spawn, WaitUntil, wait_for
from tests.connecting import connect
from tests.faults import content

READY = r"kvstore-server ready: socket (\S+) .*\badmin (unix://\S+)"
CAPACITY_BYTES = 64 << 20
EXTENT_BYTES = 16 << 20
PAGES = CAPACITY_BYTES // content.PAGE_BYTES
CLEAN_WAIT_S = 10.0
ANSWER_WAIT_S = 30.0
_names = count()


class Daemon:
    """One ``kvstore-server`` process."""

    def __init__(self, process: Process, name: str) -> None:
        self.process = process
        self.name = name
        self.pid = process.pid
        self.address, self.admin = process.ready.group(1), process.ready.group(2)
        assert wait_for(self._answers)

    def stats(self) -> dict[str, Any]:
        """Its ``/v1/stats``."""
        status, body = client.send(self.admin, "GET", "/v1/stats", timeout_s=10)
        assert status == 200, body
        found: dict[str, Any] = json.loads(body)
        return found

    def _answers(self) -> bool:
        try:
            return bool(self.stats())
        except OSError:
            return False

    def host(self, name: str) -> int:
        value: int = self.stats()["host"][f"{name}_bytes"]
        return value

    def descriptors(self) -> Counter[str]:
        """What kinds of things it has open, and how many of each."""
        kinds: Counter[str] = Counter()
        for entry in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                kinds[re.sub(r"\d.*", "", str(entry.readlink()))] += 1
        return kinds

    def threads(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))

    def held(self) -> tuple[Counter[str], int]:
        """Descriptors and threads."""
        return self.descriptors(), self.threads()

    def leaks(self, descriptors: Counter[str], threads: int) -> dict[str, Any]:
        """What is left, beyond those given, although no client is; empty when nothing is."""
        stats = self.stats()
        left = {name: stats[name] for name in ("sessions", "connections", "waiting_requests")}
        left |= {name: stats[name] for name in ("leases", "puts")}
        states = ("writing", "pinned", "limbo", "withheld")
        left |= {name: stats["host"][f"{name}_bytes"] for name in states}
        # One thread more than at first: the one that looks for memory of the previous boot.
        left["descriptors"] = dict(self.descriptors() - descriptors)
        left["threads"] = max(0, self.threads() - threads - 1)
        return {name: value for name, value in left.items() if value}

    def memory_bytes(self) -> int:
        """All memory of any boot of this node that a process maps or the daemon holds."""
        sizes: dict[int, int] = {}
        for entry in Path("/proc").glob("[0-9]*/map_files/*"):
            _note(entry, f"/memfd:kvstore:{self.name}.", sizes)
        for entry in Path(f"/proc/{self.pid}/fd").iterdir():
            _note(entry, f"/memfd:kvstore:{self.name}.", sizes)
        return sum(sizes.values())


def _note(entry: Path, prefix: str, sizes: dict[int, int]) -> None:
    try:
        if str(entry.readlink()).startswith(prefix):
            status = entry.stat()
            sizes[status.st_ino] = status.st_size
    except OSError:
        return  # it went away, or is another user's


class Puppet:
    """A client process under the test's hand; see :mod:`tests.faults.puppet`."""

    def __init__(self, process: Process, commands: Path, gates: Path) -> None:
        self.process = process
        self.pid = process.pid
        self._commands, self._gates = commands, gates
        self._number = count(1)

    def begin(self, do: str, **arguments: object) -> int:
        """Start a command in a thread of the puppet; :meth:`end` gives its answer."""
        return self._send(do, arguments, background=True)

    def end(self, number: int, timeout_s: float = ANSWER_WAIT_S) -> Any:
        found: list[Any] = []

        def answered() -> bool:
            found[:] = [said for said in self.said() if said.get("answer") == number]
            return bool(found) or self.process.returncode is not None

        if not wait_for(answered, timeout_s) or not found:
            pytest.fail(f"no answer {number} from {self.process}\n{self.process.report()}")
        return found[0]["value"]

    def do(self, do: str, timeout_s: float = ANSWER_WAIT_S, **arguments: object) -> Any:
        """Carry out one command and give its answer."""
        return self.end(self._send(do, arguments, background=False), timeout_s)

    def at(self, gate: str) -> None:
        """Wait until the puppet stands at that gate."""
        if not wait_for(lambda: {"at": gate} in self.said(), ANSWER_WAIT_S):
            pytest.fail(f"{self.process} never came to gate {gate}\n{self.process.report()}")

    def go(self, gate: str | None = None) -> None:
        """Open a gate it stands at: the last one it came to."""
        came_to = [said["at"] for said in self.said() if "at" in said]
        self._write(self._gates / (gate or came_to[-1]), "go\n")

    def said(self) -> list[dict[str, Any]]:
        whole_lines = self.process.stdout.rpartition("\n")[0]
        return [json.loads(line) for line in whole_lines.splitlines()]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        if number is signal.SIGSTOP:
            status = Path(f"/proc/{self.pid}/stat")
            assert wait_for(lambda: status.read_text().rpartition(")")[2].split()[0] == "T")

    def _send(self, do: str, arguments: dict[str, object], *, background: bool) -> int:
        number = next(self._number)
        message = {"number": number, "background": background, "do": do, **arguments}
        self._write(self._commands, json.dumps(message) + "\n")
        return number

    def _write(self, pipe: Path, text: str) -> None:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


class Scene:
    """The processes of one test.

    Attributes:
        daemon: the node of this test.
        before: its statistics at the start; counts are those of all tests that shared it.
    """

    def __init__(self, spawn: Spawn, folder: Path, daemon: Daemon) -> None:
        self._spawn = spawn
        self._folder = folder
        self._clients: list[KVStore] = []
        self._puppets: list[Puppet] = []
        self.daemon = daemon
        self._held = daemon.held()
        self.before = daemon.stats()

    def restart_daemon(self) -> Daemon:
        """Start the node anew at the same place, under the same name."""
        process = self._spawn(self.daemon.process.args, ready=READY)
        self.daemon = Daemon(process, self.daemon.name)
        return self.daemon

    def counted(self, name: str) -> int:
        """How often the daemon counted that since the start of this test."""
        now = self.daemon.stats()["counts"].get(name, 0)
        return int(now - self.before["counts"].get(name, 0))

    def puppet(self, timeout_s: float = 2.0) -> Puppet:
        """A client in a process of its own."""
        number = len(self._puppets)
        commands, gates = (self._folder / f"{kind}-{number}" for kind in ("commands", "gates"))
        os.mkfifo(commands)
        gates.mkdir()
        program = [sys.executable, "-m", "tests.faults.puppet", self.daemon.address]
        process = self._spawn([*program, commands, gates, str(timeout_s)], ready=r'^\{"ready": ')
        puppet = Puppet(process, commands, gates)
        assert wait_for(lambda: puppet.do("state")["connected"]), "a stall may cost its first try"
        self._puppets.append(puppet)
        return puppet

    def client(self, timeout_s: float = 5.0) -> KVStore:
        """A client in this process."""
        store = connect(self.daemon.address, name="test", timeout_s=timeout_s)
        self._clients.append(store)
        return store

    def end(self) -> None:
        """Every client leaves; then the daemon holds nothing for anybody, and all can be used."""
        for store in self._clients:
            store.close()
        for puppet in self._puppets:
            puppet.process.kill()
        self._check_clean()
        sweep(self.daemon)
        self._check_clean()
        noise = re.findall(r"(?m)^Traceback .*", self.daemon.process.stderr)
        assert not noise, self.daemon.process.report()

    def _check_clean(self) -> None:
        if not wait_for(lambda: not self.daemon.leaks(*self._held), CLEAN_WAIT_S):
            left = self.daemon.leaks(*self._held)
            pytest.fail(f"the daemon still holds {left}", pytrace=False)


def sweep(daemon: Daemon) -> None:
    """Use every slot of the pool once, which evicts all pages, and leave them all free."""
    part = 16
    with connect(daemon.address, name="sweep", timeout_s=5.0) as store:
        space = content.open_space(store)
        chains = [content.keys(9000 + at, part) for at in range(PAGES // part)]
        for chain in chains:
            blank = [np.zeros(content.PAGE_BYTES, dtype=np.uint8)] * part
            assert space.put(chain, blank, read_once=True).stored == part
        for chain in chains:
            with space.get(chain) as views:
                assert len(views) == part
        assert wait_for(lambda: daemon.host("free") == CAPACITY_BYTES), daemon.stats()


def arguments(folder: Path) -> tuple[str, list[str]]:
    """A name of its own for a node, and the command line that starts it."""
    name = f"faults-{os.getpid()}-{next(_names)}"
    chosen = (
        f"node.name={name}", f"socket.path={folder / 'kv.sock'}", "http.port=0",
        f"host.capacity_bytes={CAPACITY_BYTES}", f"host.extent_bytes={EXTENT_BYTES}",
        "host.prefault=false", "events.endpoint=", "events.replay_endpoint=",
    )  # fmt: skip
    flags = [part for setting in chosen for part in ("--set", setting)]
    return name, [sys.executable, "-m", "kvstore.server.daemon", *flags]


@pytest.fixture(scope="session")
def standing_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for all tests that do it no harm; each of them checks that it left nothing."""
    folder = tmp_path_factory.mktemp("standing")
    name, program = arguments(folder)
    process = Process(program, {**os.environ, "PYTHONUNBUFFERED": "1"}, folder / "process")
    try:
        process.wait_ready(READY, READY_WAIT_S)
        daemon = Daemon(process, name)
        sweep(daemon)
        yield daemon
    finally:
        process.stop()


@pytest.fixture
def scene(standing_daemon: Daemon, spawn: Spawn, tmp_path: Path) -> Iterator[Scene]:
    """Clients of the standing daemon."""
    made = Scene(spawn, tmp_path, standing_daemon)
    try:
        yield made
    finally:
        made.end()


@pytest.fixture
def frail(spawn: Spawn, tmp_path: Path) -> Iterator[Scene]:
    """Clients of a daemon that the test may harm."""
    name, program = arguments(tmp_path)
    daemon = Daemon(spawn(program, ready=READY), name)
    sweep(daemon)
    made = Scene(spawn, tmp_path, daemon)
    try:
        yield made
    finally:
        made.end()


StatsUntil = Callable[[Callable[[dict[str, Any]], object]], None]


@pytest.fixture
def stats_until(scene: Scene, wait_until: WaitUntil) -> StatsUntil:
    """``stats_until(lambda stats: ...)``: waits until the daemon's statistics say so."""

    def wait(condition: Callable[[dict[str, Any]], object], what: str = "") -> None:
        wait_until(lambda: condition(scene.daemon.stats()), CLEAN_WAIT_S, what)

    return wait
