"""The identity of an engine's KV: space, shards and chain seeds. Pure.

Everything that determines the bytes of a token's KV, besides the tokens before it, is part of one
of three names: the space (model, weights, dtype, page size, and a digest of all other settings),
the shard (heads, layers, layout of a block) or the seed of the chain (LoRA adapter, cache salt).
Neither the number of ranks nor the rank is part of one: a shard identifies what is stored, not
which rank stores it. ``ranks`` says which rank holds which shards.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from kvstore.engine.ranks import HeadSplit, HeldShard
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.page import OpaqueLayout, ShardSpec, SpaceIdentity

KV_DTYPES: Final = {
    "float32": "float32", "float16": "float16", "bfloat16": "bfloat16",
    "float8_e4m3fn": "float8_e4m3", "float8_e5m2": "float8_e5m2", "uint8": "uint8",
}  # fmt: skip


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """One of the engine's KV cache groups: layers that share a block table.

    Attributes:
        index: index of the group in the engine's block tables.
        layers: number of the group's layers, over all pipeline stages.
        block_tokens: tokens per block.
        block_bytes: bytes of one block of one layer on one rank.
        kv_heads: KV heads of the model, over all ranks; 1 for latents (MLA).
        window_tokens: sliding window; 0 = all tokens before are needed.
        state: a block has no KV of its tokens, but one state (Mamba, linear attention) after its
            last token, or after fewer if the engine has not got there; a page is one block, and a
            hit needs only its last page.
    """

    index: int
    layers: int
    block_tokens: int
    block_bytes: int
    kv_heads: int
    window_tokens: int = 0
    state: bool = False


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about an engine that determine its KV.

    Attributes:
        engine: name of the engine's program; engines with other names do not share its blocks.
        model: name or path of the model.
        revision: identifies the weights.
        kv_dtype: torch's name of the element type in the KV tensors.
        settings: everything else that changes KV (quantisation, overrides of the model's
            configuration, …), name → value.
        version: the engine's version; blocks are not shared between versions.
        isa: instruction set for which its blocks are packed; empty if it does not matter.
        ranks: size of tensor parallelism.
        groups: the KV groups that are stored.
        whole_ranks: the heads of a rank cannot be separated in a block, or need not be: only
            engines with the same number of ranks share pages.
        stages: half-open range of the layers of each pipeline stage; empty = one stage.
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
    whole_ranks: bool = False
    stages: tuple[tuple[int, int], ...] = ()

    @property
    def workers(self) -> int:
        """Number of ranks of all pipeline stages."""
        return self.ranks * max(1, len(self.stages))

    def split(self, group: Group) -> HeadSplit:
        """How the heads of a group are divided among the ranks."""
        return HeadSplit(group.kv_heads, self.ranks, self.whole_ranks)


def space_identity(facts: EngineFacts, tenant: str, page_tokens: int) -> SpaceIdentity:
    """The space of an engine's pages.

    Raises:
        InvalidArgument: the store does not support the KV dtype.
    """
    if facts.kv_dtype not in KV_DTYPES:
        raise InvalidArgument("kv_dtype", f"{facts.kv_dtype!r} is not supported")
    named = dict(facts.settings)
    if len(facts.groups) == 1 and facts.groups[0].window_tokens:
        # Names without this may have KV that was computed behind a window loaded in part.
        named["window"] = "loaded whole"
    settings = hashlib.sha256(msgspec.msgpack.encode(sorted(named.items()))).hexdigest()
    return SpaceIdentity(
        tenant=tenant,
        model=facts.model,
        revision=f"{facts.revision}+{settings[:32]}",
        kv_dtype=KV_DTYPES[facts.kv_dtype],
        page_tokens=page_tokens,
    )


class Covered(NamedTuple):
    """A shard that a rank holds.

    Attributes:
        shard: index of the shard in :func:`shard_specs`.
        held: the shard's heads at the rank, and the rank's turn to write pages.
    """

    shard: int
    held: HeldShard


def shard_specs(facts: EngineFacts, page_tokens: int) -> list[ShardSpec]:
    """All shards of the engine, ordered by pipeline stage, then by group, then by heads.

    Raises:
        InvalidArgument: the heads of a group cannot be divided among the ranks.
    """
    return [
        _shard_spec(facts, group, layers, heads, page_tokens)
        for stage in range(max(1, len(facts.stages)))
        for group in facts.groups
        for layers in [facts.stages[stage] if facts.stages else (0, group.layers)]
        for heads in facts.split(group).groups()
    ]


def cover(facts: EngineFacts, rank: int, group: int, stage: int = 0) -> list[Covered]:
    """The shards that a rank holds of a group, in the order of its heads.

    Args:
        facts: facts of the engine.
        rank: rank in the tensor-parallel group, from 0.
        group: index of the KV cache group in ``facts.groups``.
        stage: pipeline stage of the rank, from 0.
    """
    counts = [len(facts.split(one).groups()) for one in facts.groups]
    first = stage * sum(counts) + sum(counts[:group])
    held = facts.split(facts.groups[group]).cover(rank)
    return [Covered(first + one.number, one) for one in held]


def window_pages(group: Group, page_tokens: int) -> int:
    """Number of last pages of a group that a hit needs; 0 = all."""
    if group.state:
        return 1
    return -(-(group.window_tokens - 1) // page_tokens) if group.window_tokens > 1 else 0


def _shard_spec(
    facts: EngineFacts, group: Group, layers: tuple[int, int], heads: tuple[int, int],
    page_tokens: int,
) -> ShardSpec:  # fmt: skip
    split = facts.split(group)
    head_bytes, rest = divmod(group.block_bytes, split.rank_heads)
    if rest:
        what = f"{group.block_bytes} are not those of {split.rank_heads} heads"
        raise InvalidArgument("block_bytes", what)
    layout = OpaqueLayout(
        engine=facts.engine,
        # The number of heads: where it is not the same, neither is what head 1 means.
        version=f"{facts.version}/heads{group.kv_heads}",
        isa=facts.isa,
        block_tokens=group.block_tokens,
        block_bytes=head_bytes * split.group_heads,
    )
    return ShardSpec(
        layout=layout,
        layers=layers,
        heads=heads,
        group=f"group{group.index}",
        window_pages=window_pages(group, page_tokens),
    )


def chain_seed(parts: Sequence[tuple[str, str]]) -> bytes:
    """The seed of a request's chain; empty if only tokens determine its KV.

    Args:
        parts: (kind, value) pairs of other inputs: the LoRA adapter, then the salt.
    """
    if not parts:
        return b""
    try:
        return msgspec.msgpack.encode(list(parts))
    except UnicodeEncodeError:  # a client may send half of a surrogate pair
        raw = [(kind, value.encode(errors="surrogatepass")) for kind, value in parts]
        return msgspec.msgpack.encode(raw)


def lora_parts(name: str, path: str, weights: str) -> tuple[tuple[str, str], ...]:
    """The parts of a chain's seed for a LoRA adapter.

    Args:
        name: name of the adapter.
        path: path from which the engine has loaded the adapter.
        weights: :func:`kvstore.engine.requests.weights_fingerprint` of the adapter.
    """
    return (("lora", name), ("lora_path", path), ("lora_files", weights))


def salt_parts(salt: str) -> tuple[tuple[str, str], ...]:
    """The parts of a chain's seed for a cache salt; none if it is empty."""
    return (("cache_salt", salt),) if salt else ()
