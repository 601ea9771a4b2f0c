"""Requests that may wait for a better answer: asked for the first time, and asked again. Pure."""

from collections.abc import Hashable
from typing import Any, Final

from kvstore import wire
from kvstore.node.copies import CopyRequests, tell_copies
from kvstore.node.requests import Outcome, Requests, acknowledge
from kvstore.state.disk.jobs import Durable
from kvstore.state.remote.spreads import Spreading
from kvstore.state.tree.sessions import Fetch, Process

PATIENT: Final = (
    wire.Lookup, wire.Acquire, wire.BeginPut, wire.Persist, wire.Bring, wire.Replicate,
)  # fmt: skip


class PatientRequests:
    """All kinds of them; an outcome tells what the request may wait for.

    Args:
        requests: the messages of sessions.
        copies: those about copies at other nodes.
    """

    def __init__(self, requests: Requests, copies: CopyRequests) -> None:
        self._requests = requests
        self._copies = copies

    def ask(self, process: Process, request: Any, now_ns: int, *, waits: bool) -> Outcome:
        """The answer of now, and what to wait for to get a better one."""
        match request:
            case wire.Lookup():
                return self._requests.lookup(process, request)
            case wire.Acquire():
                return self._requests.acquire(process, request, now_ns, waits=waits)
            case wire.BeginPut():
                return self._requests.begin_put(process, request)
            case wire.Bring():
                return self._copies.bring(process, request, waits=waits)
            case wire.Replicate():
                return self._copies.replicate(process, request, waits=waits)
            case _:
                return self._requests.persist(process, request, waits=waits)

    def ask_again(
        self, process: Process, request: Any, now_ns: int, awaited: Hashable, *, waits: bool
    ) -> Outcome:
        """The answer after what it has waited for, or after its deadline: it ``waits`` no more."""
        match request, awaited:
            case wire.Acquire(), _:
                return self._requests.acquire_again(process, request, now_ns, awaited, waits=waits)
            case wire.Lookup(), _:
                return self._requests.lookup(process, request, awaited)
            case wire.Bring(), Fetch():
                return self._copies.bring_again(process, request, awaited, waits=waits)
            case _, Durable():
                return acknowledge(request, awaited), None
            case _, Spreading():
                return tell_copies(request, awaited), None
            case _:
                return self.ask(process, request, now_ns, waits=True)
