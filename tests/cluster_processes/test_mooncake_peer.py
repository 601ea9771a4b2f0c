"""`bench host --peers mooncake` with Mooncake's own programs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.mooncake_wheel import NoMooncakeError, environment

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).resolve().parents[2]


def test_a_put_and_a_get_stand_beside_mooncakes():
    try:
        environment()
    except NoMooncakeError as error:
        pytest.skip(str(error))
    cases = "^peer/(put|get)/1MiB/x16$"
    options = ["--pool-mib", "256", "--peers", "mooncake", "--cases", cases, "--seconds", "0.01"]

    run = subprocess.run(
        [sys.executable, "-m", "bench", "host", *options, "--json"],
        capture_output=True, text=True, timeout=50, cwd=ROOT, check=False,
    )  # fmt: skip

    assert run.returncode == 0, run.stderr
    results = [json.loads(line) for line in run.stdout.splitlines()]
    assert [result["case"] for result in results] == ["peer/put/1MiB/x16", "peer/get/1MiB/x16"]
    assert all(result["value"] > 0 and result["bound_value"] > 0 for result in results)
