"""A prefill and a decode engine without model, threads and network: queues, memory and pushes."""

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from engine_adapters.reference.prefix_tree import BlockAllocator, PrefixTree
from engine_adapters.reference.push_queues import DecodeQueues, PrefillQueues
from engine_adapters.reference.request import Push, Request, State
from engine_adapters.reference.scheduler import Limits, Scheduler

PAGE, BLOCK = 8, 4


class Side:
    """One engine's memory, and what pushes hold of it."""

    def __init__(self, blocks: int, *, tree: bool, running: int) -> None:
        self.allocator = BlockAllocator(blocks)
        self.tree = PrefixTree(self.allocator, PAGE // BLOCK) if tree else None
        limits = Limits(token_budget=12, running_max=running, waiting_max=64)
        self.scheduler = Scheduler(
            limits, self.allocator, self.tree, page_tokens=PAGE, block_tokens=BLOCK
        )
        self.pushes: dict[int, list[int]] = {}  # by room: the blocks that bytes go to or come from

    def keep(self, room: int, blocks: list[int]) -> None:
        self.allocator.retain(blocks)
        self.pushes[room] = list(blocks)

    def let_go(self, room: int) -> None:
        self.allocator.release(self.pushes.pop(room, []))

    def check(self, requests: list[Request]) -> None:
        """Every reference has an owner, and who shares a block has the same tokens in it."""
        self.scheduler.check()
        owners: Counter[int] = Counter()
        content: dict[int, tuple[int, ...]] = {}
        for request in requests:
            owners.update(request.blocks)
            for at, block in enumerate(request.blocks):
                tokens = tuple(request.tokens[: (at + 1) * BLOCK])
                if owners[block] > 1:
                    assert content[block] == tokens, f"block {block} has two owners"
                content[block] = tokens
        for blocks in self.pushes.values():
            owners.update(blocks)
        if self.tree is not None:
            for node in self.tree._nodes.values():
                owners.update(node.blocks)
        for block in range(self.allocator.count):
            assert self.allocator.references(block) == owners[block], f"references of {block}"


@dataclass
class Both:
    """One request at both engines.

    Attributes:
        failed: its push has failed.
        settles: steps until nothing is read or written of a push that has ended.
    """

    room: int
    here: Request
    there: Request
    failed: bool = False
    settles: int = 0
    announced: bool = False
    wanted: int = 0
    ordinary: bool = False
    gone: set[str] = field(default_factory=set)


class PushWorld:
    """Both engines, step by step."""

    def __init__(self, seed: int, *, here: int, there: int, tree: bool, store: bool) -> None:
        self.random = Random(seed)
        self.store = store
        self.prefill = Side(here, tree=tree, running=2)
        self.decode = Side(there, tree=tree, running=3)
        self.starting = PrefillQueues(self.prefill.scheduler, 64)
        self.landing = DecodeQueues(
            self.decode.scheduler, waiting_max=64, held_max=3, page_tokens=PAGE
        )
        self.all: list[Both] = []
        self.now = 0.0
        self.given_up = 0

    def arrive(self, prompt: int, wanted: int, *, ordinary: bool) -> None:
        """A request for both engines, or an ordinary one for decode."""
        self.now += 1
        start = self.random.choice((0, 0, 100))
        tokens = list(range(start, start + prompt))
        room = len(self.all)

        def made(name: str, most: int) -> Request:
            request = Request(
                id=name, tokens=list(tokens), prompt_tokens=prompt, max_tokens=most,
                emit=lambda _: None, push=None if ordinary else Push(room),
            )  # fmt: skip
            request.arrived = self.now
            return request

        one = Both(room, made("here", 1), made("there", wanted), wanted=wanted, ordinary=ordinary)
        self.all.append(one)
        if ordinary:
            one.gone.add("here")
            one.here.state = State.FINISHED
            assert self.decode.scheduler.add(one.there)
        else:
            assert self.starting.add(one.here)
            assert self.landing.add(one.there)

    def step(self) -> None:
        self._pushes()
        self._prefill()
        self._decode()
        self.check()

    @property
    def done(self) -> bool:
        return all(
            one.here.state is State.FINISHED and one.there.state is State.FINISHED
            for one in self.all
        ) and not (self.prefill.pushes or self.decode.pushes)

    def abort(self, one: Both, side: str) -> None:
        """A client leaves one of the engines."""
        request = one.here if side == "here" else one.there
        if request.state is State.FINISHED:
            return
        (self.starting if side == "here" else self.landing).remove(request)
        one.gone.add(side)
        self.fail(one)

    def fail(self, one: Both) -> None:
        if not one.failed and one.there.state in (State.PREALLOC, State.TRANSFER, State.FINISHED):
            one.failed = True
            one.settles = self.random.randrange(4)

    def check(self) -> None:
        self.starting.check()
        self.landing.check()
        self.prefill.check([one.here for one in self.all])
        self.decode.check([one.there for one in self.all])

    # ---- inside -----------------------------------------------------------------------------

    def _pushes(self) -> None:
        for one in self.all:
            arrives = one.there.state is State.TRANSFER and one.here.state is State.INFLIGHT
            if one.failed:
                self._settle(one)
            elif not one.ordinary and arrives and self.random.random() < 0.5:
                self.prefill.let_go(one.room)
                self.decode.let_go(one.room)
                self.starting.remove(one.here)
                self.landing.end_transfer(one.there)
                missing = one.there.prompt_tokens - one.there.computed
                self.decode.scheduler.computed(one.there, missing)
                self._token(one)

    def _settle(self, one: Both) -> None:
        """A push that has failed: prefill stops, decode goes on by itself."""
        if one.here.state not in (State.INFLIGHT, State.FINISHED):
            self.starting.stop(one.here)
        one.settles -= 1
        if one.settles > 0:
            return
        self.prefill.let_go(one.room)
        self.decode.let_go(one.room)
        if one.here.state is State.INFLIGHT:
            self.starting.remove(one.here)
        if one.there.state is State.TRANSFER:
            self.landing.end_transfer(one.there)

    def _prefill(self) -> None:
        scheduler = self.prefill.scheduler
        by_request = {id(one.here): one for one in self.all}
        self.starting.start(lambda r: by_request[id(r)].announced, anyhow=self.store)
        for request in scheduler.admit():
            one = by_request[id(request)]
            self.prefill.keep(one.room, request.blocks)

        def waits(request: Request) -> bool:
            one = by_request[id(request)]
            return not (one.announced or one.failed)

        request = self.starting.to_give_up(waits)
        if request is not None:
            self.given_up += 1
            self.fail(by_request[id(request)])
        for request, count in scheduler.plan().work:
            scheduler.computed(request, count)
            if not request.uncomputed:
                request.tokens.append(7)
                self.starting.computed(request)

    def _decode(self) -> None:
        scheduler = self.decode.scheduler
        by_request = {id(one.there): one for one in self.all}
        self.landing.run()
        scheduler.admit(self.landing.until)
        while (placed := self.landing.preallocate()) is not None:
            one = by_request[id(placed)]
            if not one.failed:
                one.announced = True
                self.decode.keep(one.room, placed.blocks[placed.computed // BLOCK :])
        for request, count in scheduler.plan().work:
            scheduler.computed(request, count)
            if not request.uncomputed:
                self._token(by_request[id(request)])

    def _token(self, one: Both) -> None:
        one.there.tokens.append(1_000 + len(one.there.tokens))
        if one.there.output_tokens >= one.wanted:
            self.landing.remove(one.there)
