"""A daemon of its own for each module, and stores of both kinds: embedded, and of that daemon."""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.client.link import Link
from kvstore.client.mapping import Mapping
from kvstore.client.space import Space
from kvstore.client.store import KVStore
from kvstore.config import DeviceSlabConfig
from kvstore.mover.kvpool import KVPool
from kvstore.protocol.page import (
    CanonicalLayout,
    OpaqueLayout,
    PrefixKeys,
    ShardSpec,
    SpaceIdentity,
)
from kvstore.server import client
from tests.client.peer import Peer
from tests.conftest import Process, Spawn, wait_for
from tests.connecting import connect

READY = (
    r"kvstore-server ready: socket (\S+) http (\S+) events (\S+) replay (\S+)"
    r" .*\badmin (unix://\S+)"
)
CAPACITY_BYTES = 64 << 20
EXTENT_BYTES = 16 << 20
TIMEOUT_S = 10.0
_models = count()


def arguments(socket: Path, **settings: object) -> list[str]:
    """The command line of a small daemon."""
    values = {
        "socket.path": socket, "http.port": 0, "host.capacity_bytes": "64MiB",
        "host.extent_bytes": "16MiB", "host.prefault": "false",
        **{name.replace("__", "."): value for name, value in settings.items()},
    }  # fmt: skip
    sets = [part for name, value in values.items() for part in ("--set", f"{name}={value}")]
    return [sys.executable, "-m", "kvstore.server.daemon", *sets]


class Daemon:
    """One running daemon, by what its ready line told."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.address, self.http, self.events, self.replay, self.admin = process.ready.groups()
        self.socket = Path(self.address.removeprefix("unix://"))

    def ask(self, path: str) -> Any:
        status, body = client.send(self.admin, "GET", path, timeout_s=TIMEOUT_S)
        assert status == 200, body
        return json.loads(body) if body[:1] == b"{" else body

    def connect(self, **options: Any) -> KVStore:
        return connect(self.address, timeout_s=TIMEOUT_S, **options)


def still_serves(daemon: Daemon) -> bool:
    with daemon.connect() as store:
        space = open_space(store)
        keys, pages = new_keys(space, 2), content(2, SIZE)
        space.put(keys, pages)
        return space.get(keys, content(2, SIZE, seed=9)) == 2


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("daemon")
    process = Process(
        arguments(folder / "kv.sock"), {**os.environ, "PYTHONUNBUFFERED": "1"}, folder / "daemon"
    )
    try:
        process.wait_ready(READY, 30.0)
        yield Daemon(process)
    finally:
        assert process.stop() == 0, process.report()


@pytest.fixture
def own_daemon(spawn: Spawn, tmp_path: Path) -> Daemon:
    """A daemon that the test may fill, break or end."""
    return Daemon(spawn(arguments(tmp_path / "own.sock"), ready=READY))


@pytest.fixture(scope="module")
def ssd_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with less memory, and a disk."""
    folder = tmp_path_factory.mktemp("ssd-daemon")
    settings = {
        "host__capacity_bytes": "16MiB", "host__extent_bytes": "4MiB",
        "ssd__directories": str(folder / "ssd"), "ssd__capacity_bytes": "128MiB",
        "ssd__segment_bytes": "16MiB",
    }  # fmt: skip
    command = arguments(folder / "kv.sock", **settings)
    process = Process(command, {**os.environ, "PYTHONUNBUFFERED": "1"}, folder / "daemon")
    try:
        process.wait_ready(READY, 30.0)
        yield Daemon(process)
    finally:
        assert process.stop() == 0, process.report()


def mapped_bytes(mapping: Mapping) -> int:
    """Bytes that a client has mapped, read-only and writable mappings counted apart."""
    regions = [*mapping._read.values(), *mapping._write.values(), *mapping._dropped]
    return sum(region.size for region in regions)


SLAB = DeviceSlabConfig(device="cpu", capacity_bytes=1 << 20)
"""Smaller than what most tests load, so that pages come from both."""


@pytest.fixture(
    params=["embedded", "daemon", "embedded-ssd", "daemon-ssd", "embedded-slab", "daemon-slab"]
)
def store(
    request: pytest.FixtureRequest, daemon: Daemon, ssd_daemon: Daemon, tmp_path: Path
) -> Iterator[KVStore]:
    match request.param:
        case "embedded":
            opened = KVStore.open(CAPACITY_BYTES, extent_bytes=EXTENT_BYTES)
        case "embedded-ssd":
            opened = KVStore.open(
                CAPACITY_BYTES // 4, extent_bytes=EXTENT_BYTES // 4, ssd_directories=[tmp_path],
                ssd_capacity_bytes=128 << 20,
            )  # fmt: skip
        case "embedded-slab":
            opened = KVStore.open(CAPACITY_BYTES, extent_bytes=EXTENT_BYTES, device_slab=SLAB)
        case "daemon":
            opened = daemon.connect()
        case "daemon-slab":
            opened = daemon.connect(device_slab=SLAB)
        case _:
            opened = ssd_daemon.connect()
    with opened:
        yield opened


FLAT = ShardSpec(layout=CanonicalLayout(64), layers=(0, 2), heads=(0, 2))


def identity(**fields: Any) -> SpaceIdentity:
    """A space of its own unless a model is named."""
    defaults = {"model": f"model-{next(_models)}", "kv_dtype": "float32", "page_tokens": 4}
    return SpaceIdentity(**{**defaults, **fields})


SIZE = FLAT.page_bytes(identity())


def open_space(store: KVStore, *shards: ShardSpec, **fields: Any) -> Space:
    return store.space(identity(**fields), shards or (FLAT,))


def new_keys(space: Space, pages: int, start: int = 0) -> PrefixKeys:
    tokens = np.arange(start, start + pages * space.identity.page_tokens)
    return space.page_keys(tokens)


def content(pages: int, size: int, seed: int = 1) -> list[npt.NDArray[np.uint8]]:
    chance = np.random.default_rng(seed)
    return [chance.integers(0, 256, size, dtype=np.uint8) for _ in range(pages)]


class Pool:
    """An engine's KV pool as arrays: ``planes[plane][block]`` is ``block_bytes`` bytes."""

    def __init__(
        self, plane_count: int, block_bytes: int, blocks: int, gap: int = 0, per_layer: int = 2
    ) -> None:
        stride = block_bytes + gap
        self.block_bytes = block_bytes
        self.planes = [np.zeros((blocks, stride), dtype=np.uint8) for _ in range(plane_count)]
        addresses = tuple(plane.ctypes.data for plane in self.planes)
        self.kvpool = KVPool(addresses, block_bytes, stride, blocks, per_layer)

    def on(self, device: str) -> KVPool:
        """The same memory, said to be on a device."""
        return replace(self.kvpool, device=device)

    def fill(self, seed: int) -> None:
        chance = np.random.default_rng(seed)
        for plane in self.planes:
            plane[:] = chance.integers(0, 256, plane.shape, dtype=np.uint8)

    def page(self, blocks: npt.NDArray[np.int64], layers: slice = slice(None)) -> bytes:
        """What a page in these blocks is made of, by the words of the layout."""
        planes = np.reshape(range(len(self.planes)), (-1, self.kvpool.planes_per_layer))[layers]
        return b"".join(
            self.planes[plane][block, : self.block_bytes].tobytes()
            for plane in planes.reshape(-1)
            for block in blocks
        )


OPAQUE = OpaqueLayout("engine", "1", "", 16, 384)


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    """A node by hand."""
    made = Peer(tmp_path / "peer.sock")
    yield made
    made.close()


@pytest.fixture
def connected(peer: Peer) -> Iterator[Link]:
    """A link to it."""
    made = Link(peer.path, "engine")
    assert wait_for(lambda: made.connected)
    yield made
    made.close()
