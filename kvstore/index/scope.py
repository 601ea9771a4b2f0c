"""Chain values: the index's names of prefixes, and the seeds that keep scopes apart. Pure.

A chain value is a uint64 other than 0, of one of two kinds:

* **keys**: the first 8 bytes of a prefix key (:func:`kvstore.protocol.page.page_keys`) as a
  little-endian integer, xor the seed of the scope. Nodes publish prefix keys; SGLang publishes
  their first 8 bytes as a signed big-endian integer.
* **tokens**: the xxh3_64 of a block's tokens, little-endian uint32, seeded with the chain value of
  the block before; that of the first block with the seed of the scope. Other inputs of a block (an
  image) are hashed after its tokens, as msgpack.

64 bits are sufficient: the index predicts, the store verifies bytes, and the senders of events and
prompts do not know the secret in the seed.
"""

from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.mover.chains import CHAINS
from kvstore.protocol.page import KEY_BYTES

ChainKind = Literal["keys", "tokens"]
ChainValues = npt.NDArray[np.uint64]
_ONE: Final = np.uint64(1)


def scope_seed(
    secret: int,
    kind: ChainKind,
    domain: str,
    block_tokens: int = 0,
    lora: str = "",
    salt: str = "",
) -> int:
    """The seed of all chains of one scope: 64 bits, not 0, that differ if any argument does.

    Args:
        secret: of the index, 0..2**64-1.
        kind: kind of the chain values.
        domain: who may share: the hex digest of a node's space, or the domain of an engine.
        block_tokens: tokens in a block; 0 for a space, whose digest says it.
        lora: name of the LoRA; empty for none.
        salt: cache salt of the prompt; empty for none.
    """
    parts = [kind, domain, str(block_tokens), lora, salt]
    packed = [part.encode("utf-8", "surrogatepass") for part in parts]
    data = b"".join(len(part).to_bytes(4, "little") + part for part in packed)
    return xxhash.xxh3_64_intdigest(data, secret) or 1


def key_chains(packed: bytes, seed: int) -> ChainValues:
    """Chain values of prefix keys.

    Args:
        packed: n keys of 32 bytes.
        seed: result of :func:`scope_seed` for ``keys``.

    Returns:
        Shape (n,), dtype uint64.
    """
    words = np.frombuffer(packed, dtype="<u8").reshape(-1, KEY_BYTES // 8)
    chains: ChainValues = np.maximum(words[:, 0] ^ np.uint64(seed), _ONE)
    return chains


def token_chains(ids: npt.NDArray[np.uint32], block_tokens: int, seed: int) -> ChainValues:
    """Chain values of the full blocks of a prompt.

    Args:
        ids: token ids, shape (n,), dtype uint32.
        block_tokens: tokens in a block of the engine, at least 1.
        seed: result of :func:`scope_seed` for ``tokens``.

    Returns:
        Shape (n // block_tokens,), dtype uint64.
    """
    return CHAINS.chain(ids, block_tokens, seed)
