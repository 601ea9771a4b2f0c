"""Goal: whatever changes KV changes the name of its pages; what an engine imports is small."""

import subprocess
import sys

import msgspec
import pytest

from kvstore.engine.identity import (
    EngineFacts,
    Group,
    chain_seed,
    cover,
    shard_specs,
    space_identity,
)
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.page import digest_seed
from tests.engine.engine import FULL

FACTS = EngineFacts(
    engine="e", model="m", revision="r", kv_dtype="bfloat16", settings={"dtype": "bf16"},
    version="0.32", isa="x86_64/vec", ranks=2, groups=(FULL,),
)  # fmt: skip


def names(facts, page_tokens=64, tenant="default"):
    """What names a page besides its key, of every rank."""
    space = space_identity(facts, tenant, page_tokens)
    return [digest_seed(space, shard) for shard in shard_specs(facts, page_tokens)]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"}, {"revision": "s"}, {"kv_dtype": "float16"}, {"settings": {"dtype": "f16"}},
        {"engine": "f"},
        {"settings": {"dtype": "bf16", "quantization": "awq"}}, {"version": "0.33"},
        {"isa": "x86_64/amx"}, {"groups": (msgspec.structs.replace(FULL, kv_heads=4),)},
        {"stages": ((0, 3), (3, 4))},
        {"groups": (msgspec.structs.replace(FULL, layers=5),)},
        {"groups": (msgspec.structs.replace(FULL, block_bytes=256),)},
        {"groups": (msgspec.structs.replace(FULL, block_tokens=16),)},
        {"groups": (msgspec.structs.replace(FULL, window_tokens=128),)},
        {"groups": (msgspec.structs.replace(FULL, state=True),)},
    ],
)  # fmt: skip
def test_whatever_changes_kv_changes_the_name_of_every_page(change):
    assert not set(names(FACTS)) & set(names(msgspec.structs.replace(FACTS, **change)))


def test_pages_of_windows_in_all_layers_that_may_be_wrong_are_not_found():
    """Before, what was missing of such a window was computed on other bytes, and then stored."""
    window = msgspec.structs.replace(FULL, window_tokens=128)
    spaces = {
        space_identity(msgspec.structs.replace(FACTS, groups=groups), "default", 64).revision
        for groups in [(window,), (FULL,), (FULL, window)]
    }

    assert len(spaces) == 2, "the others have their names as ever"


def test_heads_tenants_and_page_sizes_have_pages_of_their_own():
    assert len(set(names(FACTS))) == 2
    assert not set(names(FACTS)) & set(names(FACTS, page_tokens=128))
    assert not set(names(FACTS)) & set(names(FACTS, tenant="other"))
    assert names(FACTS) == names(msgspec.structs.replace(FACTS))


def of_ranks(ranks, **changes):
    """The same model on another number of ranks, which hold blocks of other sizes."""
    held = max(1, FULL.kv_heads // ranks)
    group = msgspec.structs.replace(FULL, block_bytes=64 * held)
    return msgspec.structs.replace(FACTS, ranks=ranks, groups=(group,), **changes)


def test_any_number_of_ranks_has_the_same_pages():
    assert names(of_ranks(1)) == names(of_ranks(2)) == names(of_ranks(4)) == names(of_ranks(8))


def test_ranks_whose_heads_cannot_be_told_apart_share_with_as_many_ranks_only():
    whole = [names(of_ranks(ranks, whole_ranks=True)) for ranks in (1, 2)]
    assert not set(whole[0]) & set(whole[1])


def test_a_block_that_is_not_made_of_whole_heads_is_refused():
    group = msgspec.structs.replace(FULL, kv_heads=3)
    with pytest.raises(InvalidArgument, match="128 are not those of 3 heads"):
        names(msgspec.structs.replace(FACTS, ranks=1, groups=(group,)))


def test_shards_are_found_by_stage_rank_and_group():
    group = Group(index=3, layers=4, block_tokens=32, block_bytes=128, kv_heads=4)
    facts = msgspec.structs.replace(FACTS, groups=(FULL, group), stages=((0, 3), (3, 4)))
    shards = shard_specs(facts, 64)

    found = [shards[one.shard] for one in cover(facts, rank=1, group=1, stage=1)]

    assert [(one.group, one.heads, one.layers) for one in found] == [
        ("group3", (2, 3), (3, 4)), ("group3", (3, 4), (3, 4)),
    ]  # fmt: skip
    assert facts.workers == 4


def test_a_dtype_that_the_store_does_not_know_is_refused():
    with pytest.raises(InvalidArgument, match="kv_dtype"):
        names(msgspec.structs.replace(FACTS, kv_dtype="int3"))


def test_the_seed_of_a_chain_tells_kinds_and_values_apart():
    parts = [
        [], [("lora", "a")], [("cache_salt", "a")], [("lora", "ab")],
        [("lora", "a"), ("cache_salt", "b")], [("lora", "acache_saltb")],
    ]  # fmt: skip

    assert chain_seed([]) == b""
    assert len({chain_seed(part) for part in parts}) == len(parts)


FORBIDDEN = ("numba", "llvmlite", "google.protobuf", "grpc", "zmq", "fastapi", "uvloop", "vllm")


def test_what_an_engine_imports_is_small():
    program = (
        "import sys, engine_adapters.vllm, kvstore.engine.scheduler,"
        " kvstore.engine.worker, kvstore.engine.start, kvstore.client.store\n"
        f"print([m for m in {FORBIDDEN} if m in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )

    assert answer.stdout.strip() == "[]"
