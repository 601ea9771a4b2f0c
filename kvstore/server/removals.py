"""Drops pages for an operator: in steps, then with tombstones on the SSDs."""

from time import monotonic_ns
from typing import Final

from kvstore.server.jobs import OperatorJob
from kvstore.server.turns import Work
from kvstore.state.ask.traversal import Removal
from kvstore.state.disk.jobs import SyncPolicy
from kvstore.state.table.pages import PageTable
from kvstore.state.tree.node import PrefixNode

SYNC_S: Final = 30.0
"""Maximum time that a job waits for its tombstones; they are retried after it has ended."""
_POLL_S: Final = 0.02


def drop(table: PageTable, job: OperatorJob, tops: list[PrefixNode], cause: str) -> Work[None]:
    """Drop the pages of nodes and their descendants, and wait until this survives a restart.

    ``job.result`` has the number of ``dropped`` pages and of ``kept`` nodes, how many of these are
    ``pinned`` (if any), and whether the removal is ``durable``; if not, ``why``.
    """
    dropped = kept = pinned = 0
    job.result.update(dropped=0, kept=0)
    lost_keys = table.disk.graves.lost_keys
    for top in tops:
        removal = Removal(top, cause)
        more = True
        while more and not job.cancelled:
            more = removal.turn(table)
            job.pages = job.done = job.result["dropped"] = dropped + removal.dropped
            yield None
        dropped += removal.dropped
        kept += removal.kept
        pinned += removal.pinned
        job.result["kept"] = kept
        if pinned:
            job.result["pinned"] = pinned
    why = yield from _wait(table, job, lost_keys)
    job.result["durable"] = not why
    if why:
        job.result["why"] = why


def _wait(table: PageTable, job: OperatorJob, lost_keys: int) -> Work[str]:
    """Why a restart may find the dropped pages again; empty if it cannot."""
    disk = table.disk
    if not disk.exists:
        return ""  # memory does not survive a restart
    durable = disk.graves.await_written(lost_keys)
    deadline_ns = monotonic_ns() + int(SYNC_S * 1e9)
    while not durable.ended:
        if job.cancelled or monotonic_ns() >= deadline_ns:
            return "not written to the SSDs yet; the node keeps trying"
        yield _POLL_S
    if durable.error is not None:
        return f"{durable.error.code}: {durable.error}"
    if disk.rules.sync is SyncPolicy.NONE:
        return (
            "written, but ssd.sync is none: a power cut may undo it, a crash of the node does not"
        )
    return ""
