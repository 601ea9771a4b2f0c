"""The parts of an engine, and its options."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal

from engine_adapters.reference.config import MODELS, ModelConfig
from engine_adapters.reference.handoff_options import TCP, HandoffOptions, PushParts
from engine_adapters.reference.landing import DecodePushes
from engine_adapters.reference.metrics import Metrics
from engine_adapters.reference.model import Model
from engine_adapters.reference.observing import HandoffObserver
from engine_adapters.reference.pool import PagedPool
from engine_adapters.reference.prefix_tree import BlockAllocator, PrefixTree
from engine_adapters.reference.push_queues import DecodeQueues, PrefillQueues
from engine_adapters.reference.pushing import PrefillPushes
from engine_adapters.reference.scheduler import Limits, Scheduler
from engine_adapters.reference.store import StoreAdapter
from kvstore.client.store import KVStore
from kvstore.engine.options import Loads, Retain
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.page import CanonicalLayout, ShardSpec, SpaceIdentity

Mode = Literal["mono", "prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of an engine.

    Attributes:
        blocks: blocks of the K/V pool.
        page_tokens: a multiple of ``block_tokens``.
        prefix_cache: keep the pages of ended requests for later ones.
        kv_hashes: hash each prompt's K/V (a few milliseconds per 1,000 tokens of the demo model).
        ranks: pools that share the K/V heads; with a store, each has a page of its own.
        retain: how long the store keeps the pages of a conversation after each of its requests.
        loads: what is restored of a hit; the benchmarks compare all three.
    """

    model: str = "tiny"
    mode: Mode = "mono"
    blocks: int = 2048
    block_tokens: int = 16
    page_tokens: int = 64
    prefix_cache: bool = True
    kv_hashes: bool = True
    ranks: int = 1
    retain: Retain = field(default_factory=Retain)
    loads: Loads = Loads.FASTER
    limits: Limits = field(default_factory=Limits)


@dataclass(slots=True)
class EngineParts:
    """The parts of an engine; after its start only its step thread uses them.

    Attributes:
        tree: None = nothing is kept of ended requests.
        store: None = no store.
        queues: queues of pushed requests; None = there are none.
        pushes: pushes of this engine; None = there are none.
        observer: writes events of pushes to the log; None = nobody does.
    """

    options: EngineOptions
    config: ModelConfig
    identity: SpaceIdentity
    metrics: Metrics
    model: Model
    pool: PagedPool
    allocator: BlockAllocator
    tree: PrefixTree | None
    scheduler: Scheduler
    store: StoreAdapter | None = None
    queues: PrefillQueues | DecodeQueues | None = None
    pushes: PrefillPushes | DecodePushes | None = None
    observer: HandoffObserver | None = None

    def close(self, timeout_s: float) -> bool:
        """Wait until nothing reads or writes the pool; the step thread has ended.

        Returns:
            False if a job still runs; then the pool's memory must not be freed.
        """
        if self.pushes is not None:
            self.pushes.close()
            self.pushes = None
        if self.pool.shared is not None:
            self.pool.shared.close()
        store, self.store = self.store, None
        return store is None or store.close(timeout_s)


def build(
    options: EngineOptions, store: KVStore | None, handoff: HandoffOptions | None
) -> EngineParts:
    """Make the parts of an engine; see :class:`Engine` for the arguments.

    Raises:
        InvalidArgument: the engine cannot listen where ``handoff`` says, or the model has no such
            ranks; or K/V that were never pushed could be kept.
    """
    more = store is not None or options.prefix_cache or options.ranks > 1
    if handoff is not None and handoff.fake and (more or handoff.transport != TCP):
        what = "not with a store, a prefix cache, several ranks or another transport"
        raise InvalidArgument("fake", what)
    config = MODELS[options.model]
    if options.ranks < 1 or config.kv_heads % options.ranks:
        what = f"{options.ranks} does not divide the {config.kv_heads} K/V heads of {config.name}"
        raise InvalidArgument("ranks", what)
    identity = SpaceIdentity(
        model=f"reference-{config.name}",
        revision=config.revision,
        kv_dtype="float32",
        page_tokens=options.page_tokens,
    )
    metrics = Metrics()
    shared = handoff is not None and handoff.transport != TCP and options.mode != "mono"
    pool = PagedPool(config, options.blocks, options.block_tokens, options.ranks, shared=shared)
    allocator = BlockAllocator(options.blocks)
    page_blocks = options.page_tokens // options.block_tokens
    tree = PrefixTree(allocator, page_blocks) if options.prefix_cache else None
    scheduler = Scheduler(
        options.limits,
        allocator,
        tree,
        page_tokens=options.page_tokens,
        block_tokens=options.block_tokens,
    )
    parts = EngineParts(
        options, config, identity, metrics, Model(config), pool, allocator, tree, scheduler
    )
    with ExitStack() as undo:
        undo.callback(parts.close, 0)
        if handoff is not None and options.mode != "mono":
            _add_pushes(parts, handoff)
        if store is not None:
            layout, layers = CanonicalLayout(head_dim=config.head_dim), (0, config.layers)
            shards = [
                ShardSpec(layout=layout, layers=layers, heads=pool.heads(rank))
                for rank in range(options.ranks)
            ]
            parts.store = StoreAdapter(
                store, identity, shards, pool, allocator, metrics, options.loads, options.retain
            )
        undo.pop_all()
    return parts


def _add_pushes(parts: EngineParts, handoff: HandoffOptions) -> None:
    mode, limits, space = parts.options.mode, parts.options.limits, parts.identity.digest
    if handoff.events:
        parts.observer = HandoffObserver(parts.pool, fake=handoff.fake)
    pool, observer = parts.pool, parts.observer
    used = PushParts(mode, space, pool, parts.allocator, parts.metrics, observer)
    if mode == "prefill":
        starting = PrefillQueues(parts.scheduler, limits.waiting_max)
        parts.queues, parts.pushes = starting, PrefillPushes(handoff, used, starting)
        return
    landing = DecodeQueues(
        parts.scheduler,
        waiting_max=limits.waiting_max,
        held_max=limits.running_max,
        page_tokens=parts.options.page_tokens,
    )
    parts.queues, parts.pushes = landing, DecodePushes(handoff, used, landing)
