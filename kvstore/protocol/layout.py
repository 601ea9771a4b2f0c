"""Layouts of the bytes of a page.

They are apart from the names of pages so that a command that prints them needs no numpy.
"""

import msgspec


class CanonicalLayout(msgspec.Struct, frozen=True, tag="canonical", forbid_unknown_fields=True):
    """``[layer][k|v][token][kv_head][head_dim]``: a layout that all engines can share.

    The elements have the space's ``kv_dtype``. A page's shape is ``(layers, 2, page_tokens, heads,
    head_dim)`` in C order, with the layers and KV heads of the shard.

    Attributes:
        head_dim: number of elements of one head.
    """

    head_dim: int


class OpaqueLayout(msgspec.Struct, frozen=True, tag="opaque", forbid_unknown_fields=True):
    """``[layer][block][the engine's own bytes]``: shared only by engines with equal fields.

    Attributes:
        engine: name of the engine, for example ``vllm``.
        version: version of the engine's block format.
        isa: instruction set for which the bytes are packed; empty if they do not depend on one.
        block_tokens: number of tokens in one of the engine's blocks; divides ``page_tokens``.
        block_bytes: bytes of one block of one layer.
    """

    engine: str
    version: str
    isa: str
    block_tokens: int
    block_bytes: int


Layout = CanonicalLayout | OpaqueLayout
