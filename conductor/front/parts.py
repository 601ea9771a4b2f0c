"""The parts of a Conductor that its HTTP routes use."""

from collections.abc import Callable
from typing import NamedTuple

from conductor.front.bringing import Bringer
from conductor.front.membership import Membership
from conductor.front.metrics import Metrics
from conductor.front.prompts import Prompts
from conductor.front.tracing import TraceFile
from conductor.front.upstream import Upstream
from conductor.front.waiting import RequestQueue
from conductor.routing.decisions import DecisionLog
from conductor.routing.dispatcher import Dispatcher
from conductor.routing.engines import EngineRegistry
from conductor.routing.prefixes import PrefixView
from kvstore.index.face import PrefixIndex


class Parts(NamedTuple):
    """The parts that the front uses."""

    registry: EngineRegistry
    prefix_index: PrefixIndex
    queue: RequestQueue
    dispatcher: Dispatcher
    prefixes: PrefixView
    prompts: Prompts
    upstream: Upstream
    decisions: DecisionLog
    metrics: Metrics
    membership: Membership
    clock: Callable[[], float]
    bringer: Bringer
    trace: TraceFile | None = None
