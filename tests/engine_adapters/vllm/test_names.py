"""Options are checked by name; what vLLM says besides tokens changes the name of pages."""

import os
from hashlib import sha256
from types import SimpleNamespace

import msgspec
import pytest

from engine_adapters.vllm import names
from engine_adapters.vllm.names import (
    ENGINE,
    ContentHash,
    DoubtfulImages,
    adapter_settings,
    adapter_weights,
    config_digest,
    has_strong_hashes,
    length_settings,
    mark_contents,
    media_settings,
    names_of,
    note_config,
    note_contents,
    page_key,
    reads_model_files,
    weights_settings,
)
from engine_adapters.vllm.options import page_tokens_of, read_options
from kvstore.engine.chain import ForeignChain
from kvstore.engine.identity import chain_seed
from kvstore.engine.options import LoadOrder
from kvstore.engine.requests import PromptScope
from kvstore.protocol.errors import ConfigError
from tests.engine.engine import FULL


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_engines_that_allow_longer_requests_share_nothing_where_that_changes_every_position(kind):
    plain = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}
    long = {"text_config": {"rope_parameters": {"full": {"rope_type": kind}}}}

    assert length_settings(plain, 4096) == length_settings(plain, 131_072) == {}
    assert length_settings(long, 4096) == length_settings(long, 4096)
    assert length_settings(long, 4096) != length_settings(long, 131_072)


def blocks_of(tokens):
    return msgspec.structs.replace(FULL, block_tokens=tokens)


def test_pages_that_earlier_versions_have_stored_are_still_found():
    block, seed = bytes(32), chain_seed([("cache_salt", "a")])
    chain = ForeignChain(ENGINE, 1, seed)

    assert ENGINE == "vllm"
    assert chain.extend([block])[0] == sha256(b"kvstore vllm block hash\0" + seed + block).digest()
    key = page_key(block + bytes(4))
    assert key is not None
    assert key.packed == sha256(b"kvstore vllm tier\0" + block + bytes(4)).digest()


def asked(**fields):
    """A request of vLLM's, as far as its name goes."""
    plain = {"lora_request": None, "cache_salt": None, "mm_features": [], "prompt_embeds": None,
             "resumable": False, "sampling_params": BY_CONTENT}  # fmt: skip
    return SimpleNamespace(**plain | fields)


def adapter(name, path, number=1, *, in_place=False):
    return SimpleNamespace(
        lora_name=name, lora_path=str(path), lora_int_id=number, load_inplace=in_place
    )


def image(identifier="0f" * 32):
    return SimpleNamespace(identifier=identifier, mm_hash=identifier)


SECRET = "a secret"
BY_CONTENT = SimpleNamespace(extra_args={"kvstore_contents": SECRET})


def media(**fields):
    plain = {"mm_processor_cache_gb": 4.0, "mm_processor_kwargs": None, "media_io_kwargs": {},
             "video_pruning_rate": None, "video_pruning_method": "evs"}  # fmt: skip
    return SimpleNamespace(**plain | fields)


def named(request, *, strong_hashes):
    return names_of(request, strong_hashes=strong_hashes, secret=SECRET)


def seed_of(request):
    return chain_seed(named(request, strong_hashes=True).parts)


def test_what_a_request_says_besides_tokens_names_its_kv(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter.safetensors").write_bytes(b"weights")
    requests = [
        asked(), asked(cache_salt="a"), asked(cache_salt="b"),
        asked(lora_request=adapter("l", "/nowhere")), asked(lora_request=adapter("m", "/nowhere")),
        asked(lora_request=adapter("l", "/elsewhere")),
        asked(lora_request=adapter("l", tmp_path / "a")),
        asked(lora_request=adapter("l", "/nowhere"), cache_salt="a"),
        asked(cache_salt="\ud800"), asked(cache_salt="\ud801"),
    ]  # fmt: skip
    seeds = {seed_of(one) for one in requests}

    assert len(seeds) == len(requests)
    assert b"" in seeds
    assert named(requests[6], strong_hashes=True).usable


def test_an_adapter_that_is_loaded_again_is_looked_at_again(tmp_path):
    file = tmp_path / "adapter.safetensors"
    file.write_bytes(b"weights")
    before = seed_of(asked(lora_request=adapter("l", tmp_path, 7)))
    file.write_bytes(b"other weights")

    assert seed_of(asked(lora_request=adapter("l", tmp_path, 7))) == before, "vLLM has the old ones"
    assert seed_of(asked(lora_request=adapter("l", tmp_path, 8))) != before


def test_file_names_of_an_adapter_may_be_any_bytes(tmp_path):
    (tmp_path / "adapter.safetensors").write_bytes(b"weights")
    os.utime(tmp_path / "adapter.safetensors", ns=(1, 2))
    before = adapter_weights(str(tmp_path), 31)
    path = os.fsencode(tmp_path) + b"/Anh\xe4nge.json"
    os.close(os.open(path, os.O_CREAT))

    named_so = named(asked(lora_request=adapter("l", tmp_path, 32)), strong_hashes=True)
    assert named_so.usable
    assert adapter_weights(str(tmp_path), 32) != before
    assert before == "d77dd1f3d0e64d00297bc5bbc7bde58d", "as earlier versions named it"


def test_kv_of_an_adapter_whose_weights_are_unknown_has_no_name(tmp_path):
    (tmp_path / "adapter.safetensors").symlink_to(tmp_path / "gone")
    wrong = [
        adapter("l", "an-owner/an-adapter"),  # at the hub, whatever it is there now
        adapter("l", tmp_path), adapter("l", "~nobody-at-all/a"), adapter("l", "a\0b"),
    ]  # fmt: skip
    (tmp_path / "good").mkdir()
    wrong.append(adapter("l", tmp_path / "good", in_place=True))

    for one in wrong:
        assert not named(asked(lora_request=one), strong_hashes=True).usable, one
    assert named(asked(lora_request=adapter("l", tmp_path / "good")), strong_hashes=True).usable


def test_inputs_that_are_no_tokens_are_named_only_by_hashes_that_can_be_trusted():
    for fields in ({"mm_features": [image()]}, {"prompt_embeds": [0.5]}):
        assert named(asked(**fields), strong_hashes=True) == PromptScope((), True, True)
        assert not named(asked(**fields), strong_hashes=False).usable
    assert not named(asked(resumable=True), strong_hashes=True).usable
    assert named(asked(), strong_hashes=False) == PromptScope((), False, True)


def test_an_image_is_named_by_its_content_or_not_at_all():
    for name in ("renderer0-mm-1-image-0", "the logo", "0f" * 31, ""):
        features = [image(), image(name)]
        assert not named(asked(mm_features=features), strong_hashes=True).usable, name
    for name in ("0f" * 32, "0f" * 64, "an adapter:" + "0f" * 32):
        assert named(asked(mm_features=[image(name)]), strong_hashes=True).usable, name


NOT_NOTED = (None, {}, {"other": 1}, {"kvstore_contents": True}, {"kvstore_contents": ""})


@pytest.mark.parametrize(
    "parameters", [None, *(SimpleNamespace(extra_args=one) for one in NOT_NOTED)]
)
def test_an_image_is_not_named_by_its_content_unless_that_was_noted(parameters):
    request = asked(mm_features=[image()], sampling_params=parameters)
    assert not named(request, strong_hashes=True).usable
    embedded = asked(prompt_embeds=[0.5], sampling_params=parameters)
    assert named(embedded, strong_hashes=True).usable


def test_a_client_that_names_an_image_does_not_name_its_kv_whatever_the_name():
    content, other = "0f" * 32, "1e" * 32
    hashes = {"image": [content, "the logo", content], "video": [other]}
    given_names = {"image": [None, "the logo", ContentHash(content)]}

    def usable(*identifiers, given=None):
        features = [image(one) for one in identifiers]
        request = asked(mm_features=features, sampling_params=SimpleNamespace(extra_args=given))
        note_contents(request, SECRET)
        assert {type(one) for one in sent(request)} == {str}, "msgspec sends no other strings"
        return named(request, strong_hashes=True).usable

    def sent(request):
        return [name for one in request.mm_features for name in (one.mm_hash, one.identifier)]

    marked = mark_contents(hashes, given_names)

    assert marked == {"image": [content, "the logo", f"named-{content}"], "video": [other]}
    first, second, third = marked["image"]
    assert usable(first)
    assert usable(first, *marked["video"])
    for wrong in (second, third, content):
        assert not usable(wrong)
        assert not usable(first, wrong)
        for said in (True, "a guess"):
            assert not usable(wrong, given={"kvstore_contents": said}), "the client says so"


def test_an_image_whose_name_came_from_elsewhere_before_is_not_believed(monkeypatch):
    """Under that name vLLM may have another image, and KV of it."""
    doubtful = DoubtfulImages(SECRET)
    said = SimpleNamespace(extra_args=None)
    honest, other = asked(mm_features=[image()]), asked(mm_features=[image("1e" * 32)])
    doubtful.note(honest)
    assert not doubtful.has(honest)

    doubtful.note(asked(mm_features=[image()], sampling_params=said))
    doubtful.note(asked(sampling_params=said))
    assert doubtful.has(honest)
    assert not doubtful.has(other)
    assert not doubtful.has(asked())

    adapted = asked(mm_features=[image("1e" * 32)], sampling_params=said)
    adapted.mm_features[0].identifier = "an adapter:" + "2d" * 32
    adapted.mm_features[0].mm_hash = None
    doubtful.note(adapted)
    assert doubtful.has(asked(mm_features=[image("2d" * 32)]))

    monkeypatch.setattr(names, "_DOUBTS_MAX", 3)
    for name in ("cat", "named-" + "0f" * 32, "x" * 1_000_000):
        doubtful.note(asked(mm_features=[image(name)], sampling_params=said))
    assert not doubtful.full, "names that are no hash are no other image's, and are not kept"
    assert not doubtful.has(other)
    monkeypatch.setattr(names, "_DOUBTS_MAX", 2)
    assert doubtful.full
    assert doubtful.has(other)
    assert not doubtful.has(asked())


def test_parameters_that_are_used_again_do_not_keep_the_note_of_another_request():
    parameters = SimpleNamespace(extra_args=None)
    for name, believed in ((ContentHash("0f" * 32), True), ("1e" * 32, False)):
        request = asked(mm_features=[image(name)], sampling_params=parameters)
        note_contents(request, SECRET)
        assert named(request, strong_hashes=True).usable == believed


def test_the_other_parameters_of_a_request_with_images_stay():
    given = {"kv_transfer_params": {"a": 1}}
    request = asked(mm_features=[image("cat")], sampling_params=SimpleNamespace(extra_args=given))
    note_contents(request, SECRET)
    assert request.sampling_params.extra_args == given
    for one in (asked(sampling_params=None), asked(sampling_params=SimpleNamespace())):
        note_contents(one, SECRET)
    no_generation = asked(mm_features=[image()], sampling_params=None)
    note_contents(no_generation, SECRET)
    assert not named(no_generation, strong_hashes=True).usable


def lora(**fields):
    plain = {"target_modules": None, "lora_dtype": "float16", "max_lora_rank": 16,
             "enable_tower_connector_lora": False}  # fmt: skip
    return SimpleNamespace(**plain | fields)


def test_servers_that_apply_adapters_otherwise_share_nothing():
    def settings(**fields):
        return adapter_settings(lora(**fields), "float16")

    assert settings() == settings(max_lora_rank=64) == adapter_settings(None, "float16") == {}
    assert settings(lora_dtype="auto") == {}
    other = [
        settings(target_modules=["q_proj"]), settings(target_modules=["v_proj"]),
        settings(lora_dtype="bfloat16"), settings(enable_tower_connector_lora=True),
    ]  # fmt: skip
    assert len({one["adapters"] for one in other}) == len(other)
    assert settings(target_modules=["a", "b"]) == settings(target_modules=["b", "a"])


def test_servers_that_make_other_weights_of_the_same_files_share_nothing():
    def settings(extra=None, **model):
        return weights_settings(
            SimpleNamespace(**model), SimpleNamespace(model_loader_extra_config=extra or {})
        )

    assert settings() == settings(quantization_config=None, code_revision=None) == {}
    assert settings({"enable_multithread_load": True, "num_threads": 8}) == {}
    other = [
        settings(quantization_config={"linear": "fp8"}),
        settings(quantization_config={"linear": "mxfp4"}),
        settings(code_revision="abc"), settings({"pattern": "a"}), settings({"pattern": "b"}),
    ]  # fmt: skip
    assert len({str(one) for one in other}) == len(other)


def test_only_formats_that_are_read_from_the_files_of_the_model_are_identified_by_them():
    def read(load_format, **model):
        load = SimpleNamespace(load_format=load_format)
        return reads_model_files(SimpleNamespace(**model), load)

    assert read("auto", model_weights="")
    assert read("runai_streamer")
    assert not read("runai_streamer", model_weights="s3://bucket/m")
    for name in ("tensorizer", "ipc_cache", "modelexpress", "a_plugin's"):
        assert not read(name), name


def test_what_building_a_model_changes_in_its_configuration_changes_no_name():
    def model(**values):
        return SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: dict(values)))

    noted = model(hidden=64, transformers_version="5")
    before = config_digest(noted)
    note_config(noted)
    noted.hf_config = model(hidden=64, max_model_len=4096).hf_config
    note_config(noted)

    assert config_digest(noted) == before == config_digest(model(hidden=64))
    assert config_digest(model(hidden=65)) != before


def test_block_hashes_without_any_cache_of_images_are_not_trusted():
    def trusted(algorithm, *, prefixes, gb):
        cache = SimpleNamespace(prefix_caching_hash_algo=algorithm, enable_prefix_caching=prefixes)
        return has_strong_hashes(cache, media(mm_processor_cache_gb=gb))

    assert trusted("sha256", prefixes=True, gb=0.0)
    assert trusted("sha256_cbor", prefixes=False, gb=0.5)
    assert not trusted("sha256", prefixes=False, gb=0.0), "vLLM counts images then"
    assert not trusted("xxhash", prefixes=True, gb=4.0)
    off = SimpleNamespace(prefix_caching_hash_algo="sha256", enable_prefix_caching=False)
    assert has_strong_hashes(off, None), "there are no images"


def test_servers_that_make_something_else_of_an_image_share_nothing():
    plain = media_settings(media())
    other = [
        media_settings(media(**fields))
        for fields in (
            {"mm_processor_kwargs": {"do_normalize": False}},
            {"mm_processor_kwargs": {"do_rescale": False}},
            {"media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 0]}}},
            {"video_pruning_rate": 0.5},
            {"video_pruning_rate": 0.5, "video_pruning_method": "vidcom2"},
        )
    ]

    assert plain == media_settings(None) == {}, "names that earlier versions have used"
    assert len({one["media"] for one in other}) == len(other)


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
    with pytest.raises(ConfigError, match="extra_config: page_tokens: 96 is not a multiple"):
        page_tokens_of(read_options({"page_tokens": 96}), [FULL, blocks_of(64)], on_cpu=False)


def test_pages_are_shorter_on_a_cpu_unless_blocks_are_long():
    default, chosen = read_options({}), read_options({"page_tokens": 64})

    blocks = [[blocks_of(tokens)] for tokens in (16, 32, 48, 64, 128)]
    assert [page_tokens_of(default, one, on_cpu=True) for one in blocks] == [32, 32, 48, 64, 128]
    assert [page_tokens_of(default, one, on_cpu=False) for one in blocks] == [64, 64, 96, 64, 128]
    assert page_tokens_of(default, [blocks_of(48), blocks_of(32)], on_cpu=True) == 96
    assert page_tokens_of(chosen, [FULL], on_cpu=True) == 64, "what is set holds"


def test_layerwise_loads_are_refused_where_the_engine_could_not_be_told_that_one_failed():
    assert page_tokens_of(read_options({"load": "layerwise"}), [FULL], on_cpu=False) == 64
    assert page_tokens_of(read_options({}), [FULL, blocks_of(128)], on_cpu=False) == 128
    with pytest.raises(ConfigError, match="kv_connector_extra_config: load: layerwise"):
        page_tokens_of(read_options({"load": "layerwise"}), [FULL, FULL], on_cpu=False)
    window = msgspec.structs.replace(FULL, window_tokens=128)
    assert page_tokens_of(read_options({}), [window], on_cpu=False) == 64
    with pytest.raises(ConfigError, match="load: layerwise: the engine's KV has a window"):
        page_tokens_of(read_options({"load": "layerwise"}), [window], on_cpu=False)


def test_without_options_everything_has_a_default():
    options = read_options({})

    assert options.address == "unix:///run/kvstore/kvstore.sock"
    assert options.load is LoadOrder.ASYNC
