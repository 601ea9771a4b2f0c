"""What names KV in vLLM, of a model, a request and a chunk. Pure but for an adapter's files."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvstore.engine.requests import PromptScope, files_fingerprint
from kvstore.page import PrefixKeys

ENGINE: Final = "vllm"
"""Part of every page's name."""
TIER_KEY_BYTES: Final = 32 + 4
"""Of one of vLLM's keys of a chunk: a sha256 hash and the number of a group."""


def length_settings(hf_config: Mapping[str, Any], request_tokens: int) -> dict[str, str]:
    """The longest request that the engine allows, if its model's KV depends on that.

    With long rope, vLLM turns all positions by the long or the short factors, depending on whether
    requests may be longer than what the model was first trained for.

    Args:
        hf_config: the model's configuration, with what users have overridden.
        request_tokens: tokens of the longest request.
    """
    kinds = json.dumps(hf_config, default=str)
    depends = any(f'"{kind}"' in kinds for kind in ("longrope", "su"))
    return {"request_tokens": str(request_tokens)} if depends else {}


def names_of(request: Any, *, strong_hashes: bool) -> PromptScope:
    """What, besides tokens, names a request's KV.

    Args:
        request: vLLM's.
        strong_hashes: whether the engine's block hashes can be trusted to tell inputs apart.
    """
    parts: list[tuple[str, str]] = []
    adapter = request.lora_request
    if adapter is not None:
        parts += [("lora", adapter.lora_name), ("lora_path", adapter.lora_path)]
        folder = Path(adapter.lora_path)
        parts.append(("lora_files", files_fingerprint(folder) if folder.is_dir() else ""))
    if request.cache_salt:
        parts.append(("cache_salt", request.cache_salt))
    foreign = bool(request.mm_features) or request.prompt_embeds is not None
    usable = not request.resumable and (strong_hashes or not foreign)
    return PromptScope(tuple(parts), foreign, usable)


def page_key(key: bytes) -> PrefixKeys | None:
    """The page of one of vLLM's keys: block hash and 4 bytes of group; None for a weak hash.

    Only a 32-byte hash (sha256) is taken. In vLLM 0.32 the others start from a random value in each
    process unless it is told otherwise, and other inputs may collide with them.
    """
    if len(key) != TIER_KEY_BYTES:
        return None
    return PrefixKeys(hashlib.sha256(b"kvstore vllm tier\0" + key).digest())
