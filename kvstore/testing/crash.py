"""Kills a real daemon under load repeatedly, and checks its pages after each restart.

A kill keeps what the daemon wrote (it is in the kernel's page cache); for power cuts see
:mod:`kvstore.testing.powercut`. The bytes of a page follow from its key, so readers can check them
without a digest.
"""

import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.client.space import Space
from kvstore.client.store import KVStore
from kvstore.protocol.errors import CapacityError, KVStoreError, PeerUnreachable, TransferTimeout
from kvstore.protocol.page import CanonicalLayout, PrefixKeys, ShardSpec, SpaceIdentity
from kvstore.testing.server import Server, ServerError, wait_for

Say = Callable[[str], None]

MIB: Final = 1 << 20
PAGE_TOKENS: Final = 16
PAGE_BYTES: Final = 64 << 10
CHAIN_PAGES: Final = 12
CHAINS: Final = 8
"""Prompts of one life; the next life has others, so that there is always something to write."""
WORKERS: Final = 3
OPERATIONS_MAX: Final = 60
ROOMY_BYTES: Final = 512 * MIB
TIGHT_BYTES: Final = 12 * MIB
LIVES_OF_A_DIRECTORY: Final = 10
WAIT_S: Final = 30.0
TIMEOUT_S: Final = 10.0
_IDENTITY: Final = SpaceIdentity(model="crash", kv_dtype="float32", page_tokens=PAGE_TOKENS)
_SHARD: Final = ShardSpec(layout=CanonicalLayout(head_dim=128), layers=(0, 1), heads=(0, 4))
_KNOWN_FILES: Final = re.compile(r"segment-[0-9a-f]{16}\.kvlog|kvstore-log\.json")


@dataclass
class CrashOutcome:
    """Counts of a run; tests assert that each of these has occurred.

    Attributes:
        kills: kills of a serving daemon; ``kills_of_starts``: of a starting one.
        kills_by_point: kills of a serving daemon, by the point they were made at.
        operations: operations of the load.
        acknowledged: pages whose durable put was acknowledged.
        verified: acknowledged pages found byte-equal after a kill.
        compared: pages whose bytes were compared, under load and afterwards.
        recovered: pages found on disk by starts.
        troubles: error code → number of times the load got it.
    """

    kills: int = 0
    kills_of_starts: int = 0
    kills_by_point: Counter[str] = field(default_factory=Counter)
    operations: int = 0
    acknowledged: int = 0
    verified: int = 0
    compared: int = 0
    recovered: int = 0
    troubles: Counter[str] = field(default_factory=Counter)


class CrashFound(AssertionError):
    """The store returned wrong bytes, lost acknowledged pages, or did not restart."""


def open_space(store: KVStore) -> Space:
    """The space of all pages of the test."""
    space = store.space(_IDENTITY, [_SHARD])
    assert space.page_bytes == (PAGE_BYTES,)
    return space


def chain_keys(space: Space, chain: int, pages: int = CHAIN_PAGES) -> PrefixKeys:
    """Keys of a prompt."""
    tokens = np.arange(pages * PAGE_TOKENS, dtype=np.uint32) + np.uint32(chain * 4096)
    return space.page_keys(tokens)


def page_of(key: bytes) -> npt.NDArray[np.uint8]:
    """The only correct bytes of a page: its key, repeated."""
    return np.resize(np.frombuffer(key, dtype=np.uint8), PAGE_BYTES)


def wrong_pages(keys: PrefixKeys, found: list[npt.NDArray[np.uint8]]) -> list[int]:
    """Indexes of the leading pages of a chain that have wrong bytes."""
    return [at for at, page in enumerate(found) if not np.array_equal(page, page_of(keys[at]))]


class CrashLoad:
    """Threads that store and read pages until the daemon has ended.

    Args:
        address: address of the daemon.
        seed: seed of their choices.
        chains: numbers of the prompts.
        outcome: counts are added to it.

    Attributes:
        acknowledged: chain → number of leading pages that were acknowledged as durable.
        operations: number of completed operations.
        waiting: number of threads that wait for a durable put.
        found: errors found.
    """

    def __init__(self, address: str, seed: str, chains: range, outcome: CrashOutcome) -> None:
        self.acknowledged: dict[int, int] = {}
        self.operations = 0
        self.waiting = 0
        self.found: list[str] = []
        self._address = address
        self._chains = chains
        self._outcome = outcome
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(Random(f"{seed} {index}"),), name="crash-load")
            for index in range(WORKERS)
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """The daemon has ended: wait for the threads."""
        self._over.set()
        for thread in self._threads:
            thread.join(WAIT_S)
            if thread.is_alive():
                self.found.append("a call of the client did not end after the daemon was gone")

    def _run(self, random: Random) -> None:
        with KVStore.connect(self._address, name="crash-load", timeout_s=TIMEOUT_S) as store:
            space = open_space(store)
            while not self._over.is_set() and not self.found:
                try:
                    self._act(space, random)
                except CapacityError as error:
                    self._count(error.code)
                except (PeerUnreachable, TransferTimeout) as error:
                    self._count(error.code)
                    self._over.wait(TIMEOUT_S)  # the daemon is being killed
                except KVStoreError as error:
                    self.found.append(f"the load was refused: {error.code}: {error}")
                else:
                    self._count("")

    def _count(self, trouble: str) -> None:
        with self._lock:
            self.operations += 1
            self._outcome.operations += 1
            if trouble:
                self._outcome.troubles[trouble] += 1

    def _act(self, space: Space, random: Random) -> None:
        chain, pages = random.choice(self._chains), random.randint(1, CHAIN_PAGES)
        keys = chain_keys(space, chain, pages)
        match random.randrange(6):
            case 0 | 1:
                space.put(keys, [page_of(key) for key in keys])
            case 2 | 3:
                self._put_durably(space, chain, keys)
            case 4:
                out = [np.empty(PAGE_BYTES, dtype=np.uint8) for _ in keys]
                got = space.get(keys, out=out)
                self._judge(keys, out[:got], f"chain {chain} under load")
            case _:
                if space.lookup(keys).pages > len(keys):
                    self.found.append("a lookup found more pages than there are")

    def _put_durably(self, space: Space, chain: int, keys: PrefixKeys) -> None:
        with self._lock:
            self.waiting += 1
        try:
            space.put(keys, [page_of(key) for key in keys], durable=True)
        finally:
            with self._lock:
                self.waiting -= 1
        with self._lock:
            self.acknowledged[chain] = max(self.acknowledged.get(chain, 0), len(keys))
            self._outcome.acknowledged += len(keys)

    def _judge(self, keys: PrefixKeys, pages: list[npt.NDArray[np.uint8]], where: str) -> None:
        wrong = wrong_pages(keys, pages)
        with self._lock:
            self._outcome.compared += len(pages)
        if wrong:
            self.found.append(f"wrong bytes: pages {wrong} of {where}")


class CrashRun:
    """Lives of one daemon, each ended by SIGKILL at a point that the seed chooses.

    Args:
        folder: folder for all files.
        seed: decides the operations and the points of kills; thread timing still varies.
        sync: ``interval`` or ``always``.
        say: called with lines of progress.
    """

    def __init__(self, folder: Path, seed: int, sync: str, say: Say = lambda _line: None) -> None:
        self.outcome = CrashOutcome()
        self._folder = folder
        self._seed = seed
        self._random = Random(f"{seed} {sync}")
        self._sync = sync
        self._say = say
        self._tight = False
        self._acknowledged: dict[int, int] = {}

    def run(self, kills: int) -> CrashOutcome:
        """Kill the daemon repeatedly, and verify the pages after each start.

        Raises:
            CrashFound: an acknowledged page is lost, a byte is wrong, the daemon does not restart,
                or it leaves files or descriptors behind.
        """
        for life in range(kills):
            if life % LIVES_OF_A_DIRECTORY == 0:
                self._begin_anew(tight=life // LIVES_OF_A_DIRECTORY % 3 == 2)
            if self._random.random() < 0.15:
                self._kill_a_start()
            with self._started() as server:
                self._verify(server, everything=False)
                self._live(server, range(life * CHAINS, (life + 1) * CHAINS))
            self._say(
                f"crash seed {self._seed} {self._sync}: kill {life + 1}/{kills},"
                f" {self.outcome.acknowledged} pages acknowledged,"
                f" {self.outcome.verified} verified"
            )
        with self._started() as server:
            self._verify(server, everything=True)
            if server.stop():
                raise CrashFound(f"the daemon ended with {server.status}\n{server.errors}")
        return self.outcome

    def _begin_anew(self, *, tight: bool) -> None:
        """Empty the directory; a tight one is so small that its segments are reclaimed."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self._acknowledged.clear()
        self._tight = tight

    @property
    def _directory(self) -> Path:
        return self._folder / "ssd"

    def _settings(self) -> dict[str, object]:
        return {
            "node.name": f"crash-{self._seed}-{self._sync}",
            "socket.path": self._folder / "kv.sock",
            "host.capacity_bytes": 8 * MIB,
            "host.extent_bytes": MIB,
            "host.prefault": "false",
            "events.endpoint": "",
            "events.replay_endpoint": "",
            "ssd.directories": self._directory,
            "ssd.capacity_bytes": TIGHT_BYTES if self._tight else ROOMY_BYTES,
            "ssd.segment_bytes": MIB,
            "ssd.sync": self._sync,
            "ssd.sync_interval_s": 0.03,
            "ssd.write": self._random.choice(("back", "through", "selective")),
            "ssd.admission": "all",
        }

    def _started(self) -> Server:
        server = Server(self._folder, self._settings())
        try:
            server.wait_ready()
        except ServerError as error:
            server.kill()
            raise CrashFound(str(error)) from error
        return server

    def _kill_a_start(self) -> None:
        """Kill a daemon while it recovers its directory."""
        with Server(self._folder, self._settings()) as server:
            directory = str(self._directory)

            def has_begun() -> bool:
                try:
                    return any(name.startswith(directory) for name in server.open_files())
                except OSError:
                    return server.ended

            wait_for(has_begun, WAIT_S)
            server.kill()
        self.outcome.kills_of_starts += 1

    # ---- under load -------------------------------------------------------------------------

    def _live(self, server: Server, chains: range) -> None:
        load = CrashLoad(server.address, f"{self._seed} {chains.start}", chains, self.outcome)
        try:
            reached, point = self._point(load)
            if not wait_for(lambda: reached() or load.found or server.ended, WAIT_S):
                load.found.append(f"the daemon stands still: {point} was never reached")
            if server.ended:
                load.found.append(f"the daemon ended by itself ({server.status})\n{server.errors}")
        finally:
            server.kill()
            load.end()
        self._refuse(load.found, server)
        self.outcome.kills += 1
        self.outcome.kills_by_point[point] += 1
        self._acknowledged |= load.acknowledged

    def _point(self, load: CrashLoad) -> tuple[Callable[[], bool], str]:
        """When to kill: a condition, and its name."""
        least = self._random.randint(1, OPERATIONS_MAX)
        segments = len(self._segments()) + self._random.randint(1, 3)

        def enough() -> bool:
            return load.operations >= least

        match self._random.randrange(4):
            case 0:
                return enough, "operation"
            case 1:
                return lambda: enough() and load.waiting > 0, "durable put"
            case 2:
                return lambda: enough() and bool(load.acknowledged), "acknowledgement"
        if self._tight:
            return enough, "operation"
        return lambda: len(self._segments()) >= segments or load.operations > 500, "new segment"

    def _segments(self) -> list[str]:
        with suppress(OSError):
            return [path.name for path in self._directory.iterdir() if path.suffix == ".kvlog"]
        return []

    # ---- after a restart --------------------------------------------------------------------

    def _verify(self, server: Server, *, everything: bool) -> None:
        """Acknowledged pages are there; no byte is wrong; no files are left over."""
        self._look_for_leftovers(server)
        self.outcome.recovered += server.get("/v1/stats")["pages"]
        chains = sorted(self._acknowledged)
        if not everything:
            older = chains[: -2 * CHAINS]
            chains = chains[-2 * CHAINS :] + self._random.sample(older, min(len(older), CHAINS))
        found: list[str] = []
        with KVStore.connect(server.address, name="crash-verify", timeout_s=TIMEOUT_S) as store:
            space = open_space(store)
            for chain in chains:
                found += self._verify_chain(space, chain)
        counts = server.get("/v1/stats")["counts"]
        if not self._tight and counts.get("reclaimed_pages"):
            found.append("pages were reclaimed although there is room: the run proves nothing")
        self._refuse(found, server)

    def _verify_chain(self, space: Space, chain: int) -> list[str]:
        keys, least = chain_keys(space, chain), self._acknowledged[chain]
        out = [np.empty(PAGE_BYTES, dtype=np.uint8) for _ in keys]
        got = space.get(keys, out=out)
        self.outcome.compared += got
        wrong = wrong_pages(keys, out[:got])
        if wrong:
            return [f"wrong bytes: pages {wrong} of chain {chain}"]
        if got < least and not self._tight:
            hit = space.lookup(keys)
            return [f"chain {chain}: {got} pages of {least} acknowledged ones; lookup {hit}"]
        self.outcome.verified += min(got, least)
        return []

    def _look_for_leftovers(self, server: Server) -> None:
        names = [path.name for path in self._directory.iterdir()]
        found = [f"left over: {name}" for name in names if not _KNOWN_FILES.fullmatch(name)]
        files = [name for name in server.open_files() if name.startswith(str(self._directory))]
        found += [f"open, but deleted: {name}" for name in files if name.endswith("(deleted)")]
        self._refuse(found, server)

    def _refuse(self, found: list[str], server: Server) -> None:
        if "Traceback" in server.errors:
            found = [*found, "the daemon logged a traceback"]
        if found:
            raise CrashFound(
                f"seed {self._seed} {self._sync}, after {self.outcome.kills} kills:\n"
                + "\n".join(found)
                + f"\n--- the end of the daemon's log\n{server.errors[-4000:]}"
            )
