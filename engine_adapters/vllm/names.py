"""The identity of KV in vLLM: of models, requests and chunks.

Pure, except that it reads LoRA files.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvstore.engine.identity import lora_parts, salt_parts
from kvstore.engine.requests import PromptScope, files_fingerprint
from kvstore.protocol.page import PrefixKeys

ENGINE: Final = "vllm"
"""Part of every page's name."""
TIER_KEY_BYTES: Final = 32 + 4
"""Length of vLLM's key of a chunk: a sha256 hash and the number of a group."""


def length_settings(hf_config: Mapping[str, Any], request_tokens: int) -> dict[str, str]:
    """The maximum request length, if the model's KV depends on it.

    With long rope, vLLM uses the long or the short factors for all positions, depending on whether
    requests may be longer than the original context length of the model.

    Args:
        hf_config: the model's configuration, including overrides by the user.
        request_tokens: maximum tokens of a request.
    """
    kinds = json.dumps(hf_config, default=str)
    depends = any(f'"{kind}"' in kinds for kind in ("longrope", "su"))
    return {"request_tokens": str(request_tokens)} if depends else {}


def names_of(request: Any, *, strong_hashes: bool) -> PromptScope:
    """The identity of a request's KV besides the tokens.

    Args:
        request: vLLM's request.
        strong_hashes: whether the engine's block hashes are collision-resistant.
    """
    parts: tuple[tuple[str, str], ...] = ()
    adapter = request.lora_request
    if adapter is not None:
        folder = Path(adapter.lora_path)
        weights = files_fingerprint(folder) if folder.is_dir() else ""
        parts = lora_parts(adapter.lora_name, adapter.lora_path, weights)
    parts += salt_parts(request.cache_salt or "")
    foreign = bool(request.mm_features) or request.prompt_embeds is not None
    usable = not request.resumable and (strong_hashes or not foreign)
    return PromptScope(parts, foreign, usable)


def page_key(key: bytes) -> PrefixKeys | None:
    """The page key of vLLM's chunk key (block hash and 4 bytes of group); None for a weak hash.

    Only 32-byte hashes (sha256) are accepted. In vLLM 0.32 the others start from a random value in
    each process by default, and inputs may collide.
    """
    if len(key) != TIER_KEY_BYTES:
        return None
    return PrefixKeys(hashlib.sha256(b"kvstore vllm tier\0" + key).digest())
