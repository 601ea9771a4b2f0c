"""Names of pages, with the layouts of their bytes.

A **page** is the KV of ``page_tokens`` tokens on one rank. Its name has three parts:

* its **space**: everything besides the tokens that decides whether KV may be shared (tenant, model,
  revision, dtype, page size, scope);
* its **prefix key**: the chain hash of *all* tokens up to the end of the page;
* its **shard**: its layers and heads, and the layout of its bytes.

All three are part of the seed of the page's digest, so bytes verify only under the name they were
stored under. Beside them stands the name of the engine that stores and loads pages. This module is
pure.
"""

import hashlib
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Final, NewType, overload

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore.protocol.errors import InvalidArgument, LayoutMismatch
from kvstore.protocol.layout import CanonicalLayout as CanonicalLayout
from kvstore.protocol.layout import Layout as Layout
from kvstore.protocol.layout import OpaqueLayout as OpaqueLayout

PrefixKey = NewType("PrefixKey", bytes)
"""32 bytes: the chain hash of all tokens up to the end of a page."""

KEY_BYTES: Final = 32
ALL_KEYS: Final = bytes(KEY_BYTES)
"""Never the key of a page; in a tombstone it stands for all pages of the space and shard."""
DIGEST_BYTES: Final = 16
PAIR_BYTES_MAX: Final = 1022
"""Maximum bytes of a packed (space, shard) pair: 64 of them fit into a footer of the SSD log."""
PAGE_TOKENS_MIN_DEFAULT: Final = 64

ENGINE_NAME: Final = r"^[A-Za-z0-9._:*\[\]-]{1,300}(/dp[0-9]{1,5})?$(?!\n)"
"""An engine's name: letters, digits and ``. _ : * [ ] -``, and its data-parallel rank, if any."""
INSTANCE_BYTES: Final = 16
EventEndpoint = Annotated[str, msgspec.Meta(max_length=512, pattern=r"^[!-~]*$(?!\n)")]

_ITEM_BYTES: Final = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3": 1, "float8_e5m2": 1, "uint8": 1,
}  # fmt: skip

_WORD: Final = np.dtype("<u8")

Tokens = Sequence[int] | npt.NDArray[np.integer]


class SpaceIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything except the tokens that must be equal for two engines to share KV.

    Attributes:
        tenant: isolation domain; memory of one tenant is never mapped by engines of another.
        model: name of the model, as operators use it.
        revision: revision or checksum of the weights; empty if the name identifies them.
        kv_dtype: element type of K and V: ``float32``, ``float16``, ``bfloat16``,
            ``float8_e4m3``, ``float8_e5m2`` or ``uint8``.
        page_tokens: number of tokens in a page, 1 to 65,536.
        scope: empty for shared pages; a name for a private space (handoffs use one).

    Raises:
        InvalidArgument: ``model`` is empty, or ``kv_dtype`` or ``page_tokens`` is not allowed.
    """

    model: str
    kv_dtype: str
    page_tokens: int
    tenant: str = "default"
    revision: str = ""
    scope: str = ""

    def __post_init__(self) -> None:
        """Check the values."""
        if not self.model:
            raise InvalidArgument("model", "must not be empty")
        if self.kv_dtype not in _ITEM_BYTES:
            known = ", ".join(sorted(_ITEM_BYTES))
            raise InvalidArgument("kv_dtype", f"{self.kv_dtype!r} is not one of {known}")
        if not 1 <= self.page_tokens <= 65_536:
            raise InvalidArgument("page_tokens", f"{self.page_tokens} is outside 1..65536")

    @property
    def digest(self) -> bytes:
        """32 bytes that are equal exactly when every field is."""
        return _fingerprint("space", self)


class ShardSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of each page of a space that one rank holds.

    Attributes:
        layout: layout of the bytes.
        layers: half-open range ``(start, stop)`` of the model's layers.
        heads: half-open range ``(start, stop)`` of the model's KV heads.
        group: name of the KV group: the layers of a group need the same pages for a hit.
        window_pages: number of pages of this group that a hit of n pages needs: 0 = all pages; w =
            the last w pages (sliding window; 1 = only the last, as for a Mamba state).

    Raises:
        InvalidArgument: a range is empty or reversed, or ``window_pages`` is negative.
    """

    layout: Layout
    layers: tuple[int, int]
    heads: tuple[int, int]
    group: str = "attention"
    window_pages: int = 0

    def __post_init__(self) -> None:
        """Refuse empty or reversed ranges."""
        for name, (start, stop) in (("layers", self.layers), ("heads", self.heads)):
            if not 0 <= start < stop:
                raise InvalidArgument(name, f"({start}, {stop}) is not a non-empty range")
        if self.window_pages < 0:
            raise InvalidArgument("window_pages", f"{self.window_pages} is negative")

    @property
    def layer_count(self) -> int:
        """Number of layers of this shard."""
        return self.layers[1] - self.layers[0]

    @property
    def digest(self) -> bytes:
        """32 bytes that are equal exactly when every field is."""
        return _fingerprint("shard", self)

    def page_bytes(self, space: SpaceIdentity) -> int:
        """Bytes of one page of this shard.

        Raises:
            LayoutMismatch: the layout does not match the space; ``field`` names the difference.
        """
        match self.layout:
            case CanonicalLayout(head_dim=head_dim):
                if head_dim < 1:
                    raise LayoutMismatch("head_dim", f"{head_dim} is not positive")
                heads = self.heads[1] - self.heads[0]
                token_bytes = heads * head_dim * _ITEM_BYTES[space.kv_dtype]
                return self.layer_count * 2 * space.page_tokens * token_bytes
            case OpaqueLayout(block_tokens=block_tokens, block_bytes=block_bytes):
                if block_tokens < 1 or space.page_tokens % block_tokens:
                    raise LayoutMismatch(
                        "block_tokens",
                        f"{block_tokens} does not divide page_tokens={space.page_tokens}",
                    )
                if block_bytes < 1:
                    raise LayoutMismatch("block_bytes", f"{block_bytes} is not positive")
                return self.layer_count * (space.page_tokens // block_tokens) * block_bytes


@lru_cache(maxsize=1024)
def pack_pair(space: SpaceIdentity, shard: ShardSpec) -> bytes:
    """The msgpack of a space and a shard; equal if and only if both are equal.

    Raises:
        InvalidArgument: the names have more than :data:`PAIR_BYTES_MAX` bytes.
    """
    packed = _ENCODER.encode((space, shard))
    if len(packed) > PAIR_BYTES_MAX:
        what = f"its names have {len(packed)} bytes together, more than {PAIR_BYTES_MAX}"
        raise InvalidArgument("space", what)
    return packed


def digest_seed(space: SpaceIdentity, shard: ShardSpec) -> int:
    """64 bits of H(space, shard); :func:`page_seeds` adds the key."""
    return int.from_bytes(hashlib.sha256(space.digest + shard.digest).digest()[:8], "little")


def page_seeds(packed_keys: bytes, seed: int) -> npt.NDArray[np.uint64]:
    """The xxh3_128 seed of each page: H(space, shard) xor the first 8 bytes of its prefix key.

    Both are uniformly distributed hashes, so two different (space, key, shard) have the same seed
    with probability 2**-64, without another hash per page.

    Args:
        packed_keys: n keys of 32 bytes.
        seed: result of :func:`digest_seed`.

    Returns:
        The seeds, shape (n,), dtype uint64.
    """
    return np.frombuffer(packed_keys, dtype=_WORD)[:: KEY_BYTES // 8] ^ np.uint64(seed)


class EngineLabel(msgspec.Struct, array_like=True, frozen=True):
    """The engine that a process belongs to, as its adapter says.

    Attributes:
        name: the engine's name; a data-parallel rank is part of it (``name/dp1``).
        instance: 16 bytes that are the same in all processes of one start of the engine, and unique
            to it.
        chosen: True if an operator chose the name; then a second live engine with this name is
            refused. False if it was derived from an address; then the session of a second engine
            has no name.
        events: endpoint of the engine's KV events, to which followers connect; the host ``*`` means
            any address of its machine. Empty = none, or unknown.
        events_bind: endpoint to which the engine connects; its follower must listen there.
        events_replay: endpoint for missed batches, to which followers connect.
        block_tokens: tokens of one of its blocks; 0 = unknown.
    """

    name: Annotated[str, msgspec.Meta(pattern=ENGINE_NAME)]
    instance: Annotated[bytes, msgspec.Meta(min_length=INSTANCE_BYTES, max_length=INSTANCE_BYTES)]
    chosen: bool = True
    events: EventEndpoint = ""
    events_bind: EventEndpoint = ""
    events_replay: EventEndpoint = ""
    block_tokens: Annotated[int, msgspec.Meta(ge=0, le=65_536)] = 0


class PrefixKeys(Sequence[PrefixKey]):
    """Consecutive prefix keys of one chain; immutable. A slice keeps the key before it.

    Attributes:
        packed: the keys, 32 bytes each, in chain order.
        parent: the key before the first, 32 bytes; empty at the start of the chain.
        tokens: token ids of the pages, shape ``(pages * page_tokens,)``, dtype uint32; None if
            only the keys are known. The array is not copied.
        page_tokens: number of tokens in a page; 0 if unknown.
        seed: seed of the chain (salt, LoRA or multimodal identity); may be empty.
    """

    __slots__ = ("packed", "page_tokens", "parent", "seed", "tokens")

    def __init__(
        self,
        packed: bytes,
        parent: bytes = b"",
        tokens: npt.NDArray[np.uint32] | None = None,
        page_tokens: int = 0,
        seed: bytes = b"",
    ) -> None:
        """Wrap existing keys; :func:`page_keys` makes new ones.

        Raises:
            InvalidArgument: a length is wrong; ``field`` names the argument.
        """
        if len(packed) % KEY_BYTES:
            raise InvalidArgument(
                "keys", f"{len(packed)} bytes are not a whole number of 32-byte keys"
            )
        if parent and len(parent) != KEY_BYTES:
            raise InvalidArgument("parent", f"{len(parent)} bytes are not a 32-byte key")
        if tokens is not None and len(tokens) * KEY_BYTES != len(packed) * page_tokens:
            raise InvalidArgument("tokens", f"{len(tokens)} tokens do not fill these pages")
        self.packed = packed
        self.parent = parent
        self.tokens = tokens
        self.page_tokens = page_tokens
        self.seed = seed

    def __len__(self) -> int:
        return len(self.packed) // KEY_BYTES

    @overload
    def __getitem__(self, index: int) -> PrefixKey: ...
    @overload
    def __getitem__(self, index: slice) -> "PrefixKeys": ...
    def __getitem__(self, index: int | slice) -> "PrefixKey | PrefixKeys":
        if isinstance(index, int):
            position = range(len(self))[index]
            return PrefixKey(self.packed[position * KEY_BYTES : (position + 1) * KEY_BYTES])
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise InvalidArgument("keys", "keys cannot be sliced with a step")
        stop = max(start, stop)
        if stop - start == len(self):
            return self
        before = self.packed[(start - 1) * KEY_BYTES : start * KEY_BYTES] if start else self.parent
        tokens = self.tokens
        if tokens is not None:
            tokens = tokens[start * self.page_tokens : stop * self.page_tokens]
        packed = self.packed[start * KEY_BYTES : stop * KEY_BYTES]
        return PrefixKeys(packed, before, tokens, self.page_tokens, self.seed)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PrefixKeys) and (
            (self.packed, self.parent) == (other.packed, other.parent)
        )

    def __hash__(self) -> int:
        return hash((self.packed, self.parent))

    def __repr__(self) -> str:
        head = self.packed[:4].hex()
        return f"PrefixKeys({len(self)} pages, first {head}…)" if self.packed else "PrefixKeys(0)"


def page_keys(
    tokens: Tokens,
    page_tokens: int,
    *,
    seed: bytes = b"",
    known: PrefixKeys | None = None,
) -> PrefixKeys:
    """Hash every full page of ``tokens``; the unfilled tail has no key.

    ``digest[i] = sha256(digest[i-1] ‖ little-endian uint32 tokens of page i)``, 32 bytes. This is
    SGLang's documented page hash, so hashes of HiCache are our keys. Page 0 has no predecessor,
    unless ``seed`` is given: then it is a hash of the seed, so that no seed can equal a key.

    Args:
        tokens: token ids in 0..2**32-1; a numpy integer array is the fastest input.
        page_tokens: number of tokens in a page, at least 1.
        seed: salt, LoRA or multimodal identity; empty for none.
        known: keys of a prefix of this prompt, so that only new pages are hashed. Keys without
            tokens, or whose tokens are not a prefix of ``tokens``, are ignored.

    Returns:
        The keys of all full pages, with a copy of their tokens.

    Raises:
        InvalidArgument: a token id is not in 0..2**32-1, or ``page_tokens`` is less than 1.
    """
    if page_tokens < 1:
        raise InvalidArgument("page_tokens", f"{page_tokens} is not positive")
    ids = _as_uint32(tokens)
    count = len(ids) // page_tokens
    ids = ids[: count * page_tokens]
    packed = b""
    if known is not None and _is_prefix(known, ids, page_tokens, seed):
        packed = known.packed
    new = ids[len(packed) // KEY_BYTES * page_tokens :]
    packed += _chain(packed[-KEY_BYTES:] or _chain_start(seed), new, page_tokens)
    return PrefixKeys(packed, b"", ids, page_tokens, seed)


def extend_keys(known: PrefixKeys, tokens: Tokens) -> PrefixKeys:
    """Hash the full pages that ``tokens`` adds to a chain; only new pages are hashed.

    Args:
        known: the chain so far, from its start and with its tokens; may have no pages.
        tokens: the tokens after it.

    Raises:
        InvalidArgument: ``known`` is not a chain from its start with tokens, or a token id is not
            in 0..2**32-1.
    """
    if known.tokens is None or known.parent or known.page_tokens < 1:
        raise InvalidArgument("known", "is not a chain from its start, with its tokens")
    ids = _as_uint32(tokens)
    ids = ids[: len(ids) // known.page_tokens * known.page_tokens]
    before = known.packed[-KEY_BYTES:] or _chain_start(known.seed)
    packed = known.packed + _chain(before, ids, known.page_tokens)
    joined = np.concatenate((known.tokens, ids))
    return PrefixKeys(packed, b"", joined, known.page_tokens, known.seed)


def _chain(digest: bytes, ids: npt.NDArray[np.uint32], page_tokens: int) -> bytes:
    """Keys of the pages of ``ids`` (whole pages only) after the key ``digest``."""
    packed = bytearray()
    raw = ids.data.cast("B")
    step = page_tokens * 4
    sha256 = hashlib.sha256
    for start in range(0, len(raw), step):
        chain = sha256(digest)
        chain.update(raw[start : start + step])
        digest = chain.digest()
        packed += digest
    return bytes(packed)


def _chain_start(seed: bytes) -> bytes:
    return hashlib.sha256(b"kvstore chain seed\0" + seed).digest() if seed else b""


def _is_prefix(
    known: PrefixKeys, ids: npt.NDArray[np.uint32], page_tokens: int, seed: bytes
) -> bool:
    return (
        known.tokens is not None
        and not known.parent
        and (known.page_tokens, known.seed) == (page_tokens, seed)
        and len(known.tokens) <= len(ids)
        and bool(np.array_equal(known.tokens, ids[: len(known.tokens)]))
    )


def _as_uint32(tokens: Tokens) -> npt.NDArray[np.uint32]:
    """A private, contiguous little-endian uint32 copy of ``tokens``."""
    try:
        if isinstance(tokens, bytes | bytearray | memoryview):
            raise InvalidArgument("tokens", "bytes are not token ids")
        if isinstance(tokens, np.ndarray):
            if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
                what = f"{tokens.ndim}-dimensional array of {tokens.dtype}"
                raise InvalidArgument("tokens", f"a {what} is not a sequence of token ids")
            if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >= 2**32):
                raise InvalidArgument("tokens", "a token id is outside 0..2**32-1")
            return np.array(tokens, dtype="<u4", order="C").reshape(-1)
        return np.frombuffer(array("I", tokens), dtype="<u4") if len(tokens) else _NO_TOKENS
    except (OverflowError, TypeError) as error:
        raise InvalidArgument("tokens", f"not a token id in 0..2**32-1 ({error})") from error


_NO_TOKENS: Final[npt.NDArray[np.uint32]] = np.empty(0, dtype="<u4")
_ENCODER: Final = msgspec.msgpack.Encoder(order="deterministic")


def _fingerprint(kind: str, value: msgspec.Struct) -> bytes:
    """sha256 over the kind and the value's fields in sorted order (msgpack, so unambiguous)."""
    return hashlib.sha256(_ENCODER.encode((kind, value))).digest()
