"""One completion in progress."""

from collections.abc import Callable

from aiohttp import web

from conductor.front.completions import Completion
from conductor.front.upstream import EngineError
from conductor.routing.columns import NO_KEYS
from conductor.routing.decisions import Decision
from kvstore.index.layout import Words


class Run:
    """One completion in progress, with the times for its decision.

    Attributes:
        elsewhere_s: seconds in which the Conductor itself had nothing to do for it so far.
        response: what its client gets; set before the first byte.
        prefill_done: called with the first byte: then a prefill engine that is asked at once with
            the decode engine has done its part.
        handed_at: since when its KV goes to the engine that decodes it; None = it does not.
        last_error: why the last attempt failed.
        keys: a chain value for each leading page of its prompt.
    """

    def __init__(
        self, http: web.Request, body: Completion, decision: Decision, arrived: float, number: int
    ) -> None:
        self.http = http
        self.body = body
        self.decision = decision
        self.arrived = arrived
        self.number = number
        self.elsewhere_s = 0.0
        self.response: web.StreamResponse | None = None
        self.prefill_done: Callable[[], None] | None = None
        self.handed_at: float | None = None
        self.last_error: EngineError | None = None
        self.keys: Words = NO_KEYS

    @property
    def headers(self) -> dict[str, str]:
        """Headers for engines and the client."""
        return {"X-Request-Id": self.decision.id}

    def waited(self, seconds: float) -> None:
        """It waited for a place at an engine."""
        self.decision.queue_s += seconds
        self.elsewhere_s += seconds

    def first_byte(self, now: float) -> None:
        """The client gets the first byte."""
        self.decision.ttft_s = now - self.arrived
        self.decision.conductor_s = self.decision.ttft_s - self.elsewhere_s
        if self.prefill_done is not None:
            self.prefill_done()
