"""A disk whose power fails during a call, and an SSD log that runs jobs in any order."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

from kvstore.state.disk.jobs import DiskJob, DiskSync
from kvstore.state.tree.slots import Replacement
from kvstore.testing.disk import SimulatedDisk
from kvstore.tier.base import Completion
from kvstore.tier.directories import Directory
from kvstore.tier.disk import Buffer
from kvstore.tier.host import MEMORY_WAIT_S, HostMemory
from kvstore.tier.ssd import SSDLog


class PowerCut(Exception):
    """The power has failed during this call of the disk."""


class FailingPower(SimulatedDisk):
    """A disk whose power fails after a number of calls that change it.

    Attributes:
        calls_left: number of calls until then; None = it does not fail.
    """

    calls_left: int | None = None

    def _spend(self) -> None:
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left < 0:
                raise PowerCut

    def create(self, path: Path, size_bytes: int, *, direct: bool) -> int:
        """See :class:`~kvstore.tier.disk.Disk`."""
        self._spend()
        return super().create(path, size_bytes, direct=direct)

    def write(self, descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
        """See :class:`~kvstore.tier.disk.Disk`; can fail before and after the write."""
        self._spend()
        written = super().write(descriptor, buffers, offset)
        self._spend()
        return written

    def sync(self, descriptor: int) -> None:
        """See :class:`~kvstore.tier.disk.Disk`."""
        self._spend()
        super().sync(descriptor)

    def remove(self, path: Path) -> None:
        """See :class:`~kvstore.tier.disk.Disk`."""
        self._spend()
        super().remove(path)

    def sync_directory(self, path: Path) -> None:
        """See :class:`~kvstore.tier.disk.Disk`."""
        self._spend()
        super().sync_directory(path)

    def write_file(self, path: Path, content: bytes) -> None:
        """See :class:`~kvstore.tier.disk.Disk`."""
        self._spend()
        super().write_file(path, content)


class UnorderedLog(SSDLog):
    """An SSD log whose jobs run in any order, and whose completions are late.

    Sequence numbers have the order of submission, as in any log. A sync covers what was written
    before its submission, so it runs at once or later.
    """

    def __init__(
        self, random: Random, directory: Directory, segment_bytes: int, disk: SimulatedDisk
    ) -> None:
        """Open the log of the node ``node`` on a simulated disk."""
        super().__init__("node", [directory], segment_bytes, threads=0, disk=disk)
        self._dice = random
        self._late: list[Completion] = []

    def submit(self, jobs: Sequence[DiskJob]) -> None:
        """Submit jobs in short runs; adjacent records of a run are written in one call."""
        left = list(jobs)
        while left:
            run = self._dice.choice((1, 1, 2, 4))
            super().submit(left[:run])
            del left[:run]
            if isinstance(self._queue[-1].jobs[0], DiskSync) and self._dice.random() < 0.5:
                self._run_one(len(self._queue) - 1)

    def poll(self) -> list[Completion]:
        """Run some jobs; return some completions."""
        while self._queue and self._dice.random() < 0.6:
            self._run_one(self._dice.randrange(len(self._queue)))
        self._dice.shuffle(self._late)
        count = self._dice.randint(0, len(self._late))
        now, self._late = self._late[:count], self._late[count:]
        return now

    def _run_one(self, index: int) -> None:
        """Run one piece of work out of order."""
        work = self._queue[index]
        del self._queue[index]
        self._do(work, self._movers[0])
        ended, self._completions = self._completions, []
        self._late += ended


class WaitedMemory:
    """Real memory; replacing it waits until the new memory exists.

    Args:
        memory: the node's memory.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory

    def replace(self, replaced: list[Replacement]) -> None:
        """See :class:`~kvstore.node.desk.Memory`."""
        made = [one.new for one in replaced]
        self._memory.replace(replaced)
        assert all(self._memory.wait(number, MEMORY_WAIT_S) for number in made)
