"""How blocks and pages of a prompt are named, as engines and nodes publish them. Pure.

The names are the chain values of :mod:`kvstore.index.scope`. A request names a LoRA adapter as its
model; whether a name is one depends on the engine. An engine's own blocks are distinguished by the
adapter's name, as in its events; pages at nodes by the seed of their keys: the adapter's name, path
and files.
"""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from conductor.routing.engines import EngineInfo
from kvstore.engine.identity import chain_seed, lora_parts, salt_parts
from kvstore.index.control import FollowedWorker
from kvstore.index.scope import ChainKind, key_chains, scope_seed, token_chains
from kvstore.protocol.page import PrefixKeys, page_keys

Tokens = npt.NDArray[np.uint32]
Chains = npt.NDArray[np.uint64]

SPACE_DIGITS: Final = 64
"""A domain with this many digits is a space; others name a model."""


class PromptScope(NamedTuple):
    """How blocks are named.

    Attributes:
        kind: by their tokens or by prefix keys.
        domain: a model, or the hex digest of a space.
        block_tokens: tokens in a block or page.
        of_space: pages of a space, whose digest names the page size too.
        lora: name of the LoRA adapter; empty for none.
        lora_parts: what the adapter is of the seeds of prefix keys, if these are pages of a space.
    """

    kind: ChainKind
    domain: str
    block_tokens: int
    of_space: bool = False
    lora: str = ""
    lora_parts: tuple[tuple[str, str], ...] = ()


def seed_of(scope: "PromptScope", secret: int, salt: str = "") -> int:
    """The seed of a scope's chain values. That of pages is the space's: their keys say the rest."""
    if scope.of_space:
        return scope_seed(secret, "keys", scope.domain)
    return scope_seed(secret, scope.kind, scope.domain, scope.block_tokens, scope.lora, salt)


@dataclass(slots=True)
class NamedPrompt:
    """A prompt, hashed once for each scope.

    Attributes:
        tokens: its token ids.
        salt: its cache salt; empty for none.
        model: the model, or LoRA adapter, that is asked.
        chains: the chain values of its full blocks, by scope; of one secret.
    """

    tokens: Tokens
    salt: str
    model: str
    chains: dict[PromptScope, Chains] = field(default_factory=dict)

    def named(self, scope: PromptScope, secret: int) -> Chains:
        """The chain values of all full blocks."""
        found = self.chains.get(scope)
        if found is None:
            found = self.chains[scope] = self._hashed(scope, secret)
        return found

    def pages(self, scope: PromptScope) -> PrefixKeys:
        """The prefix keys of all full pages of a space."""
        assert scope.of_space
        seed = chain_seed((*scope.lora_parts, *salt_parts(self.salt)))
        return page_keys(self.tokens, scope.block_tokens, seed=seed)

    def _hashed(self, scope: PromptScope, secret: int) -> Chains:
        size = scope.block_tokens
        if scope.of_space:
            return key_chains(self.pages(scope).packed, seed_of(scope, secret))
        seed = seed_of(scope, secret, self.salt)
        if scope.kind == "tokens":
            return token_chains(self.tokens, size, seed)
        return key_chains(page_keys(self.tokens, size).packed, seed)


def lora_of(info: EngineInfo, model: str) -> str:
    """The LoRA adapter that a request for ``model`` names at an engine; empty for none.

    An engine may be registered with an adapter as its model.
    """
    return model if model != info.model or model in info.adapters else ""


def own_scope(info: EngineInfo, lora: str, known: FollowedWorker | None) -> PromptScope:
    """How an engine names its own blocks with a LoRA adapter, as far as is known."""
    kind: ChainKind = "keys" if known is not None and known.kind == "keys" else "tokens"
    size = known.block_tokens if known is not None else 0
    block_tokens = size or info.block_tokens or info.page_tokens
    return PromptScope(kind, own_domain(info), block_tokens, lora=lora)


def own_domain(info: EngineInfo) -> str:
    """Whose blocks an engine could share if they were its own."""
    return f"model:{info.model}"


def space_scope(info: EngineInfo, lora: str) -> PromptScope | None:
    """How pages of an engine's space with a LoRA adapter are named; None if that is unknown."""
    if len(info.domain) != SPACE_DIGITS:
        return None
    parts: tuple[tuple[str, str], ...] = ()
    if lora:
        adapter = info.adapters.get(lora)
        if adapter is None or adapter.path is None or adapter.weights is None:
            return None
        parts = lora_parts(lora, adapter.path, adapter.weights)
    return PromptScope(
        "keys", info.domain, info.page_tokens, of_space=True, lora=lora, lora_parts=parts
    )
