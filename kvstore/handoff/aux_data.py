"""The data besides KV that decode needs to continue a request; sent with the last KV."""

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import xxhash

from kvstore.handoff.messages import UNREADABLE
from kvstore.protocol.errors import InvalidArgument, ProtocolError

HIDDEN_BYTES_MAX: Final = 64 * 1024
AUX_BYTES_MAX: Final = 128 * 1024
"""Maximum encoded size of all fields together: the size of an aux slot."""


class AuxData(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The aux data of a request.

    Attributes:
        first_token: token that prefill sampled.
        position: its absolute position; the next sample is for the one after.
        seed: of the sampling; None if greedy.
        is_final: the first token ends the request: decode computes no step.
        logprobs: of the first token and of alternatives to it: token → log-probability.
        draft_top_k: tokens that a draft model proposes for the next position.
        cached_tokens: tokens of the prompt that prefill did not compute.
        hidden_state: of the last token, opaque; at most 64 KiB.
        prompt: :func:`prompt_digest` of the prompt of this KV; empty = unknown.
    """

    first_token: int
    position: int
    seed: int | None = None
    is_final: bool = False
    logprobs: dict[int, float] = {}
    draft_top_k: list[int] = []
    cached_tokens: int = 0
    hidden_state: bytes = b""
    prompt: bytes = b""


def prompt_digest(tokens: Sequence[int]) -> bytes:
    """A digest that identifies a prompt: a room is only a number, which a router may mix up.

    It is XXH3's 128-bit hash (seed 0, canonical byte order; the format of
    https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md) of the token ids, as signed
    64-bit little-endian integers one after the other. It does not protect against prompts that are
    constructed to have the same digest; the secret of the handoffs does.

    Args:
        tokens: ids of all tokens of the prompt.

    Returns:
        16 bytes.
    """
    return xxhash.xxh3_128_digest(np.asarray(tokens, dtype="<i8").tobytes())


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(AuxData)


def encode_aux(aux: AuxData) -> bytes:
    """Encode aux data.

    Raises:
        InvalidArgument: it is too large.
    """
    if len(aux.hidden_state) > HIDDEN_BYTES_MAX:
        raise InvalidArgument("hidden_state", f"{len(aux.hidden_state)} bytes are over 64 KiB")
    packed = _encoder.encode(aux)
    if len(packed) > AUX_BYTES_MAX:
        raise InvalidArgument("aux", f"{len(packed)} bytes are over {AUX_BYTES_MAX}")
    return packed


def decode_aux(packed: bytes) -> AuxData:
    """Decode aux data.

    Raises:
        ProtocolError: the bytes are invalid.
    """
    try:
        found = _decoder.decode(packed)
    except UNREADABLE as error:  # of a field that is unknown, perhaps
        raise ProtocolError(f"the aux data cannot be read: {error}") from error
    if len(found.hidden_state) > HIDDEN_BYTES_MAX:
        raise ProtocolError(f"{len(found.hidden_state)} bytes of hidden state are over 64 KiB")
    return found
