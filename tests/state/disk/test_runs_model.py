"""Goal: whatever is stored, split, evicted, reclaimed and found again, no page is another's.

See :mod:`tests.state.disk.run_histories`.
"""

import traceback
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvstore.protocol.errors import KVStoreError
from kvstore.state.disk.jobs import DiskCopy, DiskRead, DiskTombstone, DiskWrite
from kvstore.state.table import residents
from tests.state.disk.run_histories import DRAWN, History, Slow

STEPS = 150
CUTS_MAX = 400
"""Histories that are tried to find the steps that a failure needs."""


class Case(NamedTuple):
    """A history to be played.

    Attributes:
        write: when pages are written to disk.
        in_flight_max: bytes that may be on their way there.
        slow: jobs of this kind end only with all others.
        at_once: as :data:`~kvstore.state.table.residents.DROP_AT_ONCE`.
        steps: actions, each with the seed of its choices.
    """

    write: str
    in_flight_max: int
    slow: Slow
    at_once: int
    steps: list[tuple[str, int]]

    def play(self) -> None:
        """Do all steps.

        Raises:
            AssertionError, KVStoreError: the page table and the model differ.
        """
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(residents, "DROP_AT_ONCE", self.at_once)
            history = History(self.write, self.in_flight_max, self.slow)
            for action, seed in self.steps:
                history.act(action, Random(seed))

    def shortened(self, error: Exception) -> "Case":
        """A history of fewer steps that fails in the same way."""
        case, tries, size = self, 0, len(self.steps) // 2
        while size and tries < CUTS_MAX:
            at = 0
            while at < len(case.steps) and tries < CUTS_MAX:
                tries += 1
                shorter = case._replace(steps=case.steps[:at] + case.steps[at + size :])
                try:
                    shorter.play()
                except type(error) as same:
                    if _where(same) == _where(error):
                        case = shorter
                        continue
                except (AssertionError, KVStoreError, LookupError):
                    pass  # it fails otherwise: another story
                at += size
            size //= 2
        return case


def _where(error: Exception) -> tuple[str, int | None]:
    """The line that failed."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return last.filename, last.lineno


def drawn(seed: int) -> Case:
    """A long history, drawn from a seed."""
    chance = Random(seed)
    steps = [(chance.choice(DRAWN), chance.getrandbits(32)) for _ in range(STEPS)]
    write = chance.choice(("through", "back", "selective"))
    slow = chance.choice(((), (), DiskRead, DiskTombstone, DiskCopy, DiskWrite))
    in_flight_max = chance.choice((1 << 30, 20 << 10))
    return Case(write, in_flight_max, slow, chance.choice((0, 0, 1, 128)), steps)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=2 * settings.default.max_examples, phases=[Phase.generate])
def test_whatever_happens_every_page_is_what_and_where_single_pages_would_be(seed: int):
    """Shortened here: Hypothesis leaves out what is not needed of a list, but takes minutes."""
    case = drawn(seed)
    try:
        case.play()
    except Exception as error:
        error.add_note(f"{case.shortened(error)!r}.play() fails so")
        raise
