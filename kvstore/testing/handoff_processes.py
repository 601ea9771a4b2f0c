"""The processes of simulated handoffs, which are stopped and killed, and what has happened."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvstore.handoff.states import HandoffProgress
from kvstore.testing.timeline import Timeline

SECOND: Final = 1_000_000_000


@dataclass
class HandoffOutcome:
    """Counts of a run; tests assert that each of these has occurred.

    Attributes:
        succeeded_states: of the requests that succeeded requests, those with state data.
        given_up: how often decode closed a link for blocks in LIMBO.
        hung: how often a job of prefill took seconds to begin.
        alone: how often one rank among several was stopped or killed.
    """

    requests: int = 0
    refused: int = 0
    succeeded: int = 0
    succeeded_states: int = 0
    decode_failed: int = 0
    prefill_failed: int = 0
    aborted: int = 0
    limbo: int = 0
    landed_late: int = 0
    lost: int = 0
    flipped: int = 0
    reused: int = 0
    misplaced: int = 0
    links: int = 0
    links_closed: int = 0
    given_up: int = 0
    hung: int = 0
    killed: int = 0
    stopped: int = 0
    alone: int = 0
    partitions: int = 0
    registry_away: int = 0
    registry_late: int = 0
    registrations_refused: int = 0
    wrong_prompt: int = 0


class HandoffProcess:
    """A process that can be suspended and killed: its work then waits, or never happens.

    Args:
        time: the simulated time.
        name: of an engine; of a rank the name of its engine, a dot and its number.
    """

    def __init__(self, time: Timeline, name: str) -> None:
        self.time = time
        self.name = name
        self.engine_name = name.partition(".")[0]
        self.dead = False
        self._stopped_ns = 0  # until when
        self._pauses: list[tuple[int, int]] = []

    def do(self, call: Callable[[], None]) -> None:
        """Do something now, or when it goes on."""
        if self.dead:
            return
        if self.time.now_ns < self._stopped_ns:
            self.time.at(self._stopped_ns - self.time.now_ns, lambda: self.do(call))
        else:
            call()

    def stop(self, for_ns: int) -> None:
        """Stop it for a time."""
        self._pauses.append((self.time.now_ns, self.time.now_ns + for_ns))
        self._stopped_ns = max(self._stopped_ns, self.time.now_ns + for_ns)

    def kill(self) -> None:
        """End it at once."""
        self.dead = True

    @property
    def is_stopped(self) -> bool:
        """Whether it stands now."""
        return self.time.now_ns < self._stopped_ns

    def check_time(self, progress: HandoffProgress, opened_ns: int, longest_ns: int) -> None:
        """Assert that a handoff has ended in time, not counting what its process stood."""
        stood_ns = sum(
            stop - max(start, opened_ns) for start, stop in self._pauses if stop > opened_ns
        )
        if not progress.ended:
            took_ns = self.time.now_ns - opened_ns - stood_ns
            assert took_ns < longest_ns, "a handoff outlasts its deadline"
