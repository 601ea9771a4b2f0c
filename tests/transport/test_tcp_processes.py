"""Goal: an owner that is stopped or killed costs its readers no more than their deadline."""

import signal
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.protocol.errors import PeerUnreachable, TransferTimeout
from kvstore.testing.transfer_pages import TransferPages
from kvstore.transport.tcp import TcpTransport

SIZE, COUNT, TICKET = 1 << 20, 4, b"t" * 16


@pytest.fixture
def owner(spawn):
    """A process that has pages, and where."""
    command = [sys.executable, "-m", "tests.transport.stopped_owner", str(SIZE), str(COUNT)]
    process = spawn(command, ready=r"serves at (\S+)")
    return process, process.ready[1]


def stop(process, wait_until):
    """Stop it, and wait until each of its threads has: the signal alone does not."""
    process.send_signal(signal.SIGSTOP)
    states = [*Path(f"/proc/{process.pid}/task").glob("*/stat")]
    wait_until(lambda: all(one.read_text().rpartition(")")[2].split()[0] == "T" for one in states))


def later(seconds):
    return time.monotonic_ns() + int(seconds * 1e9)


def end_of(reader, wait_until):
    found = []
    wait_until(lambda: found.extend(reader.poll()) or found)
    (end,) = found
    return end


@pytest.mark.parametrize("warm", [False, True])
def test_nothing_arrives_from_an_owner_that_goes_on_after_the_deadline(owner, wait_until, warm):
    process, endpoint = owner
    pages = TransferPages(SIZE, COUNT)
    with closing(TcpTransport("", 1 << 30)) as reader:
        if warm:  # over a connection that is there already
            reader.read(pages.transfer(0, endpoint, TICKET, later(20)))
            assert end_of(reader, wait_until).error is None
            pages.arrived[:] = 0
        stop(process, wait_until)
        deadline_ns = later(0.3)
        reader.read(pages.transfer(1, endpoint, TICKET, deadline_ns))

        end = end_of(reader, wait_until)

        assert isinstance(end.error, TransferTimeout), end
        assert (end.good, end.settled) == (bytes(COUNT), True)
        assert time.monotonic_ns() >= deadline_ns
        process.send_signal(signal.SIGCONT)
        others = TransferPages(SIZE, COUNT)
        reader.read(others.transfer(2, endpoint, TICKET, later(20)))
        assert end_of(reader, wait_until).error is None, "it goes on, and so do we"
        assert pages.untouched, "bytes arrived after the transfer was settled"


def test_a_killed_owner_is_an_end_long_before_the_deadline(owner, wait_until):
    process, endpoint = owner
    pages = TransferPages(SIZE, COUNT)
    with closing(TcpTransport("", 1 << 30)) as reader:
        stop(process, wait_until)
        reader.read(pages.transfer(1, endpoint, TICKET, later(50)))
        wait_until(lambda: reader.stats().get("connects"))
        process.kill()

        end = end_of(reader, wait_until)

    assert isinstance(end.error, PeerUnreachable), end
    assert end.good == bytes(COUNT)
