"""Pushes over Mooncake's own TCP, from the pool of one process to that of another.

The bound is a bare TransferEngine of prefill's process, which writes the same blocks to the same
memory, neighbours together, and checks nothing. All processes are in a network of their own,
because Mooncake listens on all interfaces.
"""

import secrets
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Final

import msgspec
import numpy as np

from bench.handoff_pools import (
    BLOCK_BYTES,
    LAYERS,
    POOL_BYTES,
    PROMPT_BLOCKS,
    PROMPT_BYTES,
    TURNS_MIN,
    WAIT_S,
    planes_at,
    pool_at,
)
from bench.handoff_processes import SPACE, Orders, Push, decode_process, take_pushes
from bench.measure import Result, interleave, throughput
from bench.mooncake_alone import results_alone
from kvstore.handoff.decode import DecodeManager
from kvstore.handoff.messages import LandingPlace
from kvstore.handoff.mooncake import MooncakeLanding, MooncakeWriter
from kvstore.handoff.places import joined
from kvstore.handoff.prefill import PrefillManager
from kvstore.handoff.registry import HandoffRegistry
from kvstore.handoff.shared_memory import SharedMemory

BARE: Final = "bare TransferEngine, same blocks, no digests"
BATCH: Final = 512
"""Writes of one call of the bare engine; of 1,024 it refuses some."""
_HOST: Final = "127.0.0.1"


def results(name: str, seconds: float) -> Iterator[Result]:
    """``push/mooncake/block16/...``, in a process with a network of its own; says if it cannot."""
    words = [name, str(seconds)]
    yield from results_alone("bench.handoff_mooncake", name, words, timeout_s=10 * seconds + 120)


def measured(name: str, seconds: float) -> Result:
    """Measure one case in this process, against decode in another one."""
    permuted = name.endswith("permuted")
    secret = secrets.token_bytes(32)
    registry, shared = HandoffRegistry(_HOST, 0, secret), _filled()
    prefill = PrefillManager(
        pool_at(shared.address), SPACE, secret, registry=registry.url,
        writer=MooncakeWriter(shared, protocol="tcp"),
    )  # fmt: skip
    try:
        with decode_process(_decode, registry.url, secret, permuted) as pipe:
            if not pipe.poll(WAIT_S):
                raise TimeoutError("decode's process does not start")
            place = LandingPlace(*pipe.recv())
            push = Push(prefill, pipe, Orders(permuted=permuted, seed=1))
            bare = _bare(shared, place, permuted=permuted)
            found = interleave(push, bare, pairs=TURNS_MIN, min_seconds=seconds)
            stats = prefill.stats()
            assert not stats["jobs_not_taken"], f"some went over the link: {stats}"
    finally:
        prefill.close()
        registry.close()
        shared.close()
    return throughput(name, PROMPT_BYTES, found, BARE)


def _filled() -> SharedMemory:
    """Memory of a pool, all of whose pages are there."""
    shared = SharedMemory(POOL_BYTES)
    np.frombuffer(shared.buffer, dtype=np.uint8)[:] = 7
    return shared


def _bare(shared: SharedMemory, place: LandingPlace, *, permuted: bool) -> Callable[[], float]:
    """A call that writes the blocks of a prompt with an engine of this process; seconds."""
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    engine.initialize(_HOST, "P2PHANDSHAKE", "tcp", "")
    status = engine.register_memory(shared.address, POOL_BYTES)
    assert status == 0, f"the bare engine said {status}"
    planes = list(zip(planes_at(shared.address), np.frombuffer(place.planes, "<u8").tolist(),
                      strict=True))  # fmt: skip
    assert len(planes) == 2 * LAYERS
    orders = Orders(permuted=permuted, seed=1), Orders(permuted=permuted, seed=2)

    def call() -> float:
        ours, theirs = (order.draw() for order in orders)
        runs = joined(range(PROMPT_BLOCKS), ours, theirs, PROMPT_BLOCKS)
        writes = [
            (near + ours[first] * BLOCK_BYTES, far + theirs[first] * BLOCK_BYTES,
             count * BLOCK_BYTES)
            for near, far in planes for first, count in runs
        ]  # fmt: skip
        start = time.perf_counter()
        for at in range(0, len(writes), BATCH):
            local, remote, sizes = zip(*writes[at : at + BATCH], strict=True)
            status = engine.batch_transfer_sync_write(
                place.endpoint, list(local), list(remote), list(sizes)
            )
            assert status == 0, f"the bare engine said {status}"
        return time.perf_counter() - start

    return call


def _decode(pipe: Connection, registry: str, secret: bytes, permuted: bool) -> None:  # noqa: FBT001
    """Decode's process: say where its engine is, and take pushes until there is no room."""
    shared = _filled()
    engine = MooncakeLanding(shared, planes_at(shared.address), protocol="tcp")
    assert engine.place is not None
    pipe.send(msgspec.structs.astuple(engine.place))
    manager = DecodeManager(pool_at(shared.address), SPACE, secret, name="bench", engine=engine)
    take_pushes(manager, pipe, registry, permuted=permuted)
    manager.close()
    shared.close()


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode([measured(sys.argv[1], float(sys.argv[2]))]))
