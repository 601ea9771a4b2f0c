"""Jobs at nodes that bring pages: to load them, to copy them to another node, and to end them."""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec

from conductor.config import NodeEntry
from conductor.front.nodes import NodeApi, NodeUnreadableError

_POLL_S: Final = 0.1
"""Seconds between two looks at a job."""
_JOBS: Final = "/v1/jobs"


class _Job(msgspec.Struct):
    """A job as a node tells; fields that nobody reads are left out."""

    job: Annotated[int, msgspec.Meta(ge=0)]
    state: Literal["running", "done", "failed", "cancelled"]
    result: dict[str, object] = {}


_JOB: Final = msgspec.json.Decoder(_Job)


async def carry_out(
    entry: NodeEntry, path: str, body: Mapping[str, object], cancelled: asyncio.Event,
    timeout_s: float, deadline_s: float,
) -> str:  # fmt: skip
    """Let a node do a job, and end it when it is not wanted any more, or takes too long.

    Args:
        entry: the node; with ``url``, and with ``operate_token`` unless that is a Unix socket.
        path: of the operation.
        body: of the request.
        cancelled: set when it is not wanted any more.
        timeout_s: deadline of each request.
        deadline_s: of the job.

    Returns:
        ``done``, ``incomplete`` (the node could not do all of it), ``failed``, ``cancelled`` or
        ``late``; ``refused`` if the node refuses it or does not answer.
    """
    try:
        async with NodeApi(entry, timeout_s, operates=True) as api:
            job = await api.send("POST", path, msgspec.json.encode(body), _JOB.decode, 202)
            outcome = ""
            try:
                async with asyncio.timeout(deadline_s):
                    while job.state == "running":
                        if await _is_set(cancelled):
                            outcome = "cancelled"
                            break
                        job = await api.send("GET", f"{_JOBS}/{job.job}", None, _JOB.decode, 200)
            except TimeoutError:
                outcome = "late"
            finally:
                if job.state == "running":
                    await _end(api, job.job)
    except NodeUnreadableError:
        return "refused"
    if outcome:
        return outcome
    complete = job.result.get("complete", True) is True
    return job.state if job.state != "done" or complete else "incomplete"


async def _is_set(event: asyncio.Event) -> bool:
    """Wait a moment for an event."""
    try:
        async with asyncio.timeout(_POLL_S):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def _end(api: NodeApi, job: int) -> None:
    """End a job; one that cannot be ended ends at its own deadline."""
    try:
        await api.send("DELETE", f"{_JOBS}/{job}", None, _JOB.decode, 200)
    except NodeUnreadableError:
        return
