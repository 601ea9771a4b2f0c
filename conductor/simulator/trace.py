"""Traces of requests: JSON lines with lengths, and the names of the prompt's blocks.

The format is that of the traces which Mooncake published: ``timestamp`` (ms), ``input_length``,
``output_length`` (tokens), ``hash_ids`` (blocks of 512 tokens). Equal ids are equal prefixes up to
the end of that block, so a request is a path in a tree.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kvstore.protocol.errors import InvalidArgument

BLOCK_TOKENS: Final = 512
_SHARED: Final = 0.01
"""A block that more than this part of all requests has belongs to no single session."""


class TraceEntry(msgspec.Struct, frozen=True):
    """One line of a trace; all from ``session`` on are ours, and may be missing."""

    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Annotated[int, Meta(ge=1, le=1 << 24)]
    output_length: Annotated[int, Meta(ge=0, le=1 << 24)]
    hash_ids: list[int] = []
    session: str = ""
    tenant: str = ""
    service: str = ""
    max_tokens: Annotated[int, Meta(ge=1, le=1 << 24)] | None = None


class TracedRequest(msgspec.Struct, frozen=True):
    """A request of a trace.

    Attributes:
        number: position in the trace, from 1 on.
        at_s: seconds after the first, at the trace's own speed.
        tokens: tokens of the prompt, at least 1.
        output: tokens of the answer, at least 1; only the simulated engine may see it.
        blocks: ids of the full blocks of the prompt; the last, partly filled one is not among them,
            because engines do not keep such blocks.
        session: conversation that it belongs to.
        tenant: on whose behalf; empty = unknown.
        service: name of its class; empty = the first one.
        output_max: maximum tokens of the answer; None = no limit is known.
    """

    number: int
    at_s: float
    tokens: int
    output: int
    blocks: tuple[int, ...]
    session: str
    tenant: str = ""
    service: str = ""
    output_max: int | None = None


def read_trace(path: Path, requests: int | None = None) -> list[TracedRequest]:
    """The first ``requests`` of a trace; None = all.

    Raises:
        OSError: the file cannot be read.
        InvalidArgument: a line is no request; names it.
    """
    decoder = msgspec.json.Decoder(TraceEntry)
    entries: list[TraceEntry] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if requests is not None and len(entries) >= requests:
                break
            if line.strip():
                try:
                    entries.append(decoder.decode(line))
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise InvalidArgument("trace", f"{path}, line {number}: {error}") from error
    return from_entries(entries)


def from_entries(entries: Iterable[TraceEntry]) -> list[TracedRequest]:
    """Requests in order of arrival, with a session each.

    A trace does not say which requests are one conversation, but clients do. A request without a
    session gets the first of its blocks that is not shared by over 1 % of all requests, as a system
    prompt is.
    """
    ordered = sorted(entries, key=lambda one: one.timestamp)
    start = ordered[0].timestamp if ordered else 0.0
    counts = Counter(block for one in ordered for block in one.hash_ids)
    most = max(2.0, _SHARED * len(ordered))
    return [
        TracedRequest(
            number=number,
            at_s=(one.timestamp - start) / 1e3,
            tokens=one.input_length,
            output=max(1, one.output_length),
            blocks=tuple(one.hash_ids[: one.input_length // BLOCK_TOKENS]),
            session=one.session or _session(one.hash_ids, counts, most),
            tenant=one.tenant,
            service=one.service,
            output_max=one.max_tokens,
        )
        for number, one in enumerate(ordered, start=1)
    ]


def _session(blocks: Sequence[int], counts: Counter[int], most: float) -> str:
    own = next((block for block in blocks if counts[block] <= most), None)
    return "" if own is None else f"s{own}"
