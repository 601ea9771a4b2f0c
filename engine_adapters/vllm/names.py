"""The identity of KV in vLLM: of models, requests and chunks.

Pure, except that it reads LoRA files.
"""

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvstore.engine.identity import lora_parts, salt_parts
from kvstore.engine.requests import PromptScope, weights_fingerprint
from kvstore.protocol.page import PrefixKeys

ENGINE: Final = "vllm"
"""Part of every page's name."""
TIER_KEY_BYTES: Final = 32 + 4
"""Length of vLLM's key of a chunk: a sha256 hash and the number of a group."""
_MEDIA_SETTINGS: Final = (
    "media_io_kwargs", "mm_processor_kwargs", "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path",
    "video_pruning_rate", "video_pruning_method",
)  # fmt: skip
"""Those of a server that change what it makes of an image; vLLM's hash of the image has only those
of the request."""
_NOTE: Final = "_config_digest_of_kvstore"
_CONTENTS: Final = "kvstore_contents"
"""In a request's ``extra_args``: all of its images are named by their content. The value is the
server's secret, because not every front end replaces what a client has sent under this name."""
_DOUBTS_MAX: Final = 100_000
_CONTENT_HASH: Final = re.compile(r"(.*:)?([0-9a-f]{64}|[0-9a-f]{128})", re.DOTALL)
"""blake3, sha256 or sha512, perhaps after the name of an adapter."""
_ADAPTER_SETTINGS: Final = (
    "target_modules", "lora_dtype", "enable_tower_connector_lora", "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
)  # fmt: skip
"""Those of a server that decide where, and how, an adapter's weights are applied."""
_FILE_FORMATS: Final = (
    "auto", "hf", "safetensors", "pt", "npcache", "mistral", "dummy", "fastsafetensors",
    "instanttensor", "runai_streamer", "runai_streamer_sharded", "sharded_state",
)  # fmt: skip
"""Formats whose loaders read the model's files. Not: tensorizer, ipc_cache, modelexpress."""
_LOADER_SPEED: Final = frozenset({
    "enable_multithread_load", "num_threads", "concurrency", "memory_limit", "distributed",
})  # fmt: skip
"""Those settings of loaders that change only how fast the weights are read."""


def note_config(model: Any) -> None:
    """Note the model's configuration before a worker builds the model.

    Some of vLLM's models change their configuration when they are built. The scheduler, in another
    process, would then look for pages under other names than the workers give them. The note goes
    with vLLM's configuration to all processes; the first one stays.

    Args:
        model: ``ModelConfig``.
    """
    if not hasattr(model, _NOTE):
        setattr(model, _NOTE, _config_digest(model))


def config_digest(model: Any) -> str:
    """A hash of the model's configuration, including overrides by the user: 64 hex digits.

    Args:
        model: ``ModelConfig``; :func:`note_config` was called before, or the model was not built.
    """
    return getattr(model, _NOTE, None) or _config_digest(model)


def _config_digest(model: Any) -> str:
    values = model.hf_config.to_dict()
    values.pop("transformers_version", None)
    return hashlib.sha256(json.dumps(values, default=str, sort_keys=True).encode()).hexdigest()


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


def media_settings(multimodal: Any) -> dict[str, str]:
    """What a server sets for images, audio and videos, where it changes their KV.

    Args:
        multimodal: vLLM's ``MultiModalConfig``; None = the model takes text only.
    """
    values = {name: one for name in _MEDIA_SETTINGS if (one := getattr(multimodal, name, None))}
    # vLLM always names a method of pruning, also where nothing is pruned.
    if not values.keys() - {"video_pruning_method"}:
        return {}
    return {"media": json.dumps(values, default=str, sort_keys=True)}


def has_strong_hashes(cache: Any, multimodal: Any) -> bool:
    """Whether vLLM's block hashes name the content of inputs other than tokens.

    Without a prefix cache and without a cache of processed inputs vLLM does not hash images: it
    counts them, in each process from 1.

    Args:
        cache: ``CacheConfig``.
        multimodal: ``MultiModalConfig``; None = the model takes text only.
    """
    counted = (
        multimodal is not None
        and not multimodal.mm_processor_cache_gb
        and not cache.enable_prefix_caching
    )
    return cache.prefix_caching_hash_algo.startswith("sha256") and not counted


class ContentHash(str):
    """A hash that vLLM has made of the content of an image, audio or video.

    A client may name an image itself, with whatever it likes: the hash of another image, too. vLLM
    takes the name for the identifier, or a hash of the name and the request's settings, which looks
    like any other hash. So the type says what it is, in the process that takes the request. Hashes
    that come from elsewhere, or that vLLM makes of other hashes, are plain strings.
    """

    __slots__ = ()


def mark_contents(
    hashes: Mapping[str, Sequence[str]], named: Mapping[str, Sequence[str | None]]
) -> dict[str, list[str]]:
    """Identifiers of a request's images, those that name a content as :class:`ContentHash`.

    A client's name that looks like a hash gets another form: vLLM would keep that image, and what
    its encoder makes of it, for the one with that content.

    Args:
        hashes: by kind, the identifiers that vLLM has made.
        named: by kind, the client's name of each item; None = it gave none.
    """
    marked: dict[str, list[str]] = {}
    for kind, found in hashes.items():
        names = named.get(kind) or [None] * len(found)
        marked[kind] = [
            ContentHash(one) if name is None else _set_apart(one)
            for one, name in zip(found, names, strict=True)
        ]
    return marked


def _set_apart(name: str) -> str:
    return f"named-{name}" if _CONTENT_HASH.fullmatch(name) else str(name)


class DoubtfulImages:
    """Names under which this engine may keep another image than the one with that content.

    vLLM keeps images, what its encoder makes of them, and KV under the names that come with a
    request. Some come from elsewhere (``--enable-scale-out``): nothing says whether they are true,
    so a later request with such a name is not believed either.

    Args:
        secret: as in :func:`names_of`.
    """

    def __init__(self, secret: str) -> None:
        self._names: set[str] = set()
        self._secret = secret

    def note(self, request: Any) -> None:
        """A request has arrived: note its names, if nothing says that they are true."""
        if request.mm_features and not _names_contents(request, self._secret) and not self.full:
            self._names |= _hashes(request)

    def has(self, request: Any) -> bool:
        """Whether one of a request's names is doubtful; of many doubtful names, every name is."""
        return bool(request.mm_features) and (
            self.full or not self._names.isdisjoint(_hashes(request))
        )

    @property
    def full(self) -> bool:
        """Whether no more names are kept."""
        return len(self._names) >= _DOUBTS_MAX


def _hashes(request: Any) -> set[str]:
    """What may be hashes of contents among the names of a request's images, without adapters."""
    names = [name or "" for one in request.mm_features for name in (one.identifier, one.mm_hash)]
    return {name.rpartition(":")[2] for name in names if _CONTENT_HASH.fullmatch(name)}


def note_contents(request: Any, secret: str) -> None:
    """Tell the engine's process whether all images of a request are named by their content.

    The type of an identifier does not get there; ``extra_args`` do.

    Args:
        request: ``EngineCoreRequest``, before it is sent. Its parameters may have been those of an
            earlier request, with that one's note.
        secret: of the server.
    """
    if not request.mm_features:
        return
    contents = all(isinstance(one.mm_hash, ContentHash) for one in request.mm_features)
    for one in request.mm_features:  # msgspec, which sends them, takes no subclass of str
        for name in ("mm_hash", "identifier"):
            if isinstance(value := getattr(one, name), ContentHash):
                setattr(one, name, str(value))
    if (parameters := request.sampling_params) is None:
        return
    extra = {key: one for key, one in (parameters.extra_args or {}).items() if key != _CONTENTS}
    if contents:
        extra[_CONTENTS] = secret
    parameters.extra_args = extra or None


def adapter_settings(lora: Any, dtype: Any) -> dict[str, str]:
    """What a server sets for LoRA adapters, where it changes the KV of their requests.

    Args:
        lora: vLLM's ``LoRAConfig``; None = adapters are not enabled.
        dtype: of the model, and so of its adapters unless the server sets another one.
    """
    values = {name: one for name in _ADAPTER_SETTINGS if (one := getattr(lora, name, None))}
    if values.get("lora_dtype") in (dtype, "auto"):
        del values["lora_dtype"]
    if "target_modules" in values:
        values["target_modules"] = sorted(values["target_modules"])
    return {"adapters": json.dumps(values, default=str, sort_keys=True)} if values else {}


def weights_settings(model: Any, load: Any) -> dict[str, str]:
    """What a server sets that makes other weights, or another model, of the same files.

    Args:
        model: ``ModelConfig``.
        load: ``LoadConfig``.
    """
    values: dict[str, str] = {}
    if (quantization := getattr(model, "quantization_config", None)) is not None:
        values["quantization_config"] = repr(quantization)
    if code := getattr(model, "code_revision", None):
        values["code_revision"] = code
    extra = getattr(load, "model_loader_extra_config", None)
    if isinstance(extra, Mapping) and (others := extra.keys() - _LOADER_SPEED):
        named = {name: extra[name] for name in others}
        values["loader"] = json.dumps(named, default=str, sort_keys=True)
    return values


def reads_model_files(model: Any, load: Any) -> bool:
    """Whether the weights are in the model's own files: then these files identify them.

    Args:
        model: ``ModelConfig``; with ``model_weights`` they are elsewhere, such as in S3.
        load: ``LoadConfig``; plugins have formats of their own.
    """
    return load.load_format in _FILE_FORMATS and not getattr(model, "model_weights", "")


@functools.lru_cache(maxsize=1024)
def adapter_weights(path: str, number: int) -> str:
    """A fingerprint of an adapter's files at the time of the first call; empty = there is none.

    Args:
        path: where vLLM has loaded it from: a folder on this machine, or something else.
        number: vLLM's number of the adapter; it has another one when it was loaded again.
    """
    del number
    try:
        return weights_fingerprint(str(Path(path).expanduser()))
    except (OSError, RuntimeError, ValueError):  # no such file, home directory or valid path
        return ""


def names_of(request: Any, *, strong_hashes: bool, secret: str) -> PromptScope:
    """The identity of a request's KV besides the tokens.

    Args:
        request: vLLM's request.
        strong_hashes: whether the engine's block hashes are collision-resistant, and made of the
            content of all inputs.
        secret: of the server, with which :func:`note_contents` has noted what names its images.
    """
    parts: tuple[tuple[str, str], ...] = ()
    known = True
    adapter = request.lora_request
    if adapter is not None:
        weights = adapter_weights(adapter.lora_path, adapter.lora_int_id)
        parts = lora_parts(adapter.lora_name, adapter.lora_path, weights)
        # One that was loaded in place keeps its number, whatever its files were before.
        known = bool(weights) and not getattr(adapter, "load_inplace", False)
    parts += salt_parts(request.cache_salt or "")
    foreign = bool(request.mm_features) or request.prompt_embeds is not None
    named = strong_hashes and (not request.mm_features or _names_contents(request, secret))
    usable = known and not request.resumable and (not foreign or named)
    return PromptScope(parts, foreign, usable)


def _names_contents(request: Any, secret: str) -> bool:
    hashed = all(_CONTENT_HASH.fullmatch(one.identifier) for one in request.mm_features)
    extra = getattr(request.sampling_params, "extra_args", None) or {}
    return hashed and extra.get(_CONTENTS) == secret


def page_key(key: bytes) -> PrefixKeys | None:
    """The page key of vLLM's chunk key (block hash and 4 bytes of group); None for a weak hash.

    Only 32-byte hashes (sha256) are accepted. In vLLM 0.32 the others start from a random value in
    each process by default, and inputs may collide.
    """
    if len(key) != TIER_KEY_BYTES:
        return None
    return PrefixKeys(hashlib.sha256(b"kvstore vllm tier\0" + key).digest())
