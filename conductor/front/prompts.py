"""Tokenises prompts by a tokenizer of the model here or through an engine, with a cache."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

import msgspec

from conductor.front.local_tokenizers import LocalTokenizers
from conductor.front.membership import Membership
from conductor.front.openai import TokenId
from conductor.front.upstream import EngineError, EngineRefusedError, Upstream
from conductor.routing.engines import EngineRegistry, Health
from kvstore.index.reading import UnreadableError, read

TOKENS_KEPT_MAX: Final = 2_000_000
"""Maximum token ids in the cache, all prompts together: a few tens of MB."""
_ANSWER_BYTES_MAX: Final = 4 << 20
"""A larger answer would block the event loop for too long; the prompt is then routed without
tokens."""
_PROMPT_TOKENS: Final = 16
"""Constant cost of a prompt in token ids, so that empty prompts are bounded too."""
_TRIES: Final = 2


class _Tokens(msgspec.Struct):
    tokens: list[TokenId]


_TOKENS: Final = msgspec.json.Decoder(_Tokens)


class Prompts:
    """Tokenises prompts; recent ones need no round trip.

    Args:
        registry: the engines.
        upstream: client for engines.
        membership: receives failures of engines.
        timeout_s: deadline of one request to an engine, and of a tokenizer here.
        local: tokenizers of some models.
    """

    def __init__(
        self,
        registry: EngineRegistry,
        upstream: Upstream,
        membership: Membership,
        timeout_s: float,
        local: LocalTokenizers,
    ) -> None:
        self._registry = registry
        self._upstream = upstream
        self._membership = membership
        self._timeout_s = timeout_s
        self._local = local
        self._known: OrderedDict[bytes, list[int]] = OrderedDict()
        self._kept = 0

    async def tokenize(self, model: str, rendered: Mapping[str, msgspec.Raw]) -> list[int] | None:
        """The tokens of a prompt (do not change the list); None if no engine answers in time.

        Args:
            model: its model, or LoRA adapter.
            rendered: what ``/tokenize`` is asked, without ``model``: a prompt, or messages with all
                that decides how an engine renders them.
        """
        body = msgspec.json.encode({"model": model, **rendered})
        key = hashlib.sha256(body).digest()
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        tokens = await self._tokens(model, rendered, body)
        if tokens is not None:
            self._remember(key, tokens)
        return tokens

    async def _tokens(
        self, model: str, rendered: Mapping[str, msgspec.Raw], body: bytes
    ) -> list[int] | None:
        """Those of a new prompt: from the model's tokenizer here, else from an engine."""
        engines = self._registry.of_model(model)
        base = engines[0].info.model if engines else model
        try:
            async with asyncio.timeout(self._timeout_s):
                mine = await self._local.tokenize(base, rendered)
        except TimeoutError:
            return None
        if mine is not None and not self._local.is_to_compare(base, rendered):
            return mine
        theirs = await self._ask_engines(model, body)
        if mine is None:
            return theirs
        if theirs is not None:
            self._local.compare(base, rendered, mine, theirs)
        return theirs if theirs is not None else mine

    async def _ask_engines(self, model: str, body: bytes) -> list[int] | None:
        for engine_id in self.askable(model)[:_TRIES]:
            try:
                raw = await self.ask(engine_id, body)
                tokens = read(_TOKENS.decode, raw).tokens
            except EngineError as error:
                if error.sick:
                    self._membership.broke(engine_id)
            except (EngineRefusedError, UnreadableError):
                continue
            else:
                return tokens
        return None

    async def ask(self, engine_id: str, body: bytes) -> bytes:
        """Forward a ``/tokenize`` body to one engine.

        Raises:
            EngineError: the engine did not answer correctly in time.
            EngineRefusedError: the engine refused the body.
        """
        engine = self._registry.get(engine_id)
        if engine is None:
            raise EngineError(engine_id, "was removed", sick=False)
        url = f"{engine.info.url}/tokenize"
        raw, _ = await self._upstream.post(
            engine_id, url, body, timeout_s=self._timeout_s, answer_bytes_max=_ANSWER_BYTES_MAX
        )
        return raw

    def askable(self, model: str) -> list[str]:
        """Engines of a model that are not dead, healthy ones first."""
        engines = [e for e in self._registry.of_model(model) if e.health.state is not Health.DEAD]
        engines.sort(key=lambda engine: engine.health.failures)
        return [engine.info.id for engine in engines]

    def _remember(self, key: bytes, tokens: list[int]) -> None:
        if key not in self._known:
            self._known[key] = tokens
            self._kept += len(tokens) + _PROMPT_TOKENS
        while self._kept > TOKENS_KEPT_MAX:
            _, dropped = self._known.popitem(last=False)
            self._kept -= len(dropped) + _PROMPT_TOKENS
