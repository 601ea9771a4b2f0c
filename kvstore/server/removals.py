"""What an operator takes out of the index: turn by turn, then for good on the SSDs too."""

from time import monotonic_ns
from typing import Final

from kvstore.server.api import Turns
from kvstore.server.jobs import Job
from kvstore.state.diskjobs import Durable, SyncPolicy
from kvstore.state.pages import PageTable
from kvstore.state.tree import Node
from kvstore.state.walks import Removal

SYNC_S: Final = 30.0
"""A job waits so long for its tombstones; they are tried further when it has ended."""
_POLL_S: Final = 0.02


def drop(turns: Turns, job: Job, tops: list[Node], cause: str) -> None:
    """Take out what lies at and below each node, then wait until no restart brings it back.

    ``job.result`` says how many pages were ``dropped``, how many nodes were ``kept``, and whether
    that is ``durable``; if not, ``why``.
    """
    job.result.update(dropped=0, kept=0)
    lost_keys = turns.ask(lambda: _lost_keys(turns))
    for top in tops:
        removal, dropped = Removal(top, cause), job.result["dropped"]
        more = True
        while more and not job.cancelled:
            more = turns.operate(removal.turn)
            job.done = job.result["dropped"] = dropped + removal.dropped
        job.result["kept"] += removal.kept
    why = _wait(turns, job, lost_keys)
    job.result["durable"] = not why
    if why:
        job.result["why"] = why


def _lost_keys(turns: Turns) -> int:
    disk = turns.observed.node.pages.disk
    return 0 if disk is None else disk.graves.lost_keys


def _wait(turns: Turns, job: Job, lost_keys: int) -> str:
    """Why a restart may bring pages back that were taken out; empty when it cannot."""

    def begin(table: PageTable) -> Durable | None:
        return table.disk.graves.await_written(lost_keys) if table.disk is not None else None

    durable = turns.operate(begin)
    if durable is None:
        return ""  # memory has no second life
    deadline_ns = monotonic_ns() + int(SYNC_S * 1e9)
    while not turns.ask(lambda: durable.ended):
        if job.cancelled or monotonic_ns() >= deadline_ns:
            return "the SSDs have not taken it yet; it is tried further while the node runs"
        job.pause(_POLL_S)
    if durable.error is not None:
        return f"{durable.error.code}: {durable.error}"
    disk = turns.observed.node.pages.disk
    assert disk is not None
    if disk.rules.sync is SyncPolicy.NONE:
        return (
            "written, but ssd.sync is none: a power cut may undo it, a crash of the node does not"
        )
    return ""
