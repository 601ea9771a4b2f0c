"""Goal: a daemon that is killed at any point comes back with all it acknowledged as durable."""

from pathlib import Path

import pytest

from kvstore.testing.crash import CrashFound, CrashRun

KILLS = 2
SOAK_KILLS = 100


@pytest.mark.parametrize("sync", ["interval", "always"])
def test_no_kill_loses_a_page_that_was_acknowledged_as_durable(tmp_path: Path, sync: str):
    lines: list[str] = []

    outcome = CrashRun(tmp_path, 1, sync, lines.append).run(KILLS)

    assert outcome.kills == KILLS == len(lines)
    assert outcome.verified > 0
    assert outcome.recovered > 0
    assert outcome.compared > 0


def test_a_page_that_is_gone_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = CrashRun(tmp_path, 2, "always")
    monkeypatch.setattr(run, "_acknowledged", {99: 5})

    with run._started() as server, pytest.raises(CrashFound, match="0 pages of 5"):
        run._verify(server, everything=True)


@pytest.mark.soak("crash", minutes=10)
@pytest.mark.parametrize(("seed", "sync"), [(100, "interval"), (101, "always")])
def test_two_hundred_kills_under_load(
    tmp_path: Path, seed: int, sync: str, capsys: pytest.CaptureFixture[str]
):
    def say(line: str) -> None:
        with capsys.disabled():
            print(line, flush=True)  # noqa: T201 - a long run shows how far it is

    outcome = CrashRun(tmp_path, seed, sync, say).run(SOAK_KILLS)

    say(str(outcome))
    assert outcome.kills == SOAK_KILLS
    assert outcome.kills_of_starts > 0
    assert len(outcome.kills_by_point) == 4
    assert outcome.verified > 1000
