"""Options are checked by name; whatever changes KV changes the name of its pages."""

import subprocess
import sys
from types import SimpleNamespace

import msgspec
import pytest

from kvstore.engine.identity import (
    EngineFacts,
    Group,
    chain_seed,
    length_settings,
    shard_index,
    shard_specs,
    space_identity,
)
from kvstore.engine.options import LoadOrder, read_options
from kvstore.engine.requests import Names, names_of
from kvstore.errors import ConfigError, InvalidArgument
from kvstore.page import digest_seed
from tests.engine.engine import FULL

FACTS = EngineFacts(
    model="m", revision="r", kv_dtype="bfloat16", settings={"dtype": "bf16"}, version="0.32",
    isa="x86_64/vec", ranks=2, groups=(FULL,),
)  # fmt: skip


def names(facts, page_tokens=64, tenant="default"):
    """What names a page besides its key, of every rank."""
    space = space_identity(facts, tenant, page_tokens)
    return [digest_seed(space, shard) for shard in shard_specs(facts, page_tokens)]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"}, {"revision": "s"}, {"kv_dtype": "float16"}, {"settings": {"dtype": "f16"}},
        {"settings": {"dtype": "bf16", "quantization": "awq"}}, {"version": "0.33"},
        {"isa": "x86_64/amx"}, {"ranks": 4},
        {"groups": (msgspec.structs.replace(FULL, layers=5),)},
        {"groups": (msgspec.structs.replace(FULL, block_bytes=256),)},
        {"groups": (msgspec.structs.replace(FULL, block_tokens=16),)},
        {"groups": (msgspec.structs.replace(FULL, window_tokens=128),)},
    ],
)  # fmt: skip
def test_whatever_changes_kv_changes_the_name_of_every_page(change):
    assert not set(names(FACTS)) & set(names(msgspec.structs.replace(FACTS, **change)))


def test_ranks_tenants_and_page_sizes_have_pages_of_their_own():
    assert len(set(names(FACTS))) == 2
    assert not set(names(FACTS)) & set(names(FACTS, page_tokens=128))
    assert not set(names(FACTS)) & set(names(FACTS, tenant="other"))
    assert names(FACTS) == names(msgspec.structs.replace(FACTS))


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_engines_that_allow_longer_requests_share_nothing_where_that_changes_every_position(kind):
    plain = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}
    long = {"text_config": {"rope_parameters": {"full": {"rope_type": kind}}}}

    assert length_settings(plain, 4096) == length_settings(plain, 131_072) == {}
    assert length_settings(long, 4096) == length_settings(long, 4096)
    assert length_settings(long, 4096) != length_settings(long, 131_072)


def test_shards_are_found_by_rank_and_group():
    group = Group(index=3, layers=2, block_tokens=32, block_bytes=64, kv_heads=1)
    facts = msgspec.structs.replace(FACTS, groups=(FULL, group))
    shards = shard_specs(facts, 64)

    found = shards[shard_index(facts, 1, 1)]

    assert (found.group, found.heads, found.layers) == ("group3", (1, 2), (0, 2))


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


def asked(**fields):
    """A request of vLLM's, as far as its name goes."""
    plain = {"lora_request": None, "cache_salt": None, "mm_features": [], "prompt_embeds": None,
             "resumable": False}  # fmt: skip
    return SimpleNamespace(**plain | fields)


def adapter(name, path):
    return SimpleNamespace(lora_name=name, lora_path=str(path))


def test_what_a_request_says_besides_tokens_names_its_kv(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter.safetensors").write_bytes(b"weights")
    requests = [
        asked(), asked(cache_salt="a"), asked(cache_salt="b"),
        asked(lora_request=adapter("l", "/nowhere")), asked(lora_request=adapter("m", "/nowhere")),
        asked(lora_request=adapter("l", "/elsewhere")),
        asked(lora_request=adapter("l", tmp_path / "a")),
        asked(lora_request=adapter("l", "/nowhere"), cache_salt="a"),
    ]  # fmt: skip
    seeds = {chain_seed(names_of(one, strong_hashes=True).parts) for one in requests}

    assert len(seeds) == len(requests)
    assert b"" in seeds


def test_inputs_that_are_no_tokens_are_named_only_by_hashes_that_can_be_trusted():
    for fields in ({"mm_features": ["an image"]}, {"prompt_embeds": [0.5]}):
        assert names_of(asked(**fields), strong_hashes=True) == Names((), True, True)
        assert not names_of(asked(**fields), strong_hashes=False).usable
    assert not names_of(asked(resumable=True), strong_hashes=True).usable
    assert names_of(asked(), strong_hashes=False) == Names((), False, True)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"adress": "unix:///x"}, "unknown key adress; did you mean address?"),
        ({"zzz": 1}, "unknown key zzz; known: address"),
        ({"address": "tcp://x"}, "address"),
        ({"address": "unix://relative"}, "address"),
        ({"page_tokens": -1}, "page_tokens"),
        ({"page_tokens": "many"}, "page_tokens"),
        ({"load": "eager"}, "load"),
        ({"lookup_timeout_ms": 0}, "lookup_timeout_ms"),
        ({"store_output": "perhaps"}, "store_output"),
        ({"tenant": ""}, "tenant"),
    ],
)
def test_a_wrong_option_is_refused_by_name(values, named):
    with pytest.raises(ConfigError) as raised:
        read_options(values)

    assert f"kv_connector_extra_config: {named}" in str(raised.value)


def test_pages_are_the_smallest_multiple_of_the_block_that_is_long_enough():
    options = read_options({})

    assert [options.page_tokens_for(block) for block in (16, 32, 48, 64, 128)] == [
        64, 64, 96, 64, 128,
    ]  # fmt: skip
    assert read_options({"page_tokens": 256}).page_tokens_for(128) == 256
    with pytest.raises(ConfigError, match="page_tokens: 96 is no multiple"):
        read_options({"page_tokens": 96}).page_tokens_for(64)


def test_layerwise_loads_are_refused_where_the_engine_could_not_be_told_that_one_failed():
    assert read_options({"load": "layerwise"}).load_for(1) is LoadOrder.LAYERWISE
    assert read_options({}).load_for(2) is LoadOrder.ASYNC
    with pytest.raises(ConfigError, match="load: layerwise"):
        read_options({"load": "layerwise"}).load_for(2)


def test_without_options_everything_has_a_default():
    options = read_options({})

    assert options.address == "unix:///run/kvstore/kvstore.sock"
    assert options.load is LoadOrder.ASYNC


FORBIDDEN = ("numba", "llvmlite", "google.protobuf", "grpc", "zmq", "fastapi", "uvloop", "vllm")


def test_what_an_engine_imports_is_small():
    program = (
        "import sys, engine_adapters.vllm, kvstore.engine.scheduler,"
        " kvstore.engine.worker, engine_adapters.vllm.selftest, kvstore.client.store\n"
        f"print([m for m in {FORBIDDEN} if m in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )

    assert answer.stdout.strip() == "[]"
