"""Random models and adapters on disk for the tests; run in vLLM's environment.

Arguments: ``KIND FOLDER`` (one of ``KINDS``), ``head FOLDER METHOD`` or ``adapter FOLDER SEED``.
"""

import json
import sys
from pathlib import Path
from typing import Any

from bench.vllm_model import SHAPES, make

RANK = 8
PREDICTING = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192,
    "initializer_range": 0.2, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
    "dtype": "bfloat16",
}  # fmt: skip
"""Of the models with a layer for multi-token prediction."""


def make_windows(folder: Path) -> None:
    """A model in which every second layer sees the last 128 tokens only."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    make(folder, SHAPES["tiny"])  # its tokenizer
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, query_pre_attn_scalar=32,
        sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=8192, initializer_range=0.2, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=1, dtype="bfloat16",
    )  # fmt: skip
    Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def make_all_windows(folder: Path) -> None:
    """A dense model with one KV head in which every layer sees the last 128 tokens only."""
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    make(folder, SHAPES["tiny"])  # its tokenizer
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=1, head_dim=32, sliding_window=128,
        max_position_embeddings=8192, initializer_range=0.2, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=1, dtype="bfloat16",
    )  # fmt: skip
    MistralForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def make_latents(folder: Path, nope: int = 32, values: int = 32) -> None:
    """A model with MLA, by default of the only sizes that vLLM's kernel for CPUs has."""
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    make(folder, SHAPES["tiny"])  # its tokenizer
    torch.manual_seed(0)
    config = DeepseekV2Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
        first_k_dense_replace=3, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=None,
        kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=nope, v_head_dim=values,
        head_dim=64, max_position_embeddings=8192, initializer_range=0.2, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=1, dtype="bfloat16",
    )  # fmt: skip
    DeepseekV2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def make_wide_latents(folder: Path) -> None:
    """A model with MLA, of the sizes that vLLM's kernels for GPUs have."""
    make_latents(folder, nope=128, values=128)


def make_states(folder: Path) -> None:
    """A model in which every second layer has a state (Gated DeltaNet) instead of KV."""
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    make(folder, SHAPES["tiny"])  # its tokenizer
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, head_dim=128,
        layer_types=["linear_attention", "full_attention"] * 2, linear_num_key_heads=1,
        linear_num_value_heads=2, linear_key_head_dim=128, linear_value_head_dim=128,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
        shared_expert_intermediate_size=64, decoder_sparse_step=1, max_position_embeddings=8192,
        initializer_range=0.2, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
        dtype="bfloat16",
    )  # fmt: skip
    Qwen3NextForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def make_mamba(folder: Path) -> None:
    """A model of Mamba layers only, which have a state instead of KV."""
    import torch
    from transformers import MambaConfig, MambaForCausalLM

    make(folder, SHAPES["tiny"])  # its tokenizer
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=512, hidden_size=128, state_size=16, num_hidden_layers=2, bos_token_id=0,
        eos_token_id=1, dtype="bfloat16",
    )  # fmt: skip
    MambaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def make_head(folder: Path, method: str) -> None:
    """An EAGLE or EAGLE-3 head for the tiny model: one layer, which sees the next token, too."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(7)
    shape = SHAPES["tiny"]
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    rows = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    third = method == "eagle3"
    layer = "midlayer" if third else "layers.0"
    seen = 2 * hidden if third else hidden
    sizes: dict[str, tuple[int, ...]] = {
        "fc": (hidden, 3 * hidden if third else 2 * hidden),
        f"{layer}.self_attn.q_proj": (hidden, seen), f"{layer}.self_attn.k_proj": (rows, seen),
        f"{layer}.self_attn.v_proj": (rows, seen), f"{layer}.self_attn.o_proj": (hidden, hidden),
        f"{layer}.mlp.gate_proj": (inner, hidden), f"{layer}.mlp.up_proj": (inner, hidden),
        f"{layer}.mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    norms = [f"{layer}.post_attention_layernorm"]
    if third:
        sizes["lm_head"] = (512, hidden)
        norms += [f"{layer}.hidden_norm", f"{layer}.input_layernorm", "norm"]
    weights = {f"{name}.weight": torch.randn(size) * 0.2 for name, size in sizes.items()}
    weights |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    folder.mkdir()
    save_file({name: one.bfloat16() for name, one in weights.items()}, folder / "model.safetensors")
    settings = {
        "architectures": ["LlamaForCausalLMEagle3" if third else "LlamaForCausalLM"],
        "model_type": "llama", "vocab_size": 512, "draft_vocab_size": 512,
        "max_position_embeddings": 8192, "torch_dtype": "bfloat16", "bos_token_id": 0,
        "eos_token_id": 1, "tie_word_embeddings": False, **shape, "num_hidden_layers": 1,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],  # vLLM's own choice needs more layers
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings))


def make_mimo(folder: Path) -> None:
    """A dense model, and a layer that predicts a token more."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    make(folder, SHAPES["tiny"])  # its tokenizer
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**PREDICTING)).to(torch.bfloat16).save_pretrained(folder)
    _add_layer(
        folder, "model.layers.3.", "model.mtp_layers.0.", "model.mtp_layers.0.{}.weight",
        ("token_layernorm", "hidden_layernorm", "final_layernorm"), "input_proj",
        architectures=["MiMoForCausalLM"],
    )  # fmt: skip


def make_glm(folder: Path) -> None:
    """A model with experts, and a layer with experts that predicts a token more."""
    import torch
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    make(folder, SHAPES["tiny"])  # its tokenizer
    torch.manual_seed(0)
    config = Glm4MoeConfig(
        **PREDICTING, head_dim=32, moe_intermediate_size=64, n_routed_experts=4,
        num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=2,
    )  # fmt: skip
    Glm4MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    _add_layer(
        folder, "model.layers.3.", "model.layers.4.", "model.layers.4.{}.weight",
        ("enorm", "hnorm", "shared_head.norm"), "eh_proj",
    )  # fmt: skip


def make_ernie(folder: Path) -> None:
    """A model with experts, and a dense layer that predicts a token more."""
    import torch
    from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM

    make(folder, SHAPES["tiny"])  # its tokenizer
    torch.manual_seed(0)
    config = Ernie4_5_MoeConfig(
        **PREDICTING, head_dim=32, moe_intermediate_size=64, moe_num_experts=4, moe_k=2,
        moe_num_shared_experts=1,
    )  # fmt: skip
    Ernie4_5_MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    _add_layer(
        folder, "model.layers.0.", "model.mtp_block.0.", "model.{}.0.weight",
        ("mtp_emb_norm", "mtp_hidden_norm"), "mtp_linear_proj",
    )  # fmt: skip


def _add_layer(
    folder: Path, like: str, place: str, named: str, norms: tuple[str, ...], joins: str,
    **settings: Any,
) -> None:  # fmt: skip
    """Give a model a layer for multi-token prediction.

    Args:
        folder: with the model; changed.
        like: names of weights begin so in the layer whose shapes the new one has.
        place: names begin so in the new layer.
        named: names of its other weights.
        norms: those that are norms.
        joins: the one that joins the model's state with the next token.
        settings: of the configuration, changed.
    """
    import torch
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = load_file(file)
    torch.manual_seed(7)
    for name in [one for one in weights if one.startswith(like)]:
        old = weights[name]
        changed = old if "norm" in name else (torch.randn(old.shape) * 0.2).to(old.dtype)
        weights[name.replace(like, place)] = changed.clone()
    hidden = PREDICTING["hidden_size"]
    weights |= {named.format(norm): torch.ones(hidden, dtype=torch.bfloat16) for norm in norms}
    weights[named.format(joins)] = (torch.randn(hidden, 2 * hidden) * 0.2).bfloat16()
    save_file(weights, file, metadata={"format": "pt"})
    config = folder / "config.json"
    changes = {"num_nextn_predict_layers": 1, **settings}
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))


def make_adapter(folder: Path, seed: int) -> None:
    """A LoRA adapter of the tiny model that changes what it says."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    shape = SHAPES["tiny"]
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    key_value = hidden // heads * shape["num_key_value_heads"]
    weights = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, size in (("q_proj", hidden), ("v_proj", key_value)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, of in (("lora_A", (RANK, hidden)), ("lora_B", (size, RANK))):
                weights[f"{place}.{part}.weight"] = torch.randn(of, dtype=torch.bfloat16) * 0.3
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj"], "bias": "none",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def make_tiny(folder: Path) -> None:
    """The dense model of most tests."""
    make(folder, SHAPES["tiny"])


KINDS = {
    "tiny": make_tiny, "windows": make_windows, "all-windows": make_all_windows,
    "latents": make_latents, "states": make_states, "mimo": make_mimo, "glm": make_glm,
    "ernie": make_ernie, "mamba": make_mamba, "wide-latents": make_wide_latents,
}  # fmt: skip


def main() -> int:
    """See the module."""
    kind, folder, *more = sys.argv[1:]
    if kind in KINDS:
        KINDS[kind](Path(folder))
    elif kind == "head":
        make_head(Path(folder), *more)
    else:
        make_adapter(Path(folder), *map(int, more))
    return 0
