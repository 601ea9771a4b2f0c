"""What must be equal for two engines to share KV, and the names that follow from it. Pure.

Everything that decides what bytes a token's KV has, besides the tokens before it, ends up in one of
three names: the space (model, weights, dtype, page size, and a digest of all further settings), the
shard (rank, layers, layout of a block) or the seed of the chain (LoRA adapter, cache salt).
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from kvstore.errors import InvalidArgument
from kvstore.page import OpaqueLayout, ShardSpec, SpaceIdentity

KV_DTYPES: Final = {
    "float32": "float32", "float16": "float16", "bfloat16": "bfloat16",
    "float8_e4m3fn": "float8_e4m3", "float8_e5m2": "float8_e5m2", "uint8": "uint8",
}  # fmt: skip


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """One of the engine's KV cache groups: layers that share a block table.

    Attributes:
        index: its place in the engine's block tables.
        layers: how many layers it has.
        block_tokens: tokens in one of its blocks.
        block_bytes: bytes of one block of one layer.
        kv_heads: KV heads of one rank.
        window_tokens: sliding window; 0 = every token before is needed.
    """

    index: int
    layers: int
    block_tokens: int
    block_bytes: int
    kv_heads: int
    window_tokens: int = 0


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """An engine, as far as it decides what its KV is.

    Attributes:
        engine: its name; no other engine shares its blocks.
        model: name or path of the model.
        revision: names the weights.
        kv_dtype: torch's name of the element type in the KV tensors.
        settings: everything else that changes KV (quantisation, overrides of the model's
            configuration, …), name to value.
        version: the engine's version; blocks of another one are not shared.
        isa: what instruction set its blocks are packed for; empty when it does not matter.
        ranks: size of tensor parallelism.
        groups: what is stored of the engine's KV.
    """

    engine: str
    model: str
    revision: str
    kv_dtype: str
    settings: Mapping[str, str]
    version: str
    isa: str
    ranks: int
    groups: tuple[Group, ...]


def space_identity(facts: EngineFacts, tenant: str, page_tokens: int) -> SpaceIdentity:
    """The space of an engine's pages.

    Raises:
        InvalidArgument: the KV dtype is none that the store knows.
    """
    if facts.kv_dtype not in KV_DTYPES:
        raise InvalidArgument("kv_dtype", f"{facts.kv_dtype!r} is not supported")
    settings = hashlib.sha256(msgspec.msgpack.encode(sorted(facts.settings.items()))).hexdigest()
    return SpaceIdentity(
        tenant=tenant,
        model=facts.model,
        revision=f"{facts.revision}+{settings[:32]}",
        kv_dtype=KV_DTYPES[facts.kv_dtype],
        page_tokens=page_tokens,
    )


def shard_specs(facts: EngineFacts, page_tokens: int) -> list[ShardSpec]:
    """Every shard of the engine, rank by rank, in each rank group by group."""
    return [
        _shard_spec(facts, group, rank, page_tokens)
        for rank in range(facts.ranks)
        for group in facts.groups
    ]


def shard_index(facts: EngineFacts, rank: int, group: int) -> int:
    """Where the ``group``-th group of a rank is in :func:`shard_specs`."""
    return rank * len(facts.groups) + group


def window_pages(group: Group, page_tokens: int) -> int:
    """What a hit needs of a group: the last so many pages; 0 = all."""
    return -(-(group.window_tokens - 1) // page_tokens) if group.window_tokens > 1 else 0


def _shard_spec(facts: EngineFacts, group: Group, rank: int, page_tokens: int) -> ShardSpec:
    layout = OpaqueLayout(
        engine=facts.engine,
        version=f"{facts.version}/tp{facts.ranks}",
        isa=facts.isa,
        block_tokens=group.block_tokens,
        block_bytes=group.block_bytes,
    )
    return ShardSpec(
        layout=layout,
        layers=(0, group.layers),
        heads=(rank * group.kv_heads, (rank + 1) * group.kv_heads),
        group=f"group{group.index}",
        window_pages=window_pages(group, page_tokens),
    )


def chain_seed(parts: Sequence[tuple[str, str]]) -> bytes:
    """The seed of a request's chain: empty when nothing but tokens names its KV.

    Args:
        parts: kind and value of what else does: the LoRA adapter, the salt.
    """
    return msgspec.msgpack.encode(list(parts)) if parts else b""
