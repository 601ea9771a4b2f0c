"""A small random Llama on disk: wide initial weights, so that greedy output is not monotonous."""

import sys
from pathlib import Path
from typing import Any

VOCABULARY = 512


def make(folder: Path, **changes: Any) -> None:
    """Write configuration, weights and a byte-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 256,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096, "initializer_range": 0.2, "dtype": "bfloat16",
        "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    config = LlamaConfig(**{**shape, **changes})
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1, **{c: i for i, c in enumerate(alphabet, start=2)}}
    vocabulary |= {f"<{i}>": i for i in range(len(vocabulary), shape["vocab_size"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<s>"
    )
    fast.save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
