"""What may be believed of one publisher's numbered batches: gaps, restarts, repetitions. Pure.

Batches reach us live, and again by replay. As long as every number follows the one before, what we
hold of that worker is true. A number that is missing even after a replay, another boot id, a number
that runs backwards, or a last batch that is not what it was: then what we hold may be wrong, and is
dropped before anything else is applied.
"""

import enum
import hashlib


class BatchVerdict(enum.Enum):
    """What to do with a batch."""

    APPLY = "apply"
    SKIP = "skip"
    CLEAR_AND_APPLY = "clear and apply"
    RESTARTED = "clear, and replay from the beginning"


class Sequence:
    """One publisher's sequence as far as it was seen."""

    def __init__(self) -> None:
        self._boot = b""
        self._next: int | None = None  # None: nothing seen of this life
        self._last = b""  # digest of the batch before ``_next``
        self._live_last = -1
        self.restarts = 0
        self.gaps = 0
        self.gaps_lost = 0

    @property
    def replay_from(self) -> int:
        """First number to ask for: the last batch seen, to compare, and what comes after it."""
        return max(0, (self._next or 0) - 1)

    def met(self, topic: bytes) -> bool:
        """Look at the topic of any message.

        Returns:
            whether the publisher has restarted, so that everything held of it must be dropped.
        """
        boot = boot_of(topic)
        known, self._boot = self._boot, boot
        if not known or known == boot:
            return False
        self.forget()
        self.restarts += 1
        return True

    def met_live(self, topic: bytes, number: int) -> bool:
        """As :meth:`met`, for a live message: numbers of one life only grow."""
        if self.met(topic):
            self._live_last = number
            return True
        backwards = number <= self._live_last
        self._live_last = number
        if backwards:
            self.forget()
            self.restarts += 1
        return backwards

    def needs_replay(self, number: int) -> bool:
        """Whether batches before this live one are missing."""
        if self._next is None:
            return number > 0
        if number > self._next:
            self.gaps += 1
            return True
        return False

    def take(self, number: int, payload: bytes) -> BatchVerdict:
        """Decide about the next batch, from replay or live."""
        if self._next is not None and number < self._next - 1:
            return BatchVerdict.SKIP
        digest = hashlib.blake2b(payload, digest_size=16).digest()
        if self._next is None or number == self._next:
            verdict = BatchVerdict.APPLY
        elif number == self._next - 1:
            if digest == self._last:
                return BatchVerdict.SKIP
            self.forget()
            self.restarts += 1
            return BatchVerdict.RESTARTED
        else:
            self.gaps_lost += 1
            verdict = BatchVerdict.CLEAR_AND_APPLY
        self._next = number + 1
        self._last = digest
        return verdict

    def replay_was_empty(self) -> bool:
        """A replay brought nothing, not even the last batch seen.

        Returns:
            whether that is a restart: a publisher that gives no boot id must know its last batch.
        """
        if self._next is None or self._boot:
            return False
        self.forget()
        self.restarts += 1
        return True

    def forget(self) -> None:
        """Nothing is believed any more."""
        self._next = None
        self._last = b""


def boot_of(topic: bytes) -> bytes:
    """The boot id in ``kind@name@boot``; empty when the topic has none."""
    parts = topic.split(b"@")
    return parts[2] if len(parts) == 3 else b""
