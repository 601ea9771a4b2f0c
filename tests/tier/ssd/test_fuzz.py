"""Whatever lies in a log's directories, a start ends in time, loudly or well, and never lies."""

import random
import shutil
from pathlib import Path
from time import monotonic

import pytest

from tests.tier.ssd.corpus import Corpus
from tests.tier.ssd.fuzzed import Case

SECONDS = 3
CASES_MIN = 20
"""That are tried however long it takes."""


def fuzz(folder: Path, seed: int, seconds: float) -> int:
    corpus = Corpus(folder)
    count, stop = 0, monotonic() + seconds
    while monotonic() < stop or count < CASES_MIN:
        case = Case(corpus, folder / "case", f"{seed} {count}")
        try:
            case.check()
        except BaseException as error:
            error.add_note(f"seed {seed} {count}: {'; '.join(case.damages)}")
            raise
        shutil.rmtree(folder / "case")
        count += 1
    return count


def test_a_start_on_damaged_files_ends_well_or_says_why(tmp_path):
    assert fuzz(tmp_path, 1, SECONDS) >= CASES_MIN


@pytest.mark.soak("log", minutes=10)
def test_starts_on_damaged_files_for_long(tmp_path, soak_s):
    seed = random.SystemRandom().randrange(1 << 32)  # named where it fails
    assert fuzz(tmp_path, seed, soak_s) > soak_s
