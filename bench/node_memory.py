"""What the memory of a process grows by for each page that a node knows of.

Each figure is that of a process of its own, in which nothing else has happened.
"""

import ctypes
import gc
import os
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from bench.node_alone import Clock, Engine, LoneNode
from kvstore.protocol.page import KEY_BYTES

PAGES: Final = 1_000_000
RUN_PAGES: Final = 32
SMALL_PART: Final = 64
"""Of a node whose pages are on disk, this part of them has memory at a time."""
SMALL_PAGES_MIN: Final = 2048
WAIT_S: Final = 7200.0
PLACES: Final = ("host", "ssd", "loaded")


class Growth(NamedTuple):
    """What was found.

    Attributes:
        pages: number of pages that the node knows of, at the end.
        on_disk: number of these pages that are in no memory.
        bytes: bytes by which the process has grown.
    """

    pages: int
    on_disk: int
    bytes: int


def names() -> list[str]:
    """All cases, without their policy."""
    return [f"{place}{tokens}" for place in PLACES for tokens in ("", "/tokens")]


def measure(name: str, pages: int, policy: str) -> Growth:
    """Measure one of :func:`names` in a process of its own."""
    place, _, tokens = name.partition("/")
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        asked = pool.apply_async(grow, (place, pages, policy), {"tokens": bool(tokens)})
        return asked.get(WAIT_S)


def grow(place: str, pages: int, policy: str, *, tokens: bool) -> Growth:
    """Put so many pages in runs of :data:`RUN_PAGES`, and look at what this process takes.

    Args:
        place: where they are in the end: in ``host`` memory, or on ``ssd``, all but a few;
            ``loaded`` is the same once each run was read from there.
        pages: how many.
        policy: of the node.
        tokens: they are put with the tokens they are of.
    """
    small = LoneNode(RUN_PAGES, policy, Clock(), ssd_pages=0)
    first = Engine(small, 1)
    for _ in range(2):
        first.put(small.keys(RUN_PAGES), tokens=tokens)
    random = Random(2)
    prompts = [random.randbytes(RUN_PAGES * KEY_BYTES) for _ in range(pages // RUN_PAGES)]
    before = resident_bytes()
    on_disk = place != "host"
    memory = max(SMALL_PAGES_MIN, pages // SMALL_PART) if on_disk else pages
    node = LoneNode(memory, policy, Clock(), ssd_pages=0 if on_disk else None)
    engine = Engine(node, 1)
    for keys in prompts:
        engine.put(keys, tokens=tokens)
    if place == "loaded":
        for keys in prompts:
            assert engine.load(keys) == RUN_PAGES
    grown = resident_bytes() - before
    stored = node.stored()
    return Growth(stored, stored - node.in_memory(), grown)


def resident_bytes() -> int:
    """What of this process is in memory, when it has given back what it does not need."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
