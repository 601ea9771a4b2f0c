"""A random Llama on disk for vLLM, so that nothing need be downloaded; run in vLLM's environment.

Its weights are spread wide: greedy output is then varied, and other K and V give other tokens.
"""

import sys
from pathlib import Path
from typing import Any, Final

TINY: Final = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 256,
               "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
DEMO: Final = {"num_hidden_layers": 12, "hidden_size": 512, "intermediate_size": 1536,
               "num_attention_heads": 8, "num_key_value_heads": 4,
               "initializer_range": 0.1}  # fmt: skip
_ALL: Final = {"vocab_size": 512, "max_position_embeddings": 8192, "initializer_range": 0.2,
               "dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1}  # fmt: skip
CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% if tools %}[{{ tools | tojson }}]{% endif %}"
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
SHAPES: Final[dict[str, dict[str, Any]]] = {"tiny": TINY, "demo": DEMO}


def make(folder: Path, shape: dict[str, Any]) -> None:
    """Write configuration, weights and a byte-level tokenizer with a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(**{**_ALL, **shape})
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1, **{c: i for i, c in enumerate(alphabet, start=2)}}
    vocabulary |= {f"<{i}>": i for i in range(len(vocabulary), config.vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<s>",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)  # fmt: skip


if __name__ == "__main__":
    make(Path(sys.argv[2]), SHAPES[sys.argv[1]])
