"""Goal: systemd takes the units as they are, and they fit the programs they start."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.config import ServerConfig
from kvstore.server.daemon import WRITE_OUT_S
from tests.conftest import ROOT

DEPLOY = ROOT / "deploy"
UNITS = ["kvstore-server.service", "kvstore-conductor.service"]
EXPOSURE_MAX = 2.0
"""Of ``systemd-analyze security``, whose scale ends at 10 (a unit that says nothing: 9.6)."""

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


def settings(unit: str) -> dict[str, list[str]]:
    """Every setting of a unit, as often as it is there."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / unit).read_text().splitlines():
        if match := re.match(r"(\w+)=(.*)", line):
            found.setdefault(match[1], []).append(match[2])
    return found


@pytest.fixture(params=UNITS)
def unit(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The unit with the programs of this environment."""
    path = tmp_path / request.param
    there = Path(sys.executable).parent
    path.write_text((DEPLOY / request.param).read_text().replace("/opt/kvstore/bin", str(there)))
    return path


def analyzed(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *words], capture_output=True, text=True, timeout=60,
        env={**os.environ, "SYSTEMD_COLORS": "0", "SYSTEMD_LOG_LEVEL": "warning"},
    )  # fmt: skip


@needs_systemd
def test_systemd_takes_the_unit(unit: Path):
    done = analyzed("verify", unit)

    assert done.returncode == 0, done.stderr
    assert unit.name not in done.stderr, "it is warned of"


@needs_systemd
def test_a_unit_that_is_wrong_would_be_noticed(unit: Path):
    unit.write_text(unit.read_text().replace("WatchdogSec=", "WatchdogSecs="))
    unit.write_text(unit.read_text().replace("KillMode=mixed", "KillMode=all"))

    assert unit.name in analyzed("verify", unit).stderr


@needs_systemd
def test_a_unit_exposes_little(unit: Path):
    done = analyzed("security", "--offline=yes", unit)
    if "nrecognized option" in done.stderr:
        pytest.skip("this systemd cannot look at a file (before 250)")

    [exposure] = re.findall(r"exposure level for \S+: ([\d.]+)", done.stdout)
    assert float(exposure) <= EXPOSURE_MAX


@pytest.mark.parametrize("name", UNITS)
def test_the_command_line_is_taken(name: str, tmp_path: Path):
    [start] = settings(name)["ExecStart"]
    program, option, config = shlex.split(start)
    there = tmp_path / "config.toml"
    example = DEPLOY / Path(config).name
    there.write_text(example.read_text() if example.exists() else "")

    done = subprocess.run(
        [Path(sys.executable).parent / Path(program).name, option, there, "--print-config"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "[http]" in done.stdout


@pytest.mark.parametrize("name", UNITS)
def test_what_is_needed_to_know_who_connects_is_not_hidden(name: str):
    found = settings(name)

    assert not found.keys() & {"PrivateUsers", "PrivatePIDs", "PrivateNetwork", "DynamicUser"}
    assert found["RuntimeDirectoryPreserve"] == ["yes"], "containers mount it"
    assert found["User"] == found["Group"] == ["kvstore"]
    assert found["LimitCORE"] == ["0"], "a core file has the pages of every tenant in it"


def test_the_node_has_time_to_end_and_descriptors_for_all_it_may_hold():
    found = settings(UNITS[0])
    config = ServerConfig()

    assert found["Type"] == ["notify"]
    assert int(found["TimeoutStopSec"][0]) >= 2 * WRITE_OUT_S
    extents = (1 << 40) // config.host.extent_bytes  # a tebibyte
    assert int(found["LimitNOFILE"][0]) >= extents + 2 * config.socket.connections_max
    assert Path(config.socket.path).parent == Path("/run") / found["RuntimeDirectory"][0]


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="it is not installed")
def test_systemd_takes_the_users(tmp_path: Path):
    (tmp_path / "etc").mkdir()

    done = subprocess.run(
        ["systemd-sysusers", "--dry-run", f"--root={tmp_path}", "-"],
        input=(DEPLOY / "kvstore.sysusers").read_text(),
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "Creating user 'kvstore'" in done.stderr
    assert "Creating group 'kvstore-engines'" in done.stderr
