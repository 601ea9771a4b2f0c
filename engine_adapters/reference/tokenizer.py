"""A tokenizer with one token per byte: nothing to download, and one tokenization per prompt."""

import codecs
from collections.abc import Sequence
from typing import Final

EOS: Final = 257
"""The last token of an output; 0 to 255 are bytes."""
VOCAB_SIZE: Final = 320
"""Bytes and specials, rounded up to whole cache lines; the rest are never produced."""

PRINTABLE: Final = (ord("\n"), *range(0x20, 0x7F))
"""The tokens that the random model may generate."""


def encode(text: str) -> list[int]:
    """UTF-8 bytes of ``text``, without special tokens, so that tokens concatenate like text."""
    return list(text.encode("utf-8", errors="surrogatepass"))


def shown(token: int) -> str:
    """A name of a token: its character, its byte if it is a part of one, else its number."""
    if token < 0x80:
        return chr(token)
    return f"bytes:\\x{token:02x}" if token < 0x100 else f"<{token}>"


class TextStream:
    """Converts output tokens to text incrementally, and detects stop strings.

    Text that could be the start of a stop string is held back, so that returned text is final.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped = False

    def feed(self, token: int) -> str:
        """The text that becomes final with ``token``; sets ``stopped`` at a stop string."""
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
        """The remaining text, if the output ended without a stop string."""
        text = self._held + self._decoder.decode(b"", final=True)
        self._held = ""
        return "" if self.stopped else text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of ``text`` that is a prefix of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
