"""An engine that looks up continuously, and measures how long its node lets it wait.

Run as ``python -m kvstore.testing.lookups ADDRESS PID``: it stores a prompt, prints ``ready``,
looks it up every two milliseconds until its standard input closes, and prints its measurements as
JSON.

On a machine with few cores processes wait for the CPU. The time for which the node's loop or this
process was runnable but did not run (``schedstat``) is not the node's fault, and is subtracted.
"""

import os
import select
import socket
import sys
import threading
from dataclasses import asdict, dataclass, field
from json import dumps
from pathlib import Path
from time import perf_counter
from typing import Final, NamedTuple

from kvstore.protocol import wire
from kvstore.protocol.errors import CapacityError
from kvstore.protocol.page import KEY_BYTES, CanonicalLayout, ShardSpec, SpaceIdentity, page_keys
from kvstore.state.tree.actions import PageStatus

PAGES: Final = 1000
"""Fewer than leave an extent in one turn, so that an eviction frees the extent at once."""
PAUSE_S: Final = 0.002
_PAGE_TOKENS: Final = 64
_STRETCH_BYTES: Final = 256 * KEY_BYTES
_TIMEOUT_S: Final = 30.0
_TRIES_MAX: Final = 100
_SLOTS_MS: Final = 1000
_GRANTED, _EXISTS = PageStatus.GRANTED, PageStatus.EXISTS
_never: Final = threading.Event()


@dataclass
class Waits:
    """Measurements of one engine.

    Attributes:
        lookups: number of lookups.
        misses: number of lookups without a hit of all pages.
        half_s: median duration.
        worst_s: longest duration, without time waiting for the CPU.
        stalls_s: durations of more than 5 ms, corrected in the same way; the longest first.
    """

    lookups: int = 0
    misses: int = 0
    half_s: float = 0.0
    worst_s: float = 0.0
    stalls_s: list[float] = field(default_factory=list)


class WireClient:
    """A connection to a node's socket that sends bare messages, and moves no bytes of pages.

    Args:
        address: address of the socket.
        name: of the engine that it says it is.

    Attributes:
        space: number of a space of its own, with one shard, number 0.
    """

    def __init__(self, address: str, name: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_TIMEOUT_S)
        self._socket.connect(address.removeprefix("unix://"))
        self._reader = wire.FrameReader()
        self.ask(wire.Hello(1, wire.PROTOCOL_MAJOR, 2, name))
        identity = SpaceIdentity(
            model=f"{name}-{os.getpid()}", kv_dtype="uint8", page_tokens=_PAGE_TOKENS
        )
        shard = ShardSpec(layout=CanonicalLayout(head_dim=32), layers=(0, 1), heads=(0, 1))
        opened = self.ask(wire.OpenSpace(2, identity, [shard]))
        assert isinstance(opened, wire.SpaceOpened), opened
        self.space = opened.space

    def put(self, keys: bytes, parent: bytes = b"") -> None:
        """Store pages without writing their bytes.

        Args:
            keys: of the pages, packed.
            parent: key before the first one; empty = they begin a chain.

        Raises:
            CapacityError: there are no slots for them.
        """
        for _ in range(_TRIES_MAX):  # while memory is being created, it gets a part of the slots
            request = wire.BeginPut(3, 1, self.space, 0, keys, parent, wait_ms=_SLOTS_MS)
            granted = self.ask(request)
            assert isinstance(granted, wire.PutGranted), granted
            statuses = granted.statuses
            pages = statuses.count(_GRANTED)
            if pages:
                self.ask(wire.CommitPut(4, 1, b"d" * 16 * pages))
            there = (pages + statuses.count(_EXISTS)) * KEY_BYTES
            keys, parent = keys[there:], keys[there - KEY_BYTES : there] if there else parent
            if not keys:
                return
        raise CapacityError(f"the node has no room for {len(keys) // KEY_BYTES} pages")

    def close(self) -> None:
        """Disconnect."""
        self._socket.close()

    def ask(self, request: wire.Request) -> wire.Answer:
        """Send a request, and wait for its answer."""
        self._socket.sendall(wire.encode(request))
        while True:
            bodies = self._reader.feed(self._socket.recv(1 << 16))
            if bodies:
                return wire.decode_answer(bodies[0])


class Looked(NamedTuple):
    """One lookup.

    Attributes:
        took_s: its duration.
        waited_s: the part of it in which the node's loop or this process waited for the CPU.
        hit: whether all pages were hits.
    """

    took_s: float
    waited_s: float
    hit: bool

    @property
    def seconds(self) -> float:
        """Its duration without the wait for the CPU."""
        return max(0.0, self.took_s - self.waited_s)


class Engine:
    """An engine that stores one prompt, and looks it up.

    Args:
        address: address of the node's socket.
        pid: process id of the node.
        pages: number of pages of the prompt.
    """

    def __init__(self, address: str, pid: int, pages: int = PAGES) -> None:
        self._waited = [Path(f"/proc/{one}/schedstat") for one in (pid, os.getpid())]
        self._client = WireClient(address, "lookups")
        self._pages = pages
        self._keys = page_keys(range(_PAGE_TOKENS * pages), _PAGE_TOKENS).packed
        self.put()

    def put(self) -> None:
        """Store the prompt, a part at a time."""
        parent = b""
        for start in range(0, len(self._keys), _STRETCH_BYTES):
            keys = self._keys[start : start + _STRETCH_BYTES]
            self._client.put(keys, parent)
            parent = keys[-KEY_BYTES:]

    def lookup(self) -> Looked:
        """Look the whole prompt up."""
        before = self._waited_s()
        begun = perf_counter()
        found = self._client.ask(wire.Lookup(5, self._client.space, [0], self._keys))
        took = perf_counter() - begun
        assert isinstance(found, wire.Found), found
        return Looked(took, self._waited_s() - before, found.pages == self._pages)

    def close(self) -> None:
        """Disconnect."""
        self._client.close()

    def _waited_s(self) -> float:
        return sum(int(path.read_text().split()[1]) for path in self._waited) / 1e9


def run(address: str, pid: int) -> Waits:
    """Look up until standard input closes."""
    engine = Engine(address, pid)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    waits, taken = Waits(), list[float]()
    while not select.select([sys.stdin], [], [], 0)[0]:
        looked = engine.lookup()
        taken.append(looked.seconds)
        waits.misses += not looked.hit
        _never.wait(PAUSE_S)
    engine.close()
    taken.sort()
    waits.lookups, waits.half_s, waits.worst_s = len(taken), taken[len(taken) // 2], taken[-1]
    waits.stalls_s = [one for one in reversed(taken) if one > 0.005][:100]
    return waits


if __name__ == "__main__":
    sys.stdout.write(dumps(asdict(run(sys.argv[1], int(sys.argv[2])))) + "\n")
