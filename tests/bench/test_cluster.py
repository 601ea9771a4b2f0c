"""The processes that benchmarks start, ended."""

import signal
import sys
from pathlib import Path

import pytest

from bench import cluster
from kvstore.testing.server import wait_for

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("ready", child.pid, flush=True)
time.sleep(600)
"""


def test_a_service_that_does_not_end_is_killed_with_its_descendants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "STOP_TIMEOUT_S", 0.5)
    service = cluster.Service(
        "stubborn", [sys.executable, "-c", STUBBORN], r"ready (\d+)", tmp_path
    )
    child = int(service.wait_ready().group(1))
    assert set(cluster.family(service.process.pid)) >= {service.process.pid, child}

    service.stop()

    assert service.process.returncode == -signal.SIGKILL
    status = Path(f"/proc/{child}/stat")
    assert wait_for(lambda: not status.exists() or _is_dead(status), 10.0)
    assert service.process.stdout is not None
    assert service.process.stdout.closed, "the reader saw the end of the pipe"


def _is_dead(status: Path) -> bool:
    try:
        return status.read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
