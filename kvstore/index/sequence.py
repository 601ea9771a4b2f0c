"""Detects gaps, restarts and repetitions in one publisher's numbered batches. Pure.

Batches arrive live and by replay. As long as the numbers are consecutive, the entries of that
worker are correct. If a number is missing even after a replay, or the boot id changes, or a number
goes backwards, or the last batch differs, the entries may be wrong and are deleted before anything
else is applied.
"""

import enum

import xxhash


class BatchVerdict(enum.Enum):
    """The action for a batch."""

    APPLY = "apply"
    SKIP = "skip"
    CLEAR_AND_APPLY = "clear and apply"
    RESTARTED = "clear, and replay from the beginning"


class Sequence:
    """The state of one publisher's sequence."""

    def __init__(self) -> None:
        self._boot = b""
        self._next: int | None = None  # None: nothing seen of this boot
        self._last = b""  # digest of the batch before ``_next``; empty: it came by a snapshot
        self._live_last = -1
        self.restarts = 0
        self.gaps = 0
        self.gaps_lost = 0

    @property
    def known(self) -> bool:
        """Whether anything is known of the publisher."""
        return self._next is not None

    @property
    def next(self) -> int:
        """Number of the first batch that was not applied; 0 if nothing is known."""
        return self._next or 0

    def begin(self, boot: bytes, number: int) -> None:
        """Everything before a batch is known, from a snapshot.

        Args:
            boot: boot id of the publisher.
            number: number of the first batch after the snapshot.
        """
        if boot != self._boot:
            self._live_last = -1
        self._boot, self._next, self._last = boot, number, b""

    @property
    def replay_from(self) -> int:
        """First number to request: the last batch seen, for comparison, and those after it."""
        return max(0, (self._next or 0) - 1)

    def is_of(self, topic: bytes) -> bool:
        """Whether a topic belongs to the known start of the publisher."""
        return self._boot == boot_of(topic)

    def met(self, topic: bytes) -> bool:
        """Check the topic of any message.

        Returns:
            Whether the publisher has restarted, so that its entries must be deleted.
        """
        boot = boot_of(topic)
        known, self._boot = self._boot, boot
        if not known or known == boot:
            return False
        self.forget()
        self._live_last = -1
        self.restarts += 1
        return True

    def met_live(self, topic: bytes, number: int) -> bool:
        """Like :meth:`met`, for a live message: its numbers must increase."""
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
        """Decide on the next batch, from replay or live."""
        if self._next is not None and number < self._next - 1:
            return BatchVerdict.SKIP
        digest = xxhash.xxh3_128_digest(payload)
        if self._next is None or number == self._next:
            verdict = BatchVerdict.APPLY
        elif number == self._next - 1:
            if self._last in (digest, b""):
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
        """A replay was empty, without even the last batch seen.

        Returns:
            Whether this is a restart: a publisher without a boot id must have its last batch.
        """
        if self._next is None or self._boot:
            return False
        self.forget()
        self.restarts += 1
        return True

    def forget(self) -> None:
        """Reset: nothing is known of the publisher."""
        self._next = None
        self._last = b""


def boot_of(topic: bytes) -> bytes:
    """The boot id in ``kind@name@boot``; empty if the topic has none."""
    parts = topic.split(b"@")
    return parts[2] if len(parts) == 3 else b""
