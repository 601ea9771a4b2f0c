"""An engine's side of the connector without an engine: requests, blocks, a clock, a store."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.client.results import Hit
from kvstore.engine.identity import Group
from kvstore.engine.messages import Report, Step
from kvstore.engine.opening import Opening
from kvstore.engine.options import Options, read_section
from kvstore.engine.requests import PromptScope, Role, ScheduledRequest, Setup
from kvstore.engine.scheduler import SchedulerSide
from kvstore.protocol.page import OpaqueLayout, PrefixKeys, ShardSpec, SpaceIdentity

PAGE = 64
BLOCK = 32
FULL = Group(index=0, layers=4, block_tokens=BLOCK, block_bytes=128, kv_heads=2)
PLAIN = PromptScope()
BOTH = Role(loads=True, stores=True)
IDENTITY = SpaceIdentity(model="m", kv_dtype="bfloat16", page_tokens=PAGE)
SHARD = ShardSpec(
    layout=OpaqueLayout("engine", "1", "", BLOCK, 128), layers=(0, 4), heads=(0, 2)
)  # fmt: skip


@dataclass
class Request:
    """As much of an engine's as is read."""

    request_id: str
    all_token_ids: list[int]
    kv_transfer_params: dict[str, Any] | None = None
    block_hashes: list[bytes] = field(default_factory=list)
    prompt: int = 0
    session_id: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt or len(self.all_token_ids)


class Blocks:
    """References to blocks, counted."""

    def __init__(self) -> None:
        self.held: Counter[int] = Counter()
        self.only_ours: set[int] = set()
        self.forgotten: set[int] = set()

    def hold(self, blocks: Sequence[int]) -> None:
        self.held.update(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        self.held.subtract(blocks)
        self.held += Counter()

    def forget(self, blocks: Sequence[int]) -> None:
        self.forgotten.update(blocks)

    def free_soon(self, blocks: Sequence[int]) -> bool:
        return bool(self.only_ours & set(blocks))


class FakeStore:
    """A store whose lookups answer what the test says."""

    def __init__(self) -> None:
        self.connected = True
        self.node_name = "here"
        self.answer = Hit(0)
        self.asked: list[PrefixKeys] = []
        self.told: tuple[str, int] = ("", 0)
        self.page_bytes = (512,)
        self.kept: list[tuple[str, int, float, int]] = []

    def space(self, identity: SpaceIdentity, shards: Sequence[ShardSpec]) -> Any:
        return self

    def lookup(self, keys: PrefixKeys, *, holder: str = "", held: int = 0) -> Hit:
        self.asked.append(keys)
        self.told = (holder, held)
        return self.answer._replace(pages=min(self.answer.pages, len(keys)))

    def keep_conversation(self, keys: PrefixKeys, name: str, ttl_s: float, bytes_max: int) -> None:
        self.kept.append((name, len(keys), ttl_s, bytes_max))


class World:
    """A scheduler side and everything around it."""

    def __init__(self, *, groups: Sequence[Group] = (FULL,), role: Role = BOTH,
                 ranks: int = 1, blocks: int = 1000, takes_whole: bool = False,
                 drafts: bool = False, page_tokens: int = PAGE, recomputes: bool = True,
                 **extra: Any) -> None:  # fmt: skip
        self.now = 100.0
        self.store = FakeStore()
        self.blocks = Blocks()
        self.reports: list[float] = []
        options = read_section(extra, Options, "options")
        opening = Opening(self.store, IDENTITY, [SHARD], lambda: self.now)
        setup = Setup(
            "engine", groups, page_tokens, BLOCK, ranks, role, takes_whole=takes_whole,
            drafts=drafts, recomputes=recomputes,
        )  # fmt: skip
        self.side = SchedulerSide(opening, setup, options, lambda: self.now, self.reports.append)
        self.side.bind(self.blocks, blocks)

    def step(self, *scheduled: ScheduledRequest, tokens: int = 0, decoded: int = 0) -> Step:
        return self.side.build(scheduled, tokens, decoded)

    def load(self, request: Request, computed: int = 0, table: Sequence[int] = ()) -> Step:
        """Match, allocate and build: what the workers are told."""
        tokens, _ = self.side.match(request, PLAIN, computed)
        assert tokens
        blocks = list(table) or list(range(1, 1 + -(-request.num_tokens // BLOCK)))
        self.side.allocated(request, [blocks], tokens)
        return self.step()

    def ended(self, job: int, pages: int, seconds: float = 0.0) -> None:
        report = Report()
        report.end(job, pages, seconds)
        self.side.reported(report)
