"""Shows a Conductor's index of engines and nodes."""

import http.client
from typing import Any

from rich.console import Console

from kvstore.cli.remote import RefusedRequest, Remote
from kvstore.cli.show import seconds, table
from kvstore.config.sizes import rounded
from kvstore.protocol.errors import InvalidArgument


def asked_index(conductor: Remote) -> Any:
    """A Conductor's answer about its index.

    Raises:
        InvalidArgument: the answer is not that of a Conductor.
        KVStoreError: as of :meth:`Remote.send`.
    """
    try:
        answer = conductor.get("/v1/index")
    except RefusedRequest as error:
        if error.status != http.client.NOT_FOUND:
            raise
        answer = None
    if not isinstance(answer, dict) or "workers" not in answer:
        message = f"{conductor.url} has no index: give a Conductor's URL, http://HOST:PORT"
        raise InvalidArgument("--url", message)
    return answer


def index(answer: Any, console: Console) -> None:
    """The index, and a row for each engine and node that it follows."""
    up = "up" if answer["up"] else "down: nothing is known now"
    # A Conductor of before 2026-11 does not tell them.
    faults = "".join(f", {count:,} {cause}" for cause, count in answer.get("faults", {}).items())
    console.print(
        f"index {up}; {answer['entries']:,} of {answer['entries_max']:,} pages,"
        f" {answer['dropped']:,} left out, {answer['expected']:,} expected;"
        f" {rounded(answer['resident_bytes'])} resident; {answer['restarts']} restarts{faults}",
        highlight=False,
    )
    if not answer["workers"]:
        console.print("no engine or node is followed", style="italic", highlight=False)
        return
    columns = ("worker", "pages", "lag", "batches", "gaps lost", "not applied", "drift", "state")
    table(console, "workers", columns, (_row(one) for one in answer["workers"]))


def _row(worker: Any) -> list[object]:
    pages = ", ".join(f"{count:,} {medium}" for medium, count in sorted(worker["pages"].items()))
    left = [
        f"{worker[field]:,} {what}"
        for field, what in (("skipped", "events"), ("unmapped", "blocks"), ("waiting", "waiting"))
        if worker[field]
    ]
    drift = ""
    if worker["audited"]:
        drift = f"{worker['missing'] + worker['stale']} of {worker['audited']:,}"
    return [
        worker["worker"], pages or "none", seconds(worker["lag_s"]), f"{worker['batches']:,}",
        worker["gaps_lost"], ", ".join(left), drift,
        "counts" if worker["current"] else f"does not count: {worker['why']}",
    ]  # fmt: skip
