"""Makes the dispatcher that the configuration describes."""

from conductor.config import ConductorConfig
from conductor.costs.book import CostBook
from conductor.protocols import PROTOCOLS
from conductor.routing.admission import AdmissionRules
from conductor.routing.dispatcher import Dispatcher
from conductor.routing.engines import EngineRegistry
from conductor.routing.journal import JournalHead
from conductor.routing.policy import POLICIES
from conductor.routing.requests import DispatchLimits
from conductor.routing.scheduler import Scheduler


def dispatcher_of(
    config: ConductorConfig, registry: EngineRegistry, book: CostBook, rules: AdmissionRules
) -> Dispatcher:
    """A dispatcher for the engines of a registry, whose costs are in a book."""
    queue, policy = config.queue, config.policy
    scheduler = Scheduler(POLICIES[policy.name], _at_once())
    limits = DispatchLimits(queue.waiting_max, queue.wait_s, queue.tries)
    return Dispatcher(registry, scheduler, limits, book, rules, lends=policy.lends)


def journal_head(config: ConductorConfig, rules: AdmissionRules, book: CostBook) -> JournalHead:
    """What is needed to make that dispatcher again, as long as it has had no input."""
    queue, policy = config.queue, config.policy
    return JournalHead(
        policy.name, [], queue.waiting_max, queue.wait_s, queue.tries, rules,
        lends=policy.lends, at_once=_at_once(), costs=book.dump(),
    )  # fmt: skip


def _at_once() -> tuple[str, ...]:
    return tuple(name for name, protocol in PROTOCOLS.items() if protocol.at_once)
