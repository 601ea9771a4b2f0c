"""Events of a small cluster and prompts for it, the same in every run.

``recorded_views.json`` has what the index of 2026-11 (a bit for each worker in each slot of one
table, engines' hashes mapped to prefix keys) said of them, and what was decided.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from kvstore.protocol.page import page_keys

RECORDED = Path(__file__).with_name("recorded_views.json")
PAGE_TOKENS = 4
SPACE = "cd" * 32
MODEL = "m"
NODES = ("n0", "n1")
STEPS = 120
PROMPT_PAGES = 24


@dataclass(frozen=True)
class RecordedEngine:
    """An engine; one with ``own`` hashes publishes them with tokens, others prefix keys."""

    id: str
    role: str
    node: str | None
    own: bool


ENGINES = (
    RecordedEngine("p0", "prefill", "n0", own=False),
    RecordedEngine("p1", "prefill", "n1", own=True),
    RecordedEngine("p2", "prefill", None, own=True),
    RecordedEngine("d0", "decode", "n0", own=False),
    RecordedEngine("d1", "decode", "n1", own=True),
    RecordedEngine("x0", "mixed", "n1", own=False),
)


@dataclass(frozen=True)
class RecordedStep:
    """Payloads that arrive, by worker, and then a prompt."""

    payloads: list[tuple[str, bytes]]
    tokens: list[int]
    in_flight: dict[str, int]


def _payload(*events: dict[str, object]) -> bytes:
    return msgspec.msgpack.encode([1.0, list(events), None])


def _stored(tokens: np.ndarray, first: int, last: int, medium: str, *, own: bool) -> dict:
    keys = page_keys(tokens, PAGE_TOKENS)
    hashes: list[object] = [bytes(key) for key in keys]
    if own:
        hashes = [hash_of(key) for key in hashes]
    event: dict[str, object] = {
        "type": "BlockStored",
        "block_hashes": hashes[first:last],
        "parent_block_hash": hashes[first - 1] if first else None,
        "token_ids": tokens[first * PAGE_TOKENS : last * PAGE_TOKENS].tolist() if own else [],
        "block_size": PAGE_TOKENS,
        "medium": medium,
        "lora_id": None,
        "lora_name": None,
    }
    return event if own else {**event, "space": SPACE, "shard": 0}


def _removed(tokens: np.ndarray, first: int, medium: str, *, own: bool) -> dict:
    stored = _stored(tokens, first, first + 1, medium, own=own)
    kept = ("block_hashes", "medium", "space", "shard")
    return {"type": "BlockRemoved"} | {name: stored[name] for name in kept if name in stored}


def hash_of(key: object) -> int:
    """An engine's own hash of a block, which is no part of our key."""
    assert isinstance(key, bytes)
    return int.from_bytes(key[8:16], "little") ^ 0x5555


def steps() -> Iterator[RecordedStep]:
    """All steps."""
    chance = random.Random(13)
    prompts = []
    for number in range(6):
        shared = prompts[number % 2][: chance.randrange(4, 60)] if number > 1 else []
        rest = [chance.randrange(1000) for _ in range(PROMPT_PAGES * PAGE_TOKENS - len(shared))]
        prompts.append([*shared, *rest])
    workers = [(f"engine/{one.id}", "GPU", one.own) for one in ENGINES]
    workers += [(f"node/{one}", medium, False) for one in NODES for medium in ("CPU", "STORAGE")]
    have: dict[tuple[str, str, int], int] = {}
    for _ in range(STEPS):
        payloads = []
        for worker, medium, own in chance.sample(workers, 3):
            chain = chance.randrange(len(prompts))
            tokens = np.array(prompts[chain], dtype=np.uint32)
            there = have.get((worker, medium, chain), 0)
            if there and chance.random() < 0.3:
                events = [_removed(tokens, there - 1, medium, own=own)]
                have[worker, medium, chain] = there - 1
            else:
                last = min(PROMPT_PAGES, there + chance.randrange(1, 7))
                if last == there:
                    continue
                events = [_stored(tokens, there, last, medium, own=own)]
                have[worker, medium, chain] = last
            payloads.append((worker, _payload(*events)))
        tokens = chance.choice(prompts)[: chance.randrange(4, PROMPT_PAGES * PAGE_TOKENS)]
        in_flight = {one.id: chance.randrange(0, 4) for one in ENGINES}
        yield RecordedStep(payloads, tokens, in_flight)
