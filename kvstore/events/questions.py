"""Questions of followers that only the node can answer: which pages it has.

::

    question  "" | "ask" | "snapshot"                                  all pages
              "" | "ask" | "sample" | number of keys, 4 bytes big-endian     some, at random
              "" | "ask" | "audit" | space | shard digest | packed keys      where these are
    answer    "" | topic | "head" | map: boot, sequence_first
              "" | topic | "pages" | [ts, [BlockStored, ...], nil]           any number of them
              "" | topic | "tiers" | map: media, tiers                       of an audit only
              "" | topic | "end" | map: sequence_end, pages
    refusal   "" | topic | "refused" | map: code, message, retry_s

Questions are sent to the socket for replays, and the payloads are msgpack. A publisher that does
not support questions answers with the end of a replay.

Threads: the publisher's thread creates an :class:`OpenQuestion`, sends its answer, and gives it up
if the follower leaves or is too slow; the node's loop adds the answer to it. The deque between them
is the only object that both change.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

ASK: Final = b"ask"
SNAPSHOT: Final = b"snapshot"
SAMPLE: Final = b"sample"
AUDIT: Final = b"audit"
HEAD: Final = b"head"
PAGES: Final = b"pages"
TIERS: Final = b"tiers"
END: Final = b"end"
REFUSED: Final = b"refused"

KEY_BYTES: Final = 32
"""Bytes of a prefix key."""
KEYS_MAX: Final = 4_096
"""Maximum keys of an audit or a sample."""
QUESTION_BYTES_MAX: Final = KEYS_MAX * KEY_BYTES + 1_024
SNAPSHOTS_MAX: Final = 4
"""Snapshots at a time."""
QUESTIONS_MAX: Final = 16
"""Questions at a time, of all kinds."""
MESSAGE_KEYS: Final = 2_048
"""A message of pages is sent when it has this many keys."""
_READY_MAX: Final = 32
"""Messages that wait for the publisher's thread; then the node makes no more of them."""
_SNAPSHOT_S_MAX: Final = 120.0
_SHORT_S_MAX: Final = 10.0
"""Maximum duration of an answer, of a snapshot and of others."""
STALLED_S: Final = 10.0
"""A follower that reads nothing of an answer for this long is disconnected."""
_AGAIN_S: Final = 1.0
"""When a follower that was refused because of too many others should ask again."""
_LABEL_BYTES_MAX: Final = 64


class Asked(NamedTuple):
    """A follower's question; the fields that its kind does not have are empty.

    Attributes:
        kind: :data:`SNAPSHOT`, :data:`SAMPLE` or :data:`AUDIT`.
        keys: number of keys of a sample.
        space: hex digest of an audit's space.
        shard: digest of an audit's shard, as in events.
        packed: keys of an audit, one after the other.
    """

    kind: bytes
    keys: int = 0
    space: str = ""
    shard: str = ""
    packed: bytes = b""


class HeldEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="BlockStored"):
    """Pages that a node has: a :class:`~kvstore.events.publisher.StoredEvent` of no chain.

    Attributes:
        block_hashes: what :func:`encode_keys` returns.
        parent_block_hash: none, although a page may have one.
        token_ids: none.
        block_size: tokens in a page.
        medium: the tier that they are in.
        lora_id: none; followers of engines require the field.
        lora_name: none.
        space: hex digest of the space.
        shard: index of the shard in its space.
        shard_digest: first 16 hex digits of the shard's digest.
        group: name of the shard's KV group.
        window_pages: how many pages of this group a hit needs: the last n; 0 = all.
    """

    block_hashes: msgspec.Raw
    parent_block_hash: None = None
    token_ids: tuple[()] = ()
    block_size: int
    medium: str
    lora_id: None = None
    lora_name: None = None
    space: str
    shard: int
    shard_digest: str
    group: str
    window_pages: int


def encode_keys(packed: bytes | bytearray) -> msgspec.Raw:
    """The msgpack array of some prefix keys, made without an object for each.

    Args:
        packed: n keys of 32 bytes, one after the other; not needed afterwards.
    """
    keys = np.frombuffer(packed, dtype=np.uint8).reshape(-1, KEY_BYTES)
    entries = np.empty((len(keys), KEY_BYTES + 2), dtype=np.uint8)
    entries[:, :2] = 0xC4, KEY_BYTES  # bytes, of this length
    entries[:, 2:] = keys
    return msgspec.Raw(b"\xdd" + len(keys).to_bytes(4, "big") + entries.tobytes())


class RefusedError(Exception):
    """A question is not answered.

    Args:
        code: ``malformed``, ``busy`` or ``unavailable``.
        message: why, and what to do.
        retry_s: when to ask again; 0 = never.
    """

    def __init__(self, code: str, message: str, retry_s: float = 0.0) -> None:
        super().__init__(message)
        self.code = code
        self.retry_s = retry_s

    @property
    def payload(self) -> bytes:
        """The payload of the refusal."""
        fields = {"code": self.code, "message": str(self), "retry_s": self.retry_s}
        return msgspec.msgpack.encode(fields)


class OpenQuestion:
    """One question, and its answer on the way from the node's loop to the publisher's thread.

    Args:
        asked: the question.
        wake: wakes the publisher's thread.

    Attributes:
        asked: the question.
        began: monotonic time in seconds.
        deadline: when the answer must have been sent, likewise.
        given_up: the follower has left or was disconnected: the rest of the answer is not needed.
    """

    def __init__(self, asked: Asked, wake: Callable[[], None]) -> None:
        self.asked = asked
        self.began = time.monotonic()
        longest_s = _SNAPSHOT_S_MAX if asked.kind == SNAPSHOT else _SHORT_S_MAX
        self.deadline = self.began + longest_s
        self.given_up = False
        self._wake = wake
        self._ready: deque[tuple[bytes, Any]] = deque()

    @property
    def is_full(self) -> bool:
        """Whether the node must wait until the follower has read more."""
        return len(self._ready) >= _READY_MAX

    @property
    def is_waiting(self) -> bool:
        """Whether a message waits to be sent."""
        return bool(self._ready)

    def put(self, word: bytes, content: object) -> None:
        """Add a message, on the node's loop; it is encoded by the publisher's thread.

        Args:
            word: one of the words above; :data:`END` or :data:`REFUSED` is the last one.
            content: must not be changed afterwards.
        """
        self._ready.append((word, content))
        self._wake()

    def take(self) -> tuple[bytes, bytes] | None:
        """The next message, encoded, on the publisher's thread; None if there is none yet."""
        if not self._ready:
            return None
        word, content = self._ready.popleft()
        return word, msgspec.msgpack.encode(content)


class Questions:
    """The questions of all followers; belongs to the publisher's thread.

    Attributes:
        counts: snapshots, and other questions (``audits``), that were answered completely
            (``..._served``), were not (``..._cut``), or were refused (``..._refused``).
        snapshot_s: duration of all snapshots that were answered completely.
        answer: begins to answer a question, or raises :class:`RefusedError`; None = there is no
            node that could.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.counts: Counter[str] = Counter()
        self.snapshot_s = 0.0
        self.answer: Callable[[OpenQuestion], None] | None = None
        self._open: set[OpenQuestion] = set()

    def begin(self, frames: Sequence[bytes], earlier: OpenQuestion | None) -> OpenQuestion:
        """Start to answer the question in some frames; ``earlier`` is the follower's open one.

        Raises:
            RefusedError: it is malformed, or cannot be answered now.
        """
        kind = frames[2] if len(frames) > 2 else b""
        try:
            asked = read_question(frames)
            snapshots = sum(one.asked.kind == SNAPSHOT for one in self._open)
            if earlier is not None:
                raise RefusedError("busy", "ask one question at a time", _AGAIN_S)
            if len(self._open) >= QUESTIONS_MAX or (
                kind == SNAPSHOT and snapshots >= SNAPSHOTS_MAX
            ):
                raise RefusedError("busy", "too many ask at a time; ask again later", _AGAIN_S)
            answer = self.answer  # another thread may set it to None
            if answer is None:
                raise RefusedError("unavailable", "it answers no questions now", _AGAIN_S)
            question = OpenQuestion(asked, self._wake)
            answer(question)
        except RefusedError:
            self.counts[_name(kind, "refused")] += 1
            raise
        self._open.add(question)
        return question

    def end(self, question: OpenQuestion, *, answered: bool) -> None:
        """The last message was sent, or the answer is not needed any more."""
        question.given_up = True
        self._open.discard(question)
        kind = question.asked.kind
        self.counts[_name(kind, "served" if answered else "cut")] += 1
        if answered and kind == SNAPSHOT:
            self.snapshot_s += time.monotonic() - question.began


def read_question(frames: Sequence[bytes]) -> Asked:
    """Read the frames of a question.

    Raises:
        RefusedError: they are malformed.
    """
    match list(frames):
        case [b"", b"ask", b"snapshot"]:
            return Asked(SNAPSHOT)
        case [b"", b"ask", b"sample", count] if len(count) == 4:
            keys = int.from_bytes(count, "big")
            if 1 <= keys <= KEYS_MAX:
                return Asked(SAMPLE, keys)
            raise RefusedError("malformed", f"a sample has 1 to {KEYS_MAX} keys, not {keys}")
        case [b"", b"ask", b"audit", space, shard, packed]:
            keys, rest = divmod(len(packed), KEY_BYTES)
            if rest or not 1 <= keys <= KEYS_MAX:
                raise RefusedError("malformed", f"an audit has 1 to {KEYS_MAX} keys of 32 bytes")
            return Asked(AUDIT, keys, _label(space), _label(shard), packed)
    raise RefusedError("malformed", "it is no question that this node knows")


def encode_question(asked: Asked) -> list[bytes]:
    """The frames of a question."""
    frames = [b"", ASK, asked.kind]
    if asked.kind == SAMPLE:
        frames.append(asked.keys.to_bytes(4, "big"))
    elif asked.kind == AUDIT:
        frames += [asked.space.encode(), asked.shard.encode(), asked.packed]
    return frames


def _label(text: bytes) -> str:
    if len(text) > _LABEL_BYTES_MAX or not text.isascii():
        raise RefusedError("malformed", "spaces and shards are named by hex digits")
    return text.decode()


def _name(kind: bytes, what: str) -> str:
    return f"{'snapshots' if kind == SNAPSHOT else 'audits'}_{what}"
