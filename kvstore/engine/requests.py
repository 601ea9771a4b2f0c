"""What the scheduler side reads of an engine and its requests. Plain values and protocols."""

import functools
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from kvstore.engine.identity import Group

_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.json")


class Request(Protocol):
    """What is read of an engine's request: each adapter hands in its engine's own."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    kv_transfer_params: dict[str, Any] | None
    block_hashes: Sequence[bytes]

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and output."""
        ...


class PromptScope(NamedTuple):
    """What, besides tokens, names a request's KV.

    Attributes:
        parts: kind and value: LoRA adapter, salt.
        foreign: it has inputs that are no tokens.
        usable: False: its KV cannot be named, it is neither loaded nor stored.
    """

    parts: tuple[tuple[str, str], ...] = ()
    foreign: bool = False
    usable: bool = True


class BlockHolder(Protocol):
    """References to the engine's blocks, in its own counts: each adapter brings one."""

    def hold(self, blocks: Sequence[int]) -> None:
        """One more reference each."""
        ...

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less each."""
        ...

    def forget(self, blocks: Sequence[int]) -> None:
        """The engine's prefix cache must give these to nobody any more."""
        ...

    def free_soon(self, blocks: Iterable[int]) -> bool:
        """Whether one of these has no other reference."""
        ...


class ScheduledRequest(NamedTuple):
    """One scheduled request of a step.

    Attributes:
        request_id: which.
        tokens: whose KV is in its blocks after this step.
        blocks: its block table, by the engine's group index.
    """

    request_id: str
    tokens: int
    blocks: Sequence[Sequence[int]]


class Role(NamedTuple):
    """What the engine may do with the store."""

    loads: bool
    stores: bool


class Setup(NamedTuple):
    """What the engine is.

    Attributes:
        engine: its name, as in ``EngineFacts.engine``.
        groups: what is stored of its KV.
        page_tokens: tokens in a page.
        hash_tokens: tokens in a block that the engine hashes.
        ranks: workers that report each job.
        role: what may be done.
    """

    engine: str
    groups: Sequence[Group]
    page_tokens: int
    hash_tokens: int
    ranks: int
    role: Role


@functools.lru_cache(maxsize=1024)
def files_fingerprint(folder: Path) -> str:
    """Names, sizes and times of the weights in a folder, as one hash; looked at once."""
    found = sorted({path for pattern in _WEIGHTS for path in folder.glob(pattern)})
    stats = [(path.name, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in found]
    return hashlib.sha256(msgspec.msgpack.encode(stats)).hexdigest()[:32]
