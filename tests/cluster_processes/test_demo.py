"""The demonstration of a cluster runs as an operator would start it."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from bench import demo_cluster
from tests.bench.test_commands import children
from tests.cluster_processes.store_scenes import start_server
from tests.conftest import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
COMMAND = [sys.executable, "-m", "bench", "demo-cluster", "--quick", "--json", "--model", "tiny"]
END_WAIT_S = 60.0


def demonstrated(*options: str) -> dict[str, object]:
    """The figures of a run in which everything was equal."""
    done = subprocess.run(
        [*COMMAND, *options], capture_output=True, text=True, timeout=380, check=False
    )
    assert done.returncode == 0, done.stderr
    figures: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    assert figures["requests"] == figures["tokens_equal"] == figures["hashes_equal"] == 4
    assert figures["again"] == figures["again_equal"] == 2
    assert int(str(figures["node-b_fetched_pages"])) > 0
    return figures


def test_the_demo_of_a_list_ends_with_equal_tokens_and_pages_of_the_other_node() -> None:
    figures = demonstrated("--membership", "local", "--directory", "peers")
    assert (figures["membership"], figures["directory"], figures["killed"]) == ("local", "peers", 0)


def test_the_demo_goes_on_with_equal_tokens_when_etcd_and_redis_have_been_killed(
    tmp_path: Path,
) -> None:
    for kind in ("etcd", "redis"):
        with start_server(kind, tmp_path / kind):
            pass  # skipped where there is none
    figures = demonstrated()
    assert (figures["membership"], figures["directory"]) == ("etcd", "redis")
    assert figures["killed"] == figures["killed_equal"] == figures["killed_hashes_equal"] == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_demo_that_is_ended_early_leaves_no_process(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    mark = f"DEMO_CLUSTER_TEST={os.getpid()}-{number}"
    monkeypatch.setenv(*mark.split("="))
    command = [*COMMAND, "--membership", "local", "--directory", "peers"]
    # Whoever runs the tests in the background ignores SIGINT, and so would their children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as demo:
        assert demo.stderr is not None
        for line in demo.stderr:
            if line.startswith(b"node-a found node-b"):
                break
        assert len(children(mark)) > 4
        demo.send_signal(number)
        assert demo.wait(END_WAIT_S) == 128 + number
    assert wait_for(lambda: not children(mark), END_WAIT_S)


def test_the_demo_says_so_when_there_is_no_etcd_and_does_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said = io.StringIO()

    chosen = demo_cluster.if_there_is("etcd", "local", Console(file=said))

    assert chosen == "local"
    assert said.getvalue().startswith("without etcd: etcd is not installed, and Debian's cannot")
