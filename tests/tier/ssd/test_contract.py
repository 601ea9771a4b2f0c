"""The SSD log keeps what a log must keep, on every kind of disk."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore.state.tree.places import HEADER_BYTES, Place
from kvstore.testing.disk import FaultyDisk, SimulatedDisk
from kvstore.testing.tiers import LogContract
from kvstore.tier.directories import Directory
from kvstore.tier.disk import OSDisk
from kvstore.tier.record import segment_name
from kvstore.tier.ssd import SSDLog

SEGMENT_BYTES = 256 << 10


class BufferedDisk(OSDisk):
    """This machine's disk where the file system takes no direct I/O."""

    def takes_direct_io(self, path: Path) -> bool:
        return False


def real(path: Path, disk: OSDisk, threads: int, stack: ExitStack) -> LogContract:
    def open_tier() -> SSDLog:
        log = SSDLog("n", [Directory(path, 1 << 24)], SEGMENT_BYTES, threads=threads, disk=disk)
        stack.callback(log.close)
        log.recover()
        return log

    def damage(place: Place) -> None:
        with (path / segment_name(place.segment)).open("r+b") as file:
            file.seek(place.offset + HEADER_BYTES + 77)
            byte = file.read(1)[0]
            file.seek(place.offset + HEADER_BYTES + 77)
            file.write(bytes([byte ^ 4]))
            file.flush()
            os.fsync(file.fileno())

    return LogContract(open_tier, damage)


def simulated(stack: ExitStack, *, faulty: bool) -> LogContract:
    disk = SimulatedDisk()
    home = Path("/log")

    def open_tier() -> SSDLog:
        surface = FaultyDisk(disk) if faulty else disk
        log = SSDLog("n", [Directory(home, 1 << 24)], SEGMENT_BYTES, threads=0, disk=surface)
        stack.callback(log.close)
        log.recover()
        return log

    def damage(place: Place) -> None:
        def edit(content: bytearray) -> None:
            content[place.offset + HEADER_BYTES + 77] ^= 4

        disk.change(home / segment_name(place.segment), edit)

    return LogContract(open_tier, damage)


@pytest.fixture(params=["direct", "buffered", "one thread", "by hand", "simulated", "faulty"])
def contract(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LogContract]:
    with ExitStack() as stack:
        match request.param:
            case "buffered":
                yield real(tmp_path / "log", BufferedDisk(), 3, stack)
            case "simulated" | "faulty":
                yield simulated(stack, faulty=request.param == "faulty")
            case kind:
                threads = {"direct": 4, "one thread": 1, "by hand": 0}[kind]
                yield real(tmp_path / "log", OSDisk(), threads, stack)


@pytest.mark.parametrize("check", LogContract.CHECKS)
def test_the_log_keeps_the_contract_of_a_log(check, contract):
    getattr(contract, check)()
