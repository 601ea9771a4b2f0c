"""Journals of simulations in files, and their replay."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from conductor.costs.book import CostBook
from conductor.routing.journal import JournalHead, Line, Stepped, repeat, shown
from conductor.routing.policy import POLICIES
from conductor.simulator.skew import SkewedBook
from kvstore.protocol.errors import InvalidArgument


class Difference(NamedTuple):
    """A step that decided otherwise than before."""

    at: float
    before: list[list[str]]
    now: list[list[str]]


def replay(head: JournalHead, lines: Iterable[Line]) -> list[Difference]:
    """Give a new dispatcher the inputs of a journal.

    Returns:
        The first step that decides otherwise, if any; what follows it would have had other inputs.
    """
    dispatcher, registry = head.dispatcher(SkewedBook(head.skew) if head.skew else CostBook())
    for line in lines:
        effects = repeat(line, dispatcher, registry)
        if isinstance(line, Stepped) and (now := shown(effects or [])) != line.effects:
            return [Difference(line.at, line.effects, now)]
    return []


def write_journal(path: Path, head: JournalHead, lines: Sequence[Line]) -> None:
    """Write a file of JSON lines.

    Raises:
        OSError: it cannot be written.
    """
    encoder = msgspec.json.Encoder()
    path.write_bytes(b"\n".join([encoder.encode(one) for one in (head, *lines)]) + b"\n")


def read_journal(path: Path) -> tuple[JournalHead, list[Line]]:
    """Read such a file.

    Raises:
        OSError: it cannot be read.
        InvalidArgument: it is no journal, or its policy is unknown.
    """
    first, *rest = path.read_bytes().splitlines() or [b""]
    try:
        head = msgspec.json.decode(first, type=JournalHead)
        decoder = msgspec.json.Decoder(Line)
        lines = [decoder.decode(line) for line in rest]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument("journal", f"{path}: {error}") from error
    if head.policy not in POLICIES:
        raise InvalidArgument("journal", f"{path}: {head.policy!r} is not a known policy")
    return head, lines
