"""Soaks: tests that look for minutes, in named parts; ``make soak-NAME`` runs one part.

``@pytest.mark.soak("http", minutes=10)`` says to which part a test belongs and about how long it
takes on two cores. From that follow what is printed before a soak starts, and the timeout of each
test: three times as long. A fuzzer asks the fixture ``soak_s`` how long to look;
``--soak-seconds`` shortens it, to try whether a soak works at all.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import pytest

SOAKS: Final[Mapping[str, str]] = {
    "cluster": "two nodes with etcd and Redis under load, one restarted each minute",
    "crash": "kills, floods and power cuts: what was acknowledged is there afterwards",
    "events": "whatever is sent to those who read events, and to the Conductor over HTTP",
    "handoff": "engines that stop, leave or lie in each state of a push, and what they may send",
    "http": "operations in any order, and whatever is sent to a node over HTTP",
    "link": "who runs next in a client that is cut off, closed and cut off again",
    "log": "whatever may lie in the directories of the SSD log",
    "models": "two models on one full node for half an hour: nothing grows",
    "mover": "random jobs on the native mover under sanitizers",
    "simulation": "histories of one node, and of a cluster, with faults and failing disks",
    "socket": "whatever is sent to a node's socket, and to its state",
}
"""What each of them looks for; the Makefile has a target for each."""
_TIMEOUT_FACTOR: Final = 3


def part_of(item: pytest.Item) -> tuple[str, float] | None:
    """The soak that a test belongs to, and how many minutes it takes; None = it is in none.

    Raises:
        pytest.UsageError: its mark does not say so.
    """
    marks = list(item.iter_markers("soak"))
    if not marks:
        return None
    mark = marks[0]
    minutes = mark.kwargs.get("minutes", 0)
    if len(marks) > 1 or len(mark.args) != 1 or mark.args[0] not in SOAKS or minutes <= 0:
        raise pytest.UsageError(
            f"{item.nodeid}: one mark soak(NAME, minutes=...), where NAME is one of"
            f" {', '.join(SOAKS)}"
        )
    return mark.args[0], float(minutes)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which soak, and how long."""
    parser.addoption("--soak", choices=sorted(SOAKS), help="run this soak, and nothing else")
    parser.addoption("--soak-seconds", type=float, help="let fuzzers of soaks look only so long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give soaks their timeouts; leave out what was not asked for."""
    asked = config.getoption("soak")
    others = []
    for item in items:
        part = part_of(item)
        if part is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_TIMEOUT_FACTOR * 60 * part[1] + 60))
        if asked and (part is None or part[0] != asked):
            others.append(item)
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]


def pytest_report_collectionfinish(items: Sequence[pytest.Item]) -> list[str]:
    """Say how long the soaks take that are about to start."""
    minutes: dict[str, float] = {}
    for part in filter(None, map(part_of, items)):
        minutes[part[0]] = minutes.get(part[0], 0.0) + part[1]
    said = [
        f"soak-{name}: about {minutes[name]:.0f} minutes: {SOAKS[name]}" for name in sorted(minutes)
    ]
    if len(said) > 1:
        said.append(f"all soaks together: about {sum(minutes.values()) / 60:.1f} hours")
    return said


@pytest.fixture
def soak_s(request: pytest.FixtureRequest) -> float:
    """How long a fuzzer looks in a soak; 0.0 in a test that is no soak."""
    part = part_of(request.node)
    if part is None:
        return 0.0
    asked: float | None = request.config.getoption("soak_seconds")
    return 60 * part[1] if asked is None else asked
