"""A model, a node and engines. pytest and the node run in the project's environment, the engines in
their own (``VLLM_PYTHON``; ``make test-vllm`` makes it and says where it is)."""

import mmap
import os
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Process, Spawn
from tests.open_files import open_files
from tests.vllm.engines import ROOT, Engine, Imported, transfer_config

READY = r"kvstore-server ready: socket (\S+) http (\S+) events (\S+) replay (\S+)"
_numbers = count()

Start = Callable[..., Engine]
Make = Callable[..., Path]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of it needs the engine's environment."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter of the engine's environment."""
    given = os.environ.get("VLLM_PYTHON")
    if not given:
        pytest.fail("VLLM_PYTHON is not set: run `make test-vllm`")
    return Path(given)


@pytest.fixture(scope="session")
def imported(python: Path) -> Iterator[Imported]:
    """Starts what needs vLLM, but for servers."""
    made = Imported(python)
    yield made
    made.close()


@pytest.fixture(scope="session")
def make(imported: Imported, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """``make(kind, *arguments)``: a folder with what :mod:`tests.vllm.models` makes, each once."""
    folders: dict[str, Path] = {}

    def made(kind: str, *arguments: object) -> Path:
        name = "-".join(map(str, (kind, *arguments)))
        if name not in folders:
            top = tmp_path_factory.mktemp(name)
            folder = top / "model"
            imported.run("tests.vllm.models", (kind, folder, *arguments), top / "log")
            folders[name] = folder
        return folders[name]

    return made


@pytest.fixture(scope="session")
def model(make: Make) -> Path:
    """A small random model on disk."""
    return make("tiny")


@pytest.fixture(scope="session")
def plain(
    imported: Imported, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """An engine without the connector and without a prefix cache: what tokens must be."""
    engine = Engine(imported, tmp_path_factory.mktemp("plain") / "engine.log")
    try:
        engine.start(model, enable_prefix_caching=False)
        yield engine
    finally:
        engine.close()


@pytest.fixture
def start(imported: Imported, model: Path, tmp_path: Path) -> Iterator[Start]:
    """``start(address, hooks=(), transfer={}, **vllm arguments) -> Engine``; all end with the test.

    Without an address the engine has no connector.
    """
    started: list[Engine] = []

    def make(
        address: str | None, *, hooks: tuple[str, ...] = (), transfer: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Engine:  # fmt: skip
        engine = Engine(imported, tmp_path / f"engine-{len(started)}.log")
        started.append(engine)
        if address is not None:
            changes["kv_transfer_config"] = transfer_config(address, **(transfer or {}))
        engine.start(changes.pop("model", model), hooks, **changes)
        return engine

    yield make
    for engine in started:
        engine.close()
        sys.stderr.write(f"\n--- {engine.log.name}\n{engine.report()}\n")


class Node:
    """A daemon that can be ended and started again at the same address."""

    def __init__(self, spawn: Spawn, socket: Path, before: str = "pass", **changes: Any) -> None:
        """Start it, after running ``before`` in its process, with ``changes`` of its settings."""
        self._spawn = spawn
        self._socket = socket
        self._before = before
        self._changes = changes
        self.process = self.start()

    @property
    def address(self) -> str:
        return f"unix://{self._socket}"

    def start(self) -> Process:
        """Start it anew."""
        sets = {
            "socket.path": self._socket, "http.port": 0, "host.capacity_bytes": 64 << 20,
            "host.extent_bytes": 16 << 20, "events.endpoint": "", "events.replay_endpoint": "",
            **self._changes,
        }  # fmt: skip
        program = (
            f"{self._before}; from kvstore.server.daemon import main as m; raise SystemExit(m())"
        )
        arguments = [sys.executable, "-c", program]
        for key, value in sets.items():
            arguments += ["--set", f"{key}={value}"]
        self.process = self._spawn(arguments, ready=READY, env={"PYTHONPATH": str(ROOT)})
        return self.process

    def restart(self) -> None:
        """End it as an operator does, and start it anew: only what is on its disk is left."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait() == 0, self.process.report()
        self.start()


@pytest.fixture
def node(spawn: Spawn, tmp_path: Path) -> Node:
    """A daemon of its own for the test."""
    return Node(spawn, tmp_path / f"kv{next(_numbers)}.sock")


def flip_stored_bytes(node: Node) -> int:
    """Flip the sign of one number in every 64 bytes of the node's pages; how many were flipped."""
    flipped = 0
    for entry, link in open_files(node.process.pid):
        if not link.startswith("/memfd:"):
            continue
        with entry.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            array = np.frombuffer(memory, dtype=np.uint8)
            at = np.flatnonzero(array[1::64]) * 64 + 1  # the high byte of a little-endian bfloat16
            array[at] ^= 0x80
            flipped += len(at)
            del array
    return flipped


def prompt(length: int, seed: int) -> list[int]:
    """Tokens of a prompt; other seeds share no prefix."""
    return [int(t) for t in np.random.default_rng(seed).integers(2, 500, length)]
