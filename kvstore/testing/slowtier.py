"""What stands for the SSD tier in a simulation of a node: slow, failing, forgetful of bits."""

from functools import partial
from typing import TYPE_CHECKING, Final

from kvstore.errors import KVStoreError, PageCorrupt, TierUnavailable
from kvstore.state import diskjobs
from kvstore.state.admission import Admission
from kvstore.state.disk import DiskPages
from kvstore.state.diskjobs import DiskJob, DiskRules
from kvstore.state.log import Place, SegmentLog
from kvstore.state.slots import Slot

if TYPE_CHECKING:
    from kvstore.testing.simulation import Simulation

PAGE_BYTES: Final = 4096
SEGMENT_BYTES: Final = 32 * PAGE_BYTES
SEGMENTS: Final = 8
DELAY_NS_MAX: Final = 4_000_000


class SimulatedTier:
    """What stands for the SSD tier: every job takes a while, some fail, some bytes flip.

    Attributes:
        records: what was written where.
    """

    def __init__(self, simulation: "Simulation", rules: DiskRules) -> None:
        """Give the simulation's node a disk."""
        self.records: dict[Place, bytes] = {}
        self._simulation = simulation
        pages = simulation.node.pages
        log = SegmentLog(SEGMENTS, SEGMENT_BYTES)
        self.pages = pages.disk = DiskPages(
            pages, log, Admission("all", 0, log.capacity_bytes), rules
        )

    def take_jobs(self) -> None:
        """Begin what the node asked for."""
        jobs, self.pages.jobs = self.pages.jobs, []
        for job in jobs:
            delay_ns = self._simulation.random.randrange(DELAY_NS_MAX)
            self._simulation.at(delay_ns, partial(self._end, job))

    def _end(self, job: DiskJob) -> None:
        simulation = self._simulation
        error: KVStoreError | None = None
        if simulation.random.random() < simulation.faults.disk:
            error = TierUnavailable("simulated")
            simulation.outcome.disk_failures += 1
        else:
            error = self._carry_out(job)
        simulation.node.disk_completed(job.job, error, simulation.now_ns)

    def _carry_out(self, job: DiskJob) -> KVStoreError | None:
        match job:
            case diskjobs.DiskWrite(place=place, page=(node, _, _, _), slot=slot):
                content = bytes(self._memory(slot))
                if content != _content(node.key):
                    return PageCorrupt("simulated")
                self.records[place] = content
            case diskjobs.DiskRead(place=place, page=(node, _, _, _), slot=slot):
                return self._read(place, self._memory(slot), _content(node.key))
            case diskjobs.DiskCopy(source=source, place=place, page=(node, _, _, _)):
                content = self.records[source]
                if content != _content(node.key):
                    return PageCorrupt("simulated")
                self.records[place] = content
            case diskjobs.DiskDrop(segment=segment):
                for place in [at for at in self.records if at.segment == segment]:
                    del self.records[place]
            case _:
                pass
        return None

    def _read(self, place: Place, memory: memoryview, expected: bytes) -> KVStoreError | None:
        simulation = self._simulation
        content = self.records[place]
        memory[:] = content
        if simulation.random.random() < simulation.faults.flip:
            memory[simulation.random.randrange(PAGE_BYTES)] ^= 1
        if memory != expected:
            return PageCorrupt("simulated")
        simulation.outcome.pages_from_disk += 1
        return None

    def _memory(self, slot: Slot) -> memoryview:
        simulation = self._simulation
        number, _, offset = simulation.node.pages.slots.address(slot)
        return memoryview(simulation.memory[number])[offset : offset + PAGE_BYTES]


def _content(key: bytes) -> bytes:
    """See :func:`kvstore.testing.simulation.page_content`."""
    return key * (PAGE_BYTES // len(key))
