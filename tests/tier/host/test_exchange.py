"""One client that holds an extent's file up stops nobody else."""

import ctypes
import os
import threading
from pathlib import Path
from time import perf_counter

import pytest

from kvstore.protocol.errors import CapacityError
from kvstore.tier.host import MEMORY_WAIT_S
from tests.client.conftest import READY, Daemon, arguments, content, new_keys, open_space
from tests.faulted import FaultedMemory

EXTENT = "4MiB"
EXTENT_BYTES = 4 << 20
PAGES = 4
ANSWER_S_MAX = 5.0


@pytest.fixture
def daemon(spawn, tmp_path) -> Daemon:
    """A node with one extent, which all tenants share by turns."""
    command = arguments(
        tmp_path / "own.sock", host__capacity_bytes=EXTENT, host__extent_bytes=EXTENT,
        host__prefault="false",
    )  # fmt: skip
    return Daemon(spawn(command, ready=READY))


def extent_of(pid: int) -> int:
    """A descriptor of the node's one extent, as a client that puts has it."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if str(link.readlink()).startswith("/memfd:kvstore:"):
            return os.open(link, os.O_RDWR)
    raise AssertionError("the node has no memory")


def test_whoever_holds_an_extents_file_up_stops_neither_the_node_nor_its_next_tenant(
    daemon, wait_until
):
    """A write from memory that has to be faulted in keeps the file's lock until it is."""
    with daemon.connect() as first, daemon.connect() as second:
        ours = open_space(first, tenant="first")
        ours.put(new_keys(ours, PAGES), content(PAGES, ours.page_bytes[0]))
        descriptor, gate = extent_of(daemon.process.pid), threading.Event()
        libc = ctypes.CDLL(None)
        with FaultedMemory(bytes(8192), gate) as memory:
            write = threading.Thread(
                target=libc.write, args=(descriptor, ctypes.c_void_p(memory.address), 4096)
            )
            write.start()
            wait_until(lambda: Path(f"/proc/{os.getpid()}/task/{write.native_id}/syscall")
                       .read_text().startswith("1 "), what="it holds the lock")  # fmt: skip
            theirs = open_space(second, tenant="second")
            keys, pages = new_keys(theirs, PAGES), content(PAGES, theirs.page_bytes[0])
            begun = perf_counter()
            with pytest.raises(CapacityError, match="no memory now"):
                theirs.put(keys, pages)
            assert perf_counter() - begun < MEMORY_WAIT_S + ANSWER_S_MAX
            begun = perf_counter()
            assert second.stats()["missing_bytes"] == EXTENT_BYTES
            assert theirs.lookup(keys).pages == 0
            assert perf_counter() - begun < ANSWER_S_MAX, "the node answers meanwhile"

            gate.set()
            write.join()
        os.close(descriptor)
        wait_until(lambda: second.stats()["missing_bytes"] == 0)
        assert theirs.put(keys, pages).stored == PAGES
        out = content(PAGES, theirs.page_bytes[0])
        assert theirs.get(keys, out) == PAGES
        assert [bytes(one) for one in out] == [bytes(page) for page in pages]
