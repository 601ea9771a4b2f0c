"""The registries of simulated prefill instances: leases, late registrations, processes that end."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvstore.handoff.registry import RankRecord, RankTable
from kvstore.testing.handoff_processes import SECOND, HandoffOutcome, HandoffProcess
from kvstore.testing.timeline import Timeline

if TYPE_CHECKING:
    from kvstore.testing.handoff_engines import PrefillRank

LEASE_S: Final = 2.0
EVERY_NS: Final = SECOND // 2
"""Between two registrations of a rank of prefill."""
_LATE_NS: Final = 3 * SECOND


class RegistryProcess(HandoffProcess):
    """A registry in a process of its own, with the product's table."""

    def __init__(self, time: Timeline, name: str, outcome: HandoffOutcome) -> None:
        super().__init__(time, name)
        self._outcome = outcome
        self._table = RankTable()

    def register(self, record: RankRecord) -> None:
        """A registration has come, perhaps late or twice; check that only the last boot counts."""
        before = self.listed
        if self._table.register(record, self.time.now_ns):
            self._outcome.registrations_refused += 1
            assert self.listed == before, "a refused registration changes something"

    @property
    def listed(self) -> list[RankRecord]:
        """The ranks that are registered now; none if nobody answers."""
        if self.dead or self.is_stopped:
            return []
        return self._table.listed(self.time.now_ns)


def registering(
    prefill: "PrefillRank", count: int, find: Callable[[], RegistryProcess],
    chance: Callable[[], float],
) -> None:  # fmt: skip
    """Send a registration of a rank of prefill to whoever is its registry when it comes.

    Args:
        prefill: the rank.
        count: of its registrations.
        find: its registry.
        chance: draws from 0 to 1.
    """
    group, shape = prefill.group, prefill.memory.pool.shape
    record = RankRecord(
        group.rank, "127.0.0.1:9", prefill.boot.hex(), count, group.part.layers, group.part.heads,
        shape, "", ["tcp"], 1, LEASE_S, len(group.parts),
    )  # fmt: skip
    record.check()
    roll = chance()
    if roll < 0.05:
        return
    delays = [prefill.time.random.randrange(SECOND // 10)]
    if roll > 0.9:
        delays.append(prefill.time.random.randrange(_LATE_NS))
    for delay_ns in delays:
        prefill.time.at(delay_ns, lambda: find().do(lambda: find().register(record)))
