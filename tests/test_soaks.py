"""Goal: every long test is in one soak that ``make`` knows, and each soak looks for long enough."""

import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.soaks import SOAKS, part_of

FUZZERS = {"events", "http", "log", "socket"}
FUZZ_MINUTES_MIN = 10

pytestmark = pytest.mark.timeout(200)

SAID = re.compile(r"^soak-(\w+): about (\d+) minutes: \w", re.MULTILINE)


@pytest.fixture(scope="module")
def said() -> str:
    """What is printed before the tests of all soaks start."""
    marked = [path for path in (ROOT / "tests").rglob("*.py") if "soak" in path.read_text()]
    tests = [str(path) for path in marked if path.name.startswith("test_")]
    words = [sys.executable, "-m", "pytest", "-m", "soak", "--collect-only", *tests]
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_every_long_test_is_in_a_soak_that_make_runs(said):
    text = (ROOT / "Makefile").read_text()
    targets = re.search(r"^SOAKS := (.+)$", text, re.MULTILINE)

    assert targets is not None
    assert targets[1].split() == [f"soak-{name}" for name in sorted(SOAKS)]
    assert {name for name, _ in SAID.findall(said)} == SOAKS.keys()
    assert "all soaks together: about " in said


def test_every_fuzzer_looks_for_ten_minutes(said):
    minutes = {name: int(some) for name, some in SAID.findall(said)}

    assert {name: minutes[name] for name in FUZZERS if minutes[name] < FUZZ_MINUTES_MIN} == {}


class Marked:
    """As much of a test as its marks."""

    nodeid = "test_it"

    def __init__(self, *marks: pytest.MarkDecorator) -> None:
        self._marks = [one.mark for one in marks]

    def iter_markers(self, _name: str) -> list[pytest.Mark]:
        return self._marks


def test_a_long_test_that_says_not_where_it_belongs_is_refused():
    good = pytest.mark.soak("http", minutes=2)
    wrong = [
        [pytest.mark.soak], [pytest.mark.soak("nowhere", minutes=1)], [pytest.mark.soak("http")],
        [pytest.mark.soak("http", "log", minutes=1)], [good, pytest.mark.soak("log", minutes=1)],
    ]  # fmt: skip

    assert part_of(Marked()) is None
    assert part_of(Marked(good)) == ("http", 2.0)
    for marks in wrong:
        with pytest.raises(pytest.UsageError, match="one of cluster, crash, "):
            part_of(Marked(*marks))
