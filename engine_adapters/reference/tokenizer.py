"""A byte is a token: nothing to download, and every prompt has exactly one tokenization."""

import codecs
from collections.abc import Sequence
from typing import Final

EOS: Final = 257
"""The last token of an output; 0 to 255 are bytes."""
VOCAB_SIZE: Final = 320
"""Bytes and specials, rounded up to whole cache lines; the rest are never produced."""

PRINTABLE: Final = (ord("\n"), *range(0x20, 0x7F))
"""What the random model may say."""


def encode(text: str) -> list[int]:
    """UTF-8 bytes of ``text``; no special token is added, so tokens concatenate as text does."""
    return list(text.encode("utf-8", errors="surrogatepass"))


class TextStream:
    """Turns output tokens into text as they come, and sees the stop strings.

    Text that could still turn out to be the start of a stop string is held back, so what was
    given out never has to be taken back.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped = False

    def feed(self, token: int) -> str:
        """Text that ``token`` makes certain; sets ``stopped`` when a stop string is complete."""
        assert not self.stopped, "nothing follows a stop"
        self._held += self._decoder.decode(bytes([token])) if token < 256 else ""
        ends = [end for stop in self._stops if (end := self._held.find(stop)) >= 0]
        if ends:
            self.stopped = True
            text, self._held = self._held[: min(ends)], ""
            return text
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def flush(self) -> str:
        """The rest, when the output ended for another reason than a stop string."""
        text = self._held + self._decoder.decode(b"", final=True)
        self._held = ""
        return "" if self.stopped else text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
