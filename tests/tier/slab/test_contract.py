"""Goal: every tier keeps the one contract: host memory, the log on disk, the device slab."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore.state.tree.places import HEADER_BYTES, Place
from kvstore.testing.contract import Holder, HostHolder, LogHolder, SlabHolder, TierContract
from kvstore.testing.disk import DiskFault, FaultyDisk, SimulatedDisk
from kvstore.tier.directories import Directory
from kvstore.tier.disk import OSDisk
from kvstore.tier.record import segment_name
from kvstore.tier.slab import DeviceSlab
from kvstore.tier.ssd import SSDLog


def open_log(home: Path, disk: FaultyDisk, edit: Callable[[Path, int], None]) -> Holder:
    log = SSDLog("n", [Directory(home, 1 << 24)], 256 << 10, threads=2, disk=disk)
    log.recover()

    def damage(place: Place) -> None:
        edit(home / segment_name(place.segment), place.offset + HEADER_BYTES + 77)

    def fill() -> None:
        for call in ("create", "write"):
            disk.arm(call, DiskFault.FULL, times=1000)

    return LogHolder(log, damage, fill)


def edit_file(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def open_slab() -> Holder:
    slab = DeviceSlab("cpu", 512 << 10)

    def damage(pages, keys):
        held = slab._pin(pages, keys)
        ctypes.c_ubyte.from_address(int(slab._addresses(held.slots)[0]) + 77).value ^= 4
        slab._unpin(held)

    return SlabHolder(slab, damage)


@pytest.fixture(params=["host", "log", "simulated log", "slab"])
def contract(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TierContract]:
    with ExitStack() as stack:

        def opened() -> Holder:
            match request.param:
                case "host":
                    holder: Holder = HostHolder(4 << 20)
                case "log":
                    holder = open_log(tmp_path / "log", FaultyDisk(OSDisk()), edit_file)
                case "simulated log":
                    disk = SimulatedDisk()

                    def edit(path: Path, offset: int) -> None:
                        def flip(content: bytearray) -> None:
                            content[offset] ^= 4

                        disk.change(path, flip)

                    holder = open_log(Path("/log"), FaultyDisk(disk), edit)
                case _:
                    holder = open_slab()
            stack.callback(holder.close)
            return holder

        yield TierContract(opened)


@pytest.mark.parametrize("check", TierContract.CHECKS)
def test_every_tier_keeps_the_contract(check, contract):
    getattr(contract, check)()


class Liar(SlabHolder):
    """A tier that breaks the contract in one way."""

    def __init__(self, lie: str) -> None:
        holder = open_slab()
        super().__init__(holder._slab, holder._damage)
        self.lie = lie
        self.last = b""

    def write(self, pages):
        ended = super().write(pages)
        return [None] * len(ended) if self.lie == "never full" else ended

    def read(self, page):
        error, found = super().read(page)
        if self.lie == "other bytes" and found:
            return None, bytes([found[0] ^ 1]) + found[1:]
        if self.lie == "any page" and error is not None:
            return None, self.last
        self.last = found
        return error, found


@pytest.mark.parametrize(
    ("lie", "caught"),
    [
        ("other bytes", "check_pages_come_back_byte_for_byte"),
        ("any page", "check_a_page_is_given_out_only_under_its_own_name"),
        ("any page", "check_wrong_bytes_are_never_given_out"),
        ("never full", "check_a_full_tier_says_so_and_keeps_what_it_has"),
    ],
)
def test_the_contract_catches_a_tier_that_lies(lie, caught):
    with pytest.raises(AssertionError):
        getattr(TierContract(lambda: Liar(lie)), caught)()
