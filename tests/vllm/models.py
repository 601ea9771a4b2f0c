"""Random models and adapters on disk for the tests; run in vLLM's environment.

``python -m tests.vllm.models KIND FOLDER`` (``windows``, ``latents``, ``states``), ``head FOLDER
METHOD`` or ``adapter FOLDER SEED``.
"""

import json
import sys
from pathlib import Path

from bench.vllm_model import SHAPES, make

RANK = 8


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


def make_latents(folder: Path) -> None:
    """A model with MLA, of the only sizes that vLLM's kernel for CPUs has."""
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    make(folder, SHAPES["tiny"])  # its tokenizer
    torch.manual_seed(0)
    config = DeepseekV2Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
        first_k_dense_replace=3, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=None,
        kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32, head_dim=64,
        max_position_embeddings=8192, initializer_range=0.2, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=1, dtype="bfloat16",
    )  # fmt: skip
    DeepseekV2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


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


if __name__ == "__main__":
    if sys.argv[1] == "windows":
        make_windows(Path(sys.argv[2]))
    elif sys.argv[1] == "latents":
        make_latents(Path(sys.argv[2]))
    elif sys.argv[1] == "states":
        make_states(Path(sys.argv[2]))
    elif sys.argv[1] == "head":
        make_head(Path(sys.argv[2]), sys.argv[3])
    else:
        make_adapter(Path(sys.argv[2]), int(sys.argv[3]))
