"""Parts of the connector with vLLM's own classes around them, run by the engine's environment.

Nothing runs on a GPU here: vLLM's platform is told to say that it is one.
"""

import hashlib
from types import SimpleNamespace as Values
from typing import Any

import msgspec
import torch
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from engine_adapters.vllm import facts, plugin, tier
from engine_adapters.vllm.names import DoubtfulImages, names_of, note_contents
from kvstore.engine.identity import shard_specs, space_identity
from kvstore.engine.options import TieringOptions
from tests.vllm.engine_process import Answer, serve
from tests.vllm.tier_process import ROW, Spec

BLOCK = 64


class Images(list[str]):
    """A request's images, as far as vLLM names them."""

    def get_all_items_for_hash(self) -> list[str]:
        """What is hashed."""
        return self


class Parts:
    """What the commands work on."""

    def __init__(self) -> None:
        """Pretend a GPU, and load the plugin."""
        plugin.register()
        self.llm = None
        self.generation = (12, 0)
        kind = type(current_platform)
        kind.is_cpu, kind.is_cuda = (lambda _: False), (lambda _: True)
        kind.get_device_capability = classmethod(lambda *_: self.generation)

    def names(self, backends: dict[str, str], **packing: Any) -> Answer:
        """What names the pages of a model on a GPU: ``packing`` is that of its spec."""
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=8, head_size=64, dtype=torch.bfloat16, **packing
        )
        kv = Values(
            kv_cache_groups=[KVCacheGroupSpec(["model.layers.0.attn"], spec)],
            transfer_group_ids=(0,),
        )
        found = facts.read_facts(_config(backends), kv, "1")
        named = [space_identity(found, "default", BLOCK), shard_specs(found, BLOCK)]
        return {"bytes": spec.page_size_bytes, "name": _digest(named)}

    def tier_names(self, generation: list[int]) -> Answer:
        """What names the pages of the tier on a GPU of this generation."""
        self.generation = tuple(generation)
        return {"name": _digest(tier.names(Spec.config, ROW, TieringOptions(revision="1"), b""))}

    def identifiers(self, names: list[str | None], settings: dict[str, Any]) -> Answer:
        """What vLLM identifies images by, and whether their KV have a name.

        ``names`` are those of a client, ``settings`` its settings of the processor.
        """
        plugin.mark_images()
        secret = plugin.server_secret()
        doubtful = DoubtfulImages(secret)
        images = Images([f"picture {number}" for number in range(len(names))])
        inputs = ProcessorInputs([], {"image": images}, {"image": names}, settings)
        usable = []
        for name in inputs.get_mm_hashes("m", "sha256")["image"]:
            sent = EngineCoreRequest(
                "r", [1],
                [MultiModalFeatureSpec(None, "image", name, PlaceholderRange(0, 1), name)],
                SamplingParams(extra_args={"kvstore_contents": True}), None, 0.0, None, None, None,
            )  # fmt: skip
            note_contents(sent, secret)
            arrived = MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(sent))
            request = Request.from_engine_core_request(arrived, None)
            doubtful.note(request)
            believed = names_of(request, strong_hashes=True, secret=secret).usable
            usable.append(believed and not doubtful.has(request))
        return {"usable": usable}

    def reached(self) -> Answer:
        """Whether vLLM's own way of a request is noted."""
        plugin.mark_images()
        return {"name": InputProcessor.process_inputs.__module__}

    def layout(self, connectors: list[str], *, hybrid: bool = False) -> Answer:
        """The layout of blocks that vLLM takes with one connector, or several."""
        given = [{"kv_connector": one, "kv_role": "kv_both"} for one in connectors]
        transfer = KVTransferConfig(**given[0])
        if given[1:]:
            transfer = KVTransferConfig(
                kv_connector="MultiConnector", kv_role="kv_both",
                kv_connector_extra_config={"connectors": given},
            )  # fmt: skip
        config = _config({})
        config.kv_transfer_config = transfer
        plugin._check_whole(config)
        config.model_config.is_hybrid = hybrid
        return {"layout": get_kv_connector_cache_layout(config)}

    def layouts(self) -> Answer:
        """The layouts of blocks that vLLM has: the order of their dimensions in memory."""
        return {"orders": {one.name: [*one.value] for one in KVCacheLayout}}


def _digest(named: Any) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(named)).hexdigest()


def _config(backends: dict[str, str]) -> Any:
    """As much of a ``VllmConfig`` as the connector reads of it."""
    return Values(
        parallel_config=Values(tensor_parallel_size=1, pipeline_parallel_size=1),
        model_config=Values(
            model="m", is_hybrid=False, is_attention_free=False, is_encoder_decoder=False,
            use_mla=False, runner_type="generate", dtype=torch.bfloat16, quantization=None, seed=0,
            hf_config=Values(to_dict=dict), max_model_len=1024, multimodal_config=None,
        ),
        cache_config=Values(cache_dtype="auto", kv_cache_layout="BLHNC"),
        load_config=Values(load_format="auto"), device_config=Values(device_type="cuda"),
        speculative_config=None, lora_config=None,
        attention_config=Values(
            backend=None,
            backend_per_kind={kind: AttentionBackendEnum[one] for kind, one in backends.items()},
        ),
    )  # fmt: skip


def main() -> int:
    """See the module."""
    return serve(Parts())
