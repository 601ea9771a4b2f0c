"""Pages of the sizes that ``bench host`` moves, and the spaces that they are of."""

from typing import Final, NamedTuple

import numpy as np

from kvstore.client.space import Space
from kvstore.client.store import KVStore
from kvstore.page import CanonicalLayout, PrefixKeys, ShardSpec, SpaceIdentity

MIB: Final = 1 << 20
LAYER_TOKEN_BYTES: Final = 2 * 8 * 128 * 2
"""K and V of a token in one layer: 8 heads x 128 in bfloat16."""


class Shape(NamedTuple):
    """Pages of one size, and how many of them one call moves."""

    name: str
    page_tokens: int
    layers: int
    pages: int
    views: bool = True
    """Also measured as views, and all of it beside a busy thread."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.page_tokens * self.layers * LAYER_TOKEN_BYTES

    @property
    def call_bytes(self) -> int:
        """Bytes that one call moves."""
        return self.page_bytes * self.pages


SHAPES: Final = (
    Shape("64KiB/x1", page_tokens=16, layers=1, pages=1, views=False),
    Shape("64KiB/x128", page_tokens=16, layers=1, pages=128, views=False),
    Shape("1MiB/x1", page_tokens=64, layers=4, pages=1),
    Shape("1MiB/x16", page_tokens=64, layers=4, pages=16),
    Shape("8MiB/x1", page_tokens=64, layers=32, pages=1),
    Shape("8MiB/x16", page_tokens=64, layers=32, pages=16),
)


def open_space(store: KVStore, shape: Shape) -> Space:
    """The space of a model whose pages have this shape."""
    identity = SpaceIdentity(
        model=f"bench-{shape.name}", kv_dtype="bfloat16", page_tokens=shape.page_tokens
    )
    layout = CanonicalLayout(head_dim=128)
    space = store.space(
        identity, [ShardSpec(layout=layout, layers=(0, shape.layers), heads=(0, 8))]
    )
    assert space.page_bytes == (shape.page_bytes,)
    return space


def random_keys(space: Space, count: int, random: np.random.Generator) -> PrefixKeys:
    """Keys of a prompt of ``count`` pages that nobody has seen before."""
    tokens = random.integers(0, 2**32, count * space.identity.page_tokens, dtype=np.uint32)
    return space.page_keys(tokens)
