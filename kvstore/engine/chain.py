"""The prefix keys of one request, extended as the request grows. Pure."""

import hashlib
from collections.abc import Sequence

import numpy as np

from kvstore.engine.identity import chain_seed
from kvstore.engine.requests import PromptScope, Setup
from kvstore.protocol.page import KEY_BYTES, PrefixKeys, extend_keys


class Chain:
    """Keys of the full pages of a request, made from its tokens."""

    def __init__(self, page_tokens: int, seed: bytes = b"") -> None:
        empty = np.empty(0, dtype=np.uint32)
        self.keys = PrefixKeys(b"", b"", empty, page_tokens, seed)

    def extend(self, tokens: Sequence[int]) -> PrefixKeys:
        """Hash new pages.

        Args:
            tokens: all tokens of the request; the tokens of earlier calls come first, unchanged.

        Returns:
            Keys of all full pages.
        """
        page_tokens = self.keys.page_tokens
        known, full = len(self.keys), len(tokens) // page_tokens
        if full > known:
            new = tokens[known * page_tokens : full * page_tokens]
            self.keys = extend_keys(self.keys, new)
        return self.keys


class ShiftedChain:
    """Keys of an engine with a draft layer, whose KV depend on the token after them.

    Page i has the KV of tokens [i·T, (i+1)·T); its key covers the tokens up to and including
    (i+1)·T: the first token is in the seed, and the pages of the chain start at the second. A page
    has a key once the token after it is known.

    Args:
        page_tokens: tokens of a page.
        parts: (kind, value) pairs of what determines the KV besides the tokens.
    """

    def __init__(self, page_tokens: int, parts: Sequence[tuple[str, str]]) -> None:
        self._page_tokens = page_tokens
        self._parts = tuple(parts)
        self._chain: Chain | None = None

    def extend(self, tokens: Sequence[int]) -> PrefixKeys:
        """Like :meth:`Chain.extend`. The keys carry no tokens: those of the chain are shifted."""
        if self._chain is None:
            if len(tokens) <= self._page_tokens:
                return PrefixKeys(b"")
            parts = (*self._parts, ("drafts", str(tokens[0])))
            self._chain = Chain(self._page_tokens, chain_seed(parts))
        known = len(self._chain.keys) * self._page_tokens
        if len(tokens) - 1 - known >= self._page_tokens:
            self._chain.extend(tokens[1:])
        return PrefixKeys(self._chain.keys.packed)


class ForeignChain:
    """Keys of a request with inputs other than tokens, made from the engine's own block hashes.

    For engines whose block hashes cover images, audio and embeddings. The hashes must be sha256, so
    that two inputs with the same hash cannot be constructed.

    Args:
        engine: name of the engine, which is part of the keys.
        page_blocks: blocks of the engine in a page.
        seed: what determines the KV besides the blocks.
    """

    def __init__(self, engine: str, page_blocks: int, seed: bytes) -> None:
        self._page_blocks = page_blocks
        self._start = hashlib.sha256(b"kvstore %b block hash\0" % engine.encode() + seed)
        self.keys = PrefixKeys(b"")

    def extend(self, block_hashes: Sequence[bytes]) -> PrefixKeys:
        """Like :meth:`Chain.extend`, from the hashes of all full blocks."""
        known, full = len(self.keys), len(block_hashes) // self._page_blocks
        if full > known:
            packed = bytearray(self.keys.packed)
            for page in range(known, full):
                last = block_hashes[(page + 1) * self._page_blocks - 1]
                digest = self._start.copy()
                digest.update(bytes(last))
                packed += digest.digest()
            assert len(packed) == full * KEY_BYTES
            self.keys = PrefixKeys(bytes(packed))
        return self.keys


def chain_of(
    setup: Setup, names: PromptScope, epoch: Sequence[tuple[str, str]]
) -> Chain | ShiftedChain | ForeignChain:
    """The chain of a request that has no keys yet.

    Args:
        setup: setup of the request's engine.
        names: what identifies the KV of its prompt besides the tokens.
        epoch: (kind, value) pairs of the engine's weights, if they have changed.
    """
    parts = [*epoch, *names.parts]
    if setup.drafts:
        assert not names.foreign, "the engine's hashes do not have the token after a block"
        return ShiftedChain(setup.page_tokens, parts)
    seed = chain_seed(parts)
    if not names.foreign:
        return Chain(setup.page_tokens, seed)
    return ForeignChain(setup.engine, setup.page_tokens // setup.hash_tokens, seed)
