"""Goal: whoever meets a series for the first time reads in it what is counted."""

import os
import signal
from pathlib import Path
from time import monotonic

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.server.daemon import TICK_S
from kvstore.testing.server import wait_for
from tests.client.conftest import READY, Daemon, arguments
from tests.server.conftest import Stored


@pytest.fixture
def own(spawn, tmp_path) -> Daemon:
    return Daemon(spawn(arguments(tmp_path / "own.sock"), ready=READY))


def values(daemon: Daemon) -> dict[str, float]:
    """Series without labels."""
    families = text_string_to_metric_families(daemon.ask("/metrics").decode())
    return {
        sample.name: sample.value
        for family in families
        for sample in family.samples
        if not sample.labels
    }


def test_every_series_says_what_is_counted(spawn, tmp_path):
    settings = {"ssd__directories": tmp_path / "ssd", "ssd__capacity_bytes": "64MiB",
                "ssd__segment_bytes": "16MiB"}  # fmt: skip
    own = Daemon(spawn(arguments(tmp_path / "own.sock", **settings), ready=READY))

    families = {
        one.name: one for one in text_string_to_metric_families(own.ask("/metrics").decode())
    }
    assert len(families) > 40
    short = [one.name for one in families.values() if len(one.documentation.split()) < 4]
    assert short == []
    capacity = families["kvstore_host_capacity_bytes"]
    assert capacity.samples[0].value == 64 << 20, "nothing is stored"
    assert "in use" not in capacity.documentation


def test_what_engines_do_is_counted_and_timed(own):
    with own.connect() as store:
        stored = Stored(store)
        keys = stored.put(3)
        for _ in range(4):
            assert stored.space.lookup(keys).pages == 3
        with stored.space.get(keys) as pages:
            assert len(pages) == 3
        found = values(own)

    for name, count in (("put", 1), ("acquire", 1), ("wait", 0), ("disk_load", 0)):
        assert found[f"kvstore_{name}_seconds_count"] == count, name
        assert 0 <= found[f"kvstore_{name}_seconds_sum"] < 10
    assert found["kvstore_lookup_seconds_count"] >= 4
    assert found["kvstore_lookup_pages_total"] == 3 * found["kvstore_lookup_seconds_count"]


def test_the_process_that_is_told_of_is_the_node_and_not_the_one_that_serves_http(own):
    found = values(own)
    pid = own.process.pid

    assert found["process_open_fds"] == len(list(Path(f"/proc/{pid}/fd").iterdir()))
    assert abs(found["process_start_time_seconds"] - _started(pid)) < 0.02
    assert found["process_cpu_seconds_total"] > 0


def _started(pid: int) -> float:
    ticks = float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    machine = Path("/proc/stat").read_text().splitlines()
    boot = next(float(line.split()[1]) for line in machine if line.startswith("btime"))
    return boot + ticks / os.sysconf("SC_CLK_TCK")


def test_a_loop_that_was_late_is_still_told_of_a_while_later(own, wait_until):
    def is_late() -> bool:
        own.process.send_signal(signal.SIGSTOP)
        since = monotonic()
        wait_until(lambda: monotonic() - since > 0.5)
        own.process.send_signal(signal.SIGCONT)
        return wait_for(lambda: values(own)["kvstore_loop_lag_seconds"] > 0.2, 3.0)

    # A busy machine may stop it before its first tick, from which it counts.
    assert any(is_late() for _ in range(3))
    since = monotonic()
    wait_until(lambda: monotonic() - since > 10 * TICK_S)
    assert values(own)["kvstore_loop_lag_seconds"] > 0.2, "it was many ticks ago"
