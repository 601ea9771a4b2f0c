"""Goal: one flag is enough, and a wrong option ends the start at once, with the sentence last.

vLLM is played by classes like its own; ``tests/vllm`` starts it.
"""

import gc
import os
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from engine_adapters.vllm import plugin
from engine_adapters.vllm.names import config_digest
from engine_adapters.vllm.options import layout_for, read_options
from kvstore.protocol.errors import ConfigError
from tests.engine_adapters.vllm.test_support import model_of

SECRET = "KVSTORE_VLLM_SECRET"
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def vllm(monkeypatch):
    """The classes of vLLM that the plugin uses."""
    monkeypatch.setenv(SECRET, "of another process")

    class KVTransferConfig:
        def __init__(self, connector, **extra):
            self.kv_connector, self.kv_connector_extra_config = connector, extra
            self.__post_init__()

        def __post_init__(self):
            self.checked = True

    class VllmConfig:
        def __init__(self, transfer, model, *, device="cpu", ranks=None, v2=False, ahead=False,
                     **cache):  # fmt: skip
            self.kv_transfer_config, self.model_config = transfer, model
            self.speculative_config = None
            self.device_config = SimpleNamespace(device_type=device)
            self.scheduler_config = SimpleNamespace(
                enable_chunked_prefill=True, async_scheduling=ahead
            )
            self.use_v2_model_runner = v2
            self.parallel_config = SimpleNamespace(**ranks or {})
            self.cache_config = SimpleNamespace(**{"block_size": 32, **cache})
            self.__post_init__()

        def __post_init__(self):
            self.checked = True

    class KVConnectorFactory:
        _registry = {}  # noqa: RUF012

        @classmethod
        def register_connector(cls, name, module, kind):
            assert name not in cls._registry
            cls._registry[name] = (module, kind)

    parts = {
        "vllm.config.kv_transfer": {"KVTransferConfig": KVTransferConfig},
        "vllm.config.vllm": {"VllmConfig": VllmConfig},
        "vllm.distributed.kv_transfer.kv_connector.factory": {
            "KVConnectorFactory": KVConnectorFactory
        },
    }
    for name in parts:
        steps = name.split(".")
        for end in range(1, len(steps) + 1):
            monkeypatch.setitem(sys.modules, ".".join(steps[:end]), ModuleType(steps[end - 1]))
    for name, content in parts.items():
        for key, value in content.items():
            setattr(sys.modules[name], key, value)
    return KVTransferConfig, KVConnectorFactory, VllmConfig


def test_the_entry_point_names_a_function_that_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = project["entry-points"]["vllm.general_plugins"]["kvstore"]
    # What tests with real engines have in the place of an installation:
    installed = ROOT / "tests/vllm/installed/kvstore_server-0.1.0.dist-info/entry_points.txt"
    assert f"kvstore = {named}\n" in installed.read_text()
    module, _, function = named.partition(":")
    assert getattr(import_module(module), function) is plugin.register


def test_the_connector_is_registered_once_however_often_vllm_loads_its_plugins(vllm):
    _, factory, _ = vllm
    for _ in range(3):
        plugin.register()
    assert factory._registry == {"KVStoreConnector": ("engine_adapters.vllm", "KVStoreConnector")}


def test_a_wrong_option_is_refused_when_vllm_reads_its_command_line(vllm):
    config, _, _ = vllm
    plugin.register()
    plugin.register()
    assert config("KVStoreConnector", address="unix:///run/x.sock").checked
    assert config("OtherConnector", adress=1).checked
    with pytest.raises(ConfigError, match="unknown key adress; did you mean address"):
        config("KVStoreConnector", adress="unix:///run/x.sock")


def test_a_connector_among_several_is_told_so_and_its_options_are_checked(vllm):
    config, _, whole = vllm
    plugin.register()
    llama = model_of("LlamaForCausalLM")
    ours, bare = (
        {"kv_connector": "KVStoreConnector", "kv_connector_extra_config": {"tenant": "a"}},
        {"kv_connector": "KVStoreConnector"},
    )
    other = {"kv_connector": "NixlConnector", "kv_connector_extra_config": {"a": 1}}
    for children in ([other, ours], [bare], [], None):
        assert whole(config("MultiConnector", connectors=children), llama).checked

    assert ours["kv_connector_extra_config"] == {"tenant": "a", "in_multi_connector": True}
    assert bare["kv_connector_extra_config"] == {"in_multi_connector": True}
    assert other["kv_connector_extra_config"] == {"a": 1}
    ours["kv_connector_extra_config"]["tenent"] = "b"
    with pytest.raises(ConfigError, match="unknown key tenent; did you mean tenant"):
        whole(config("MultiConnector", connectors=[other, ours]), llama)
    jamba = model_of("JambaForCausalLM", is_hybrid=True)
    assert whole(config("MultiConnector", connectors=[other]), jamba).checked
    with pytest.raises(ConfigError, match=r"JambaForCausalLM.* start vLLM without KVStoreConn"):
        whole(config("MultiConnector", connectors=[bare]), jamba)


def test_two_of_our_connectors_in_one_engine_are_refused_by_name(vllm):
    """They would have one name at the node, store each page twice, and answer with equal fields."""
    config, _, whole = vllm
    plugin.register()
    ours = [{"kv_connector": "KVStoreConnector"} for _ in range(2)]
    llama = model_of("LlamaForCausalLM")
    with pytest.raises(ConfigError) as raised:
        whole(config("MultiConnector", connectors=[*ours, {"kv_connector": "Other"}]), llama)
    said = str(raised.value)
    assert said.startswith("kv_connector_extra_config: connectors: 2 are KVStoreConnector")
    assert whole(config("MultiConnector", connectors=ours[:1]), llama).checked


def test_without_the_plugin_a_second_connector_of_an_engine_is_refused_when_it_is_made():
    """vLLM's ``MultiConnector`` makes them one after the other, in each process for each role."""

    class Connector:
        pass

    live, cache, other = plugin.LiveConnectors(), ["an engine's"], ["another's"]
    scheduler, worker, third = Connector(), Connector(), Connector()
    live.join(scheduler, "scheduler", cache)
    live.join(worker, "worker", cache)
    with pytest.raises(ConfigError, match=r"connectors: 2 are KVStoreConnector.*; leave one"):
        live.join(third, "worker", cache)
    live.join(third, "worker", other)

    live.leave(worker)
    live.join(worker, "worker", cache)
    del scheduler
    gc.collect()
    live.join(Connector(), "scheduler", cache)


def test_a_model_that_cannot_be_stored_is_refused_before_it_is_loaded(vllm):
    config, _, whole = vllm
    plugin.register()
    plugin.register()
    model = model_of("JambaForCausalLM", is_hybrid=True)
    assert whole(None, model).checked
    assert whole(config("OtherConnector"), model).checked
    assert whole(config("KVStoreConnector"), model_of("LlamaForCausalLM")).checked
    with pytest.raises(ConfigError, match=r"JambaForCausalLM.* start vLLM without KVStoreConn"):
        whole(config("KVStoreConnector"), model)


LLAMA = model_of("LlamaForCausalLM")


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    ("options", "rest", "named"),
    [
        ({"page_tokens": 48}, {}, "extra_config: page_tokens: 48 is not a multiple of .* 32 tok"),
        (
            {"page_tokens": 96},
            {"device": "cuda", "block_size": 64, "user_specified_block_size": True},
            "extra_config: page_tokens: 96 is not a multiple of .* 64 tok",
        ),
        ({"device_slab_bytes": 1 << 30}, {"device": "cuda"}, "device_slab_bytes: not with KV mem"),
        ({}, {"ranks": {"decode_context_parallel_size": 2}}, "decode_context_parallel_size: 2 is"),
        ({}, {"ranks": {"prefill_context_parallel_size": 2}}, "prefill_context_parallel_size: 2 "),
        ({}, {"ranks": {"enable_fault_tolerance": True}}, "enable_fault_tolerance: .*leave it out"),
        ({}, {"calculate_kv_scales": True}, "calculate_kv_scales: .*start vLLM without KVStoreC"),
        (
            {"load": "layerwise"},
            {"v2": True, "ahead": True},
            r"extra_config: load: layerwise: .*use async, or VLLM_USE_V2_MODEL_RUNNER=0 and"
            r" --no-async-scheduling$",
        ),
        ({"load": "layerwise"}, {"v2": True}, "use async, or VLLM_USE_V2_MODEL_RUNNER=0$"),
        ({"load": "layerwise"}, {"ahead": True}, "use async, or --no-async-scheduling$"),
        (
            {"load": "layerwise"},
            {"ranks": {"pipeline_parallel_size": 2}, "v2": True},
            "load: layerwise: .*use async$",
        ),
    ],
)
def test_options_that_do_not_fit_the_others_are_refused_before_the_model_is_loaded(
    vllm, several, options, rest, named
):
    config, _, whole = vllm
    plugin.register()
    transfer = config("KVStoreConnector", **options)
    if several:
        ours = {"kv_connector": "KVStoreConnector", "kv_connector_extra_config": options}
        transfer = config("MultiConnector", connectors=[{"kv_connector": "Other"}, ours])
    with pytest.raises(ConfigError, match=named):
        whole(transfer, LLAMA, **rest)
    assert whole(config("OtherConnector"), LLAMA, **rest).checked
    assert whole(transfer, None, **rest).checked, "there is no model"


@pytest.mark.parametrize(
    ("options", "model", "rest"),
    [
        ({"page_tokens": 96, "device_slab_bytes": 1 << 30}, LLAMA, {}),
        ({"page_tokens": 48}, LLAMA, {"device": "cuda"}),
        ({"page_tokens": 48}, LLAMA, {"kv_cache_dtype_skip_layers": ["model.layers.0"]}),
        ({"page_tokens": 64}, LLAMA, {"block_size": 128, "sliding_window": 4096}),
        ({"load": "layerwise"}, LLAMA, {}),
        ({}, LLAMA, {"v2": True, "ahead": True, "ranks": {"pipeline_parallel_size": 2}}),
    ],
    ids=["they fit", "a backend will choose it", "dtypes will decide on it", "all layers: windows",
         "one step after the other", "requests wait outside of steps"],
)  # fmt: skip
def test_options_that_fit_or_may_fit_are_taken(vllm, options, model, rest):
    config, _, whole = vllm
    plugin.register()
    assert whole(config("KVStoreConnector", **options), model, **rest).checked


@pytest.mark.parametrize(
    ("model", "options", "on_cuda", "asked"),
    [
        (LLAMA, {}, True, "BLHNC"),
        (LLAMA, {}, False, None),
        (LLAMA, {"in_multi_connector": True}, True, None),
        (model_of("Qwen3NextForCausalLM", is_hybrid=True), {}, True, None),
        (None, {}, True, "BLHNC"),
    ],
    ids=["a GPU", "a CPU", "one of several", "states", "no model"],
)
def test_blocks_are_asked_for_outermost_only_where_vllm_starts_with_them(
    model, options, on_cuda, asked
):
    """With states vLLM's blocks are larger than its kernels', which such a layout cannot split."""
    config = SimpleNamespace(model_config=model)
    assert layout_for(read_options(options), config, on_cuda=on_cuda) == asked


@pytest.fixture
def inputs(vllm, monkeypatch):
    """The class of vLLM that names images."""

    class ProcessorInputs:
        def __init__(self, names):
            self.mm_uuid_items = names

        def get_mm_hashes(self, model, algorithm="blake3"):
            assert (model, algorithm) == ("m", "sha256")
            return {"image": ["0f" * 32, "1e" * 32]}

    for name in ("vllm.multimodal", "vllm.multimodal.processing", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))

    class InputProcessor:
        def process_inputs(self, request_id, prompt, *, params):
            assert request_id == "r"
            hashes = prompt.get_mm_hashes("m", algorithm="sha256")["image"]
            features = [SimpleNamespace(mm_hash=one, identifier=one) for one in hashes]
            return SimpleNamespace(mm_features=features, sampling_params=params)

    for name, kind in (
        ("vllm.multimodal.processing.inputs", ProcessorInputs),
        ("vllm.v1.engine.input_processor", InputProcessor),
    ):
        module = ModuleType(name)
        setattr(module, kind.__name__, kind)
        monkeypatch.setitem(sys.modules, name, module)
    return lambda names: InputProcessor().process_inputs(
        "r", ProcessorInputs(names), params=SimpleNamespace(extra_args=None)
    )


IMAGES = model_of("LlavaForConditionalGeneration", multimodal_config=SimpleNamespace())


def test_what_names_images_is_noted_where_requests_arrive_and_only_for_our_connector(vllm, inputs):
    config, _, whole = vllm
    plugin.register()

    def noted(names):
        request = inputs(names)
        identifiers = [one.identifier.removeprefix("named-") for one in request.mm_features]
        assert identifiers == ["0f" * 32, "1e" * 32]
        return request.sampling_params.extra_args

    whole(config("OtherConnector"), IMAGES)
    whole(config("KVStoreConnector"), LLAMA)
    assert noted(None) is None

    for _ in range(3):
        whole(config("KVStoreConnector"), IMAGES)
    assert noted(None) == noted({"video": []}) == {"kvstore_contents": os.environ[SECRET]}
    assert noted({"image": ["cat", None]}) is None


def test_processes_of_a_server_share_a_secret_and_those_of_others_have_another(vllm, monkeypatch):
    plugin.register()
    assert os.environ[SECRET] == "of another process"
    made = set()
    for _ in range(2):
        monkeypatch.delenv(SECRET)
        plugin.register()
        made.add(os.environ[SECRET])
    assert len(made) == 2
    assert {len(one) for one in made} == {32}


def test_a_vllm_that_names_images_elsewhere_starts_and_says_what_it_costs(vllm, caplog):
    config, _, whole = vllm
    plugin.register()
    assert whole(config("KVStoreConnector"), IMAGES).checked
    assert "no KV of images, audio and videos is stored or loaded" in caplog.text


def test_the_configuration_of_a_model_is_noted_before_it_is_built(vllm):
    config, _, whole = vllm
    plugin.register()
    model = model_of("LlamaForCausalLM")
    whole(config("KVStoreConnector"), model)
    before = config_digest(model)
    model.hf_config.to_dict = lambda: {"max_model_len": 4096}
    assert config_digest(model) == before


def test_another_vllm_starts_all_the_same_and_is_told_what_to_do(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm", None)
    plugin.register()
    assert "kv_connector_module_path" in caplog.text
