"""Shows a Conductor's index of engines and nodes."""

import http.client

from msgspec import Struct
from rich.console import Console

from kvstore.cli.decoding import Reply
from kvstore.cli.remote import RefusedRequest, Remote
from kvstore.cli.show import seconds, table
from kvstore.index.control import FollowedWorker
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.sizes import rounded
from kvstore.server import client


class IndexState(Struct, frozen=True, kw_only=True):
    """A Conductor's answer about its index.

    ``up``: its process answers. ``entries`` to ``workers``: those of
    :class:`kvstore.index.control.IndexReport`.
    """

    up: bool
    workers: list[FollowedWorker]
    restarts: int = 0
    faults: dict[str, int] = {}
    entries: int = 0
    entries_max: int = 0
    dropped: int = 0
    expected: int = 0
    resident_bytes: int = 0


def asked_index(conductor: Remote) -> Reply[IndexState]:
    """A Conductor's answer about its index.

    Raises:
        InvalidArgument: no address was given, or the answer is not that of a Conductor.
        KVStoreError: as of :meth:`Remote.send`.
    """
    if conductor.given == client.HERE:
        raise InvalidArgument("--url", "give the Conductor's URL, http://HOST:PORT")
    answer: Reply[IndexState] | None = None
    try:
        answer = conductor.get("/v1/index", IndexState)
    except RefusedRequest as error:
        if error.status != http.client.NOT_FOUND:
            raise
    if answer is None or not isinstance(answer.raw, dict) or "workers" not in answer.raw:
        message = f"{conductor.url} has no index: give a Conductor's URL, http://HOST:PORT"
        raise InvalidArgument("--url", message)
    return answer


def index(answer: IndexState, console: Console) -> None:
    """The index, and a row for each engine and node that it follows."""
    up = "up" if answer.up else "down: nothing is known now"
    faults = "".join(f", {count:,} {cause}" for cause, count in answer.faults.items())
    console.print(
        f"index {up}; {answer.entries:,} of {answer.entries_max:,} pages,"
        f" {answer.dropped:,} left out, {answer.expected:,} expected;"
        f" {rounded(answer.resident_bytes)} resident; {answer.restarts} restarts{faults}",
        highlight=False,
    )
    if not answer.workers:
        console.print("no engine or node is followed", style="italic", highlight=False)
        return
    columns = ("worker", "pages", "lag", "batches", "gaps lost", "not applied", "drift", "state")
    table(console, "workers", columns, (_row(one) for one in answer.workers))


def _row(worker: FollowedWorker) -> list[object]:
    pages = ", ".join(f"{count:,} {medium}" for medium, count in sorted(worker.pages.items()))
    left = [
        f"{count:,} {what}"
        for count, what in (
            (worker.skipped, "events"), (worker.unmapped, "blocks"), (worker.waiting, "waiting"),
        )
        if count
    ]  # fmt: skip
    drift = ""
    if worker.audited:
        drift = f"{worker.missing + worker.stale} of {worker.audited:,}"
    return [
        worker.worker, pages or "none", seconds(worker.lag_s), f"{worker.batches:,}",
        worker.gaps_lost, ", ".join(left), drift,
        "counts" if worker.current else f"does not count: {worker.why}",
    ]  # fmt: skip
