"""The scheduler side's view of an engine and its requests. Plain values and protocols."""

import functools
import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from kvstore.engine.identity import Group

_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.tensors", "*.json", "*.py")
"""Weights, and what is made of them: configuration, and code of the model."""


class Request(Protocol):
    """The attributes of an engine's request that the scheduler side reads."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    kv_transfer_params: dict[str, Any] | None
    block_hashes: Sequence[bytes]

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Tokens of prompt and output."""
        ...


class PromptScope(NamedTuple):
    """The identity of a request's KV besides the tokens.

    Attributes:
        parts: (kind, value) pairs: LoRA adapter, salt.
        foreign: it has inputs other than tokens.
        usable: False if its KV cannot be identified: it is neither loaded nor stored.
    """

    parts: tuple[tuple[str, str], ...] = ()
    foreign: bool = False
    usable: bool = True


class BlockHolder(Protocol):
    """References to blocks in the engine's own reference counts; implemented by each adapter."""

    def hold(self, blocks: Sequence[int]) -> None:
        """Add one reference to each."""
        ...

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one reference from each."""
        ...

    def forget(self, blocks: Sequence[int]) -> None:
        """Remove these from the engine's prefix cache."""
        ...

    def free_soon(self, blocks: Iterable[int]) -> bool:
        """Whether one of these has no other reference."""
        ...


class ScheduledRequest(NamedTuple):
    """One scheduled request of a step.

    Attributes:
        request_id: id of the request.
        tokens: tokens whose KV is in its blocks after this step.
        blocks: its block table, by the engine's group index.
        begin: maximum tokens whose KV was there before this step.
        written: end of the positions that this step writes, drafts included.
        starts: its first step with these blocks.
    """

    request_id: str
    tokens: int
    blocks: Sequence[Sequence[int]]
    begin: int = 0
    written: int = 0
    starts: bool = False


class Role(NamedTuple):
    """What the engine may do with the store."""

    loads: bool
    stores: bool


class Setup(NamedTuple):
    """The properties of an engine.

    Attributes:
        engine: name of the engine, as in ``EngineFacts.engine``.
        groups: the KV groups that are stored.
        page_tokens: tokens per page.
        hash_tokens: tokens per block that the engine hashes.
        ranks: number of workers that report each job.
        role: allowed directions.
        takes_whole: whether the KV of all tokens of a request may be loaded asynchronously. The
            engine then recomputes the last token, for its logits, and overwrites its KV in the
            loaded block. Otherwise the last token is left to the engine. This is required if the
            engine discards earlier KV or states (windows, chunked attention, states), because that
            token needs the KV or state one token further back.
        drafts: the engine's KV includes the KV of a draft layer, which depends on the next token.
            Such an engine has one group.
        recomputes: the engine computes what others should have loaded for a request that it
            computes, and did not. Otherwise what follows is wrong.
    """

    engine: str
    groups: Sequence[Group]
    page_tokens: int
    hash_tokens: int
    ranks: int
    role: Role
    takes_whole: bool = False
    drafts: bool = False
    recomputes: bool = True

    def loadable_tokens(self, tokens: int, *, asynchronous: bool) -> int:
        """Maximum number of leading tokens to load for a request of ``tokens``."""
        # Of a request of one token, none would count as computed: the engine would take it for one
        # that was never looked up.
        return tokens if self.takes_whole and asynchronous and tokens > 1 else tokens - 1

    def can_name(self, scope: PromptScope) -> bool:
        """Whether the KV of such a request can be named.

        The engine's block hashes do not cover the token after a block.
        """
        return scope.usable and not (self.drafts and scope.foreign)


def weights_fingerprint(path: str) -> str:
    """A hash of the names, sizes and modification times of the weights in a folder, now.

    Returns:
        32 hex digits; empty if this is not a folder on this machine.

    Raises:
        OSError: the folder cannot be read.
    """
    return _fingerprint(Path(path)) if Path(path).is_dir() else ""


@functools.lru_cache(maxsize=1024)
def files_fingerprint(folder: Path) -> str:
    """The :func:`weights_fingerprint` of a folder at the time of the first call."""
    return _fingerprint(folder)


def _fingerprint(folder: Path) -> str:
    found = sorted({path for pattern in _WEIGHTS for path in folder.rglob(pattern)})
    stats = [
        (_plain_name(path.relative_to(folder)), (stat := path.stat()).st_size, stat.st_mtime_ns)
        for path in found
    ]
    return hashlib.sha256(msgspec.msgpack.encode(stats)).hexdigest()[:32]


def _plain_name(path: Path) -> str | bytes:
    """The path as text if it is UTF-8, as in earlier versions; file names may be any bytes."""
    name = os.fsencode(path.as_posix())
    try:
        return name.decode()
    except UnicodeDecodeError:
        return name
