"""The demonstration of a cluster runs as an operator would start it."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


def test_the_demo_of_a_cluster_ends_with_equal_tokens_and_pages_of_the_other_node() -> None:
    words = ["demo-cluster", "--quick", "--json", "--model", "tiny"]
    done = subprocess.run(
        [sys.executable, "-m", "bench", *words],
        capture_output=True, text=True, timeout=380, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["requests"] == figures["tokens_equal"] == figures["hashes_equal"] == 4
    assert figures["again"] == figures["again_equal"] == 2
    assert figures["node-b_fetched_pages"] > 0
