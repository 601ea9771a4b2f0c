"""Pages of the sizes that ``bench host`` moves, and the spaces that they are of."""

from itertools import count
from time import perf_counter
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from bench import measure
from kvstore.client.space import Space
from kvstore.client.store import KVStore
from kvstore.protocol.page import CanonicalLayout, PrefixKeys, ShardSpec, SpaceIdentity

Buffers = list[npt.NDArray[np.uint8]]
"""One array of ``page_bytes`` for each page of a call."""

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


class PageCalls:
    """Calls that move pages of one shape; each goes on where the last one ended.

    Args:
        store: of the node.
        shape: what a call moves.
        memory_bytes: of each side in this process; a whole number of calls.
        cold: take buffers to copy into that have never been touched.

    Attributes:
        prompts: keys of what ``get`` and ``view`` read, one run a call.
    """

    def __init__(
        self, store: KVStore, shape: Shape, memory_bytes: int, *, cold: bool = False
    ) -> None:
        self.shape = shape
        self.prompts: list[PrefixKeys] = []
        self._space = open_space(store, shape)
        self._random = np.random.default_rng()
        self._sources = _cut(measure.prefaulted(memory_bytes), shape)
        target = np.empty(memory_bytes, np.uint8) if cold else measure.prefaulted(memory_bytes)
        self._targets = _cut(target, shape)
        self._turn = count()

    def fill(self) -> None:
        """Store what ``get`` and ``view`` read, and look at all of it once."""
        self.prompts = [self._fresh_keys() for _ in self._sources]
        for keys, pages in zip(self.prompts, self._sources, strict=True):
            assert self._space.put(keys, pages).stored == self.shape.pages
        for _ in self.prompts:
            self.view()

    def put(self) -> float:
        """Store pages under new keys; seconds."""
        keys = self._fresh_keys()
        pages = self._sources[next(self._turn) % len(self._sources)]
        start = perf_counter()
        result = self._space.put(keys, pages)
        seconds = perf_counter() - start
        assert result.stored == self.shape.pages, f"{result}: not all {self.shape.pages} pages"
        return seconds

    def get(self) -> float:
        """Copy stored pages into buffers; seconds."""
        turn = next(self._turn) % len(self.prompts)
        keys, buffers = self.prompts[turn], self._targets[turn]
        start = perf_counter()
        pages = self._space.get(keys, out=buffers)
        seconds = perf_counter() - start
        assert pages == self.shape.pages, f"{pages} pages, not {self.shape.pages}"
        return seconds

    def view(self) -> float:
        """Look at stored pages, verified, and give them back; seconds."""
        keys = self.prompts[next(self._turn) % len(self.prompts)]
        start = perf_counter()
        with self._space.get(keys) as views:
            pages = len(views)
        seconds = perf_counter() - start
        assert pages == self.shape.pages, f"{pages} pages, not {self.shape.pages}"
        return seconds

    def _fresh_keys(self) -> PrefixKeys:
        return random_keys(self._space, self.shape.pages, self._random)


def _cut(memory: npt.NDArray[np.uint8], shape: Shape) -> list[Buffers]:
    pages = list(memory.reshape(-1, shape.page_bytes))
    return [pages[at : at + shape.pages] for at in range(0, len(pages), shape.pages)]
