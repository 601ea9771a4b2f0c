"""Goal: an engine whose KV the connector does not support is refused by name.

vLLM is played by modules like its own; ``tests/vllm`` starts it.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from kvstore.protocol.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


class Platform:
    """What vLLM says of the machine."""

    device_name = "cpu"

    def __init__(self):
        self.kind = "cpu"

    def is_cpu(self):
        return self.kind == "cpu"

    def is_cuda(self):
        return self.kind == "cuda"


@pytest.fixture
def here():
    return Platform()


@pytest.fixture
def facts(monkeypatch, here):
    """The module, with what it imports of vLLM; a copy of its own."""
    parts = {
        "vllm": {"__version__": "0.32.0"},
        "vllm.distributed.utils": {
            "get_pp_indices": lambda layers, stage, count: (
                layers * stage // count, layers * (stage + 1) // count,
            ),
        },
        "vllm.model_executor.layers.mamba.mamba_utils": {"is_conv_state_dim_first": bool},
        "vllm.platforms": {"current_platform": here},
        "vllm.v1.kv_cache_interface": {"SlidingWindowSpec": type("SlidingWindowSpec", (), {})},
        "huggingface_hub": {"try_to_load_from_cache": lambda *_: None},
    }  # fmt: skip
    for name in parts:
        steps = name.split(".")
        for end in range(1, len(steps) + 1):
            known = ".".join(steps[:end])
            if known not in parts or known == name:
                monkeypatch.setitem(sys.modules, known, ModuleType(steps[end - 1]))
    for name, content in parts.items():
        for key, value in content.items():
            setattr(sys.modules[name], key, value)
    path = ROOT / "engine_adapters/vllm/facts.py"
    spec = spec_from_file_location("facts_beside_stand_ins", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def config_of(*, layers=4, **parallel):
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{"pipeline_parallel_size": 1, **parallel}),
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: layers),
        cache_config=SimpleNamespace(calculate_kv_scales=False),
        speculative_config=None,
    )


@pytest.mark.parametrize(
    "name", ["decode_context_parallel_size", "prefill_context_parallel_size"]
)  # fmt: skip
def test_context_parallel_engines_are_refused(facts, name):
    with pytest.raises(ConfigError, match=f"{name}: 2 is not supported"):
        facts.read_facts(config_of(**{name: 2}), None, "")


def test_other_platforms_are_refused(facts, here):
    here.kind, here.device_name = "rocm", "rocm"

    with pytest.raises(ConfigError, match="platform: rocm: only cpu and cuda are supported"):
        facts.read_facts(config_of(), None, "")


def test_scales_that_the_engine_computes_are_refused(facts):
    config = config_of()
    config.cache_config.calculate_kv_scales = True

    with pytest.raises(ConfigError, match="calculate_kv_scales: scales that are not in the model"):
        facts.read_facts(config, None, "")


def test_groups_of_different_dtypes_are_refused(facts, monkeypatch):
    for name in ("check_model", "check_groups", "_group"):
        monkeypatch.setattr(facts, name, lambda *_, **__: None)
    monkeypatch.setattr(facts, "has_draft_layers", lambda _: False)
    monkeypatch.setattr(facts, "is_state", lambda _: False)
    groups = [
        SimpleNamespace(kv_cache_spec=SimpleNamespace(dtype=dtype), layer_names=[])
        for dtype in ("torch.float16", "torch.float8_e4m3fn")
    ]
    kv = SimpleNamespace(kv_cache_groups=groups, transfer_group_ids=[0, 1])

    with pytest.raises(ConfigError, match=r"different dtypes \(float16, float8_e4m3fn\)"):
        facts.read_facts(config_of(), kv, "")


def test_stages_of_a_pipeline_divide_the_layers_of_one_group_only(facts):
    config = config_of(layers=5, pipeline_parallel_size=2)

    assert facts._stages(config, 1) == ((0, 2), (2, 5))
    assert facts._stages(config_of(), 2) == ()
    with pytest.raises(ConfigError, match="pipeline_parallel_size: 2 is not supported with 2 KV"):
        facts._stages(config, 2)


def test_a_stage_that_has_other_layers_than_its_shards_is_refused(facts):
    of = SimpleNamespace(stages=((0, 2), (2, 4)))

    facts.check_stage(of, 1, ["model.layers.2.attn", "model.layers.3.attn"])
    facts.check_stage(SimpleNamespace(stages=()), 0, ["model.layers.7.attn"])
    for layers in (["model.layers.2.attn"], ["model.layers.1.attn", "model.layers.2.attn"]):
        with pytest.raises(ConfigError, match=r"stage 1 has the KV of layers .*, not of 2 to 3"):
            facts.check_stage(of, 1, layers)
