"""Goal: scripts see from the exit status of ``kvstore`` that a job did not do everything."""

import pytest

from kvstore.cli.command import _fell_short
from kvstore.cli.decoding import completed
from kvstore.server.answers import JobRow


@pytest.mark.parametrize(
    ("kind", "state", "result", "fell_short"),
    [
        ("drain", "done", {"complete": True}, False), ("drain", "done", {"complete": False}, True),
        ("replicate", "done", {"complete": False}, True), ("drain", "done", {}, False),
        ("drain", "running", {"complete": False}, False), ("verify", "failed", {}, True),
        ("verify", "cancelled", {}, True), ("verify", "done", {"complete": False}, False),
    ],
)  # fmt: skip
def test_a_job_that_did_not_copy_everything_is_a_failure_of_the_command(
    kind, state, result, fell_short
):
    job = completed({"kind": kind, "state": state, "result": result}, JobRow)
    assert _fell_short(job) is fell_short
