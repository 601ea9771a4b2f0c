"""The possible decisions about a request: values, with the numbers behind them."""

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isnan
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from conductor.routing.engines import Health, Role
from conductor.routing.moving import NO_FETCH, FetchedTokens


class Plan(enum.StrEnum):
    """How a request is served."""

    ALONE = "alone"
    PAIR = "pair"


class Candidate(msgspec.Struct, frozen=True, omit_defaults=True):
    """One engine's numbers at the time of a decision.

    Attributes:
        engine: its id.
        role: its role.
        health: its health.
        in_flight: requests assigned to it that have not ended, including those whose KV has not
            arrived yet.
        max_running: places.
        load: ``(in_flight + others) / max_running``.
        local_tokens: prompt tokens in its own cache.
        node_tokens: prompt tokens on nodes it reads from.
        usable_tokens: prompt tokens it need not compute.
        peer_tokens: prompt tokens beyond these that its node could fetch from one other node of the
            cluster.
        memory_tokens: of the usable ones, those that it must get from the memory of its node.
        disk_tokens: of the usable ones, those that it must get from the disk of its node.
        verdict: the role it was chosen for, ``passed over``, or why it could not be chosen.
        others: requests of others that it has; 0 also if it does not tell.
        queue_s: seconds until its assigned prompts are computed; this and the following exist only
            if the policy uses costs, and the engine could be chosen to compute the prompt. Engines
            that could decode after the chosen one have ``handoff_s`` and ``tbt_s``.
        fetch_s: seconds to fetch the part of the prompt that nodes have, after the queue.
        prefill_s: seconds to compute the rest of the prompt.
        handoff_s: seconds from it to the best decode engine; of the chosen engine, to the chosen
            one; of an engine that only decodes, from the chosen engine to it.
        tbt_s: seconds between two tokens there.
        late_s: requests that decode at this engine and would be late because it computes the rest
            of the prompt, times the seconds of a usual first token.
    """

    engine: str
    role: Role
    health: Health
    in_flight: int
    max_running: int
    load: float
    local_tokens: int
    node_tokens: int
    usable_tokens: int
    peer_tokens: int
    memory_tokens: int
    disk_tokens: int
    verdict: str
    others: int = 0
    queue_s: float | None = None
    fetch_s: float | None = None
    prefill_s: float | None = None
    handoff_s: float | None = None
    tbt_s: float | None = None
    late_s: float | None = None


VERDICTS: Final = (
    "passed over", "full", "failed this request before", "suspect", "dead",
    "chosen to prefill", "chosen to decode", "chosen to serve alone",
)  # fmt: skip
"""What can become of a candidate."""


class CandidateColumns(NamedTuple):
    """See :class:`Candidates`."""

    engines: tuple[str, ...]
    roles: tuple[Role, ...]
    health: tuple[Health, ...]
    numbers: npt.NDArray[np.int32]
    verdicts: npt.NDArray[np.uint8]
    seconds: npt.NDArray[np.float32] | None

    def terms(self, at: int) -> list[float | None]:
        """The seconds of one engine."""
        if self.seconds is None:
            return []
        seconds = self.seconds[:, at].tolist()
        return [None if isnan(one) else round(one, 6) for one in seconds]


class Candidates:
    """The engines that serve a model at the time of a decision, in columns: one row for each.

    The decision log keeps them of thousands of requests. Iterating gives each as a
    :class:`Candidate`.

    Args:
        engines: ids.
        roles: roles.
        health: health.
        numbers: int32 [9, engines]: requests, places, local, node, usable, peer, memory and
            disk tokens, and requests of others.
        verdicts: uint8 [engines], positions in :data:`VERDICTS`.
        seconds: float32 [6, engines]: queue, fetch, prefill, handoff, between tokens and of
            late requests; not a number = it could not be chosen. None if the policy uses none.
    """

    __slots__ = ("_columns", "_later")

    def __init__(
        self,
        engines: tuple[str, ...],
        roles: tuple[Role, ...],
        health: tuple[Health, ...],
        numbers: npt.NDArray[np.int32],
        verdicts: npt.NDArray[np.uint8],
        seconds: npt.NDArray[np.float32] | None = None,
    ) -> None:
        assert numbers.shape == (9, len(engines))
        self._columns: CandidateColumns | None = CandidateColumns(
            engines, roles, health, numbers, verdicts, seconds
        )
        self._later: Callable[[], Candidates] | None = None

    @classmethod
    def later(cls, make: "Callable[[], Candidates]") -> "Candidates":
        """Columns that are computed on the first access, so that a decision need not wait for them.

        Args:
            make: computes them from data that does not change any more; called at most once.
        """
        candidates = cls.__new__(cls)
        candidates._columns, candidates._later = None, make  # noqa: SLF001 # its own
        return candidates

    @property
    def columns(self) -> "CandidateColumns":
        """The columns."""
        if self._columns is None:
            assert self._later is not None
            self._columns, self._later = self._later().columns, None
        return self._columns

    def __iter__(self) -> Iterator[Candidate]:
        """Each engine's numbers."""
        columns = self.columns
        named = zip(columns.engines, columns.roles, columns.health, strict=True)
        rows = zip(columns.numbers.T.tolist(), columns.verdicts.tolist(), strict=True)
        for at, ((engine, role, health), (numbers, verdict)) in enumerate(
            zip(named, rows, strict=True)
        ):
            count, places, local, node, usable, peer, memory, disk, others = numbers
            load = round((count + others) / places, 3)
            yield Candidate(
                engine, role, health, count, places, load, local, node, usable, peer, memory, disk,
                VERDICTS[verdict], others, *columns.terms(at),
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Assign:
    """Send a request to these engines; ``prefill == decode`` if one serves it alone.

    Attributes:
        request: number of the request.
        prefill: id of the engine that computes the prompt; it has a place there.
        decode: id of the engine that generates the tokens.
        plan: alone, or a pair.
        protocol: name of the protocol by which the pair is asked.
        at_once: whether the request has a place at ``decode`` already; else it gets one when its KV
            arrives, and :class:`Continue` says where.
        reason: reason of the policy.
        usable_tokens: prompt tokens that ``prefill`` need not compute.
        candidates: all engines that serve the model.
        ranks: the data-parallel rank of each that has the longest prefix; None = all have the same.
        fetch: prompt tokens that will probably be fetched: of the usable ones, those that the node
            of ``prefill`` has, and beyond these those that another node has; nothing if the policy
            does not use costs. Engines are not informed: they and their nodes decide themselves.
        peer_tokens: prompt tokens that one other node has beyond the tokens of ``prefill`` and its
            node; 0 also if the policy does not use prefixes, or found it faster to compute them.
            Engines whose protocol takes hints are told where.
        fetch_s: predicted seconds for this fetch; 0 if the policy does not use costs.
        prefill_s: predicted seconds to compute the prompt, likewise.
        ttft_s: predicted seconds until the first token, likewise.
    """

    request: int
    prefill: str
    decode: str
    plan: Plan
    protocol: str
    at_once: bool
    reason: str
    usable_tokens: int
    candidates: Candidates
    ranks: Mapping[str, int | None]
    fetch: FetchedTokens = NO_FETCH
    fetch_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    peer_tokens: int = 0

    @property
    def prefix_tokens(self) -> int:
        """Prompt tokens that ``prefill`` need not compute, with those from another node."""
        return self.usable_tokens + int(self.fetch.network)


@dataclass(frozen=True, slots=True)
class Continue:
    """The KV of a request has arrived, and it has a place at this decode engine.

    It is the assigned one, unless that has no room or is gone.
    """

    request: int
    decode: str
    rank: int | None


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep a request waiting.

    Attributes:
        request: its number.
        engine: the engine for which it waits from now on; empty = none has been chosen.
    """

    request: int
    engine: str = ""


class Judgement(msgspec.Struct, frozen=True):
    """The prediction for a request when it arrived.

    Attributes:
        service_class: its class.
        admission: how it was judged: ``none``, ``load`` or ``prediction``.
        output_tokens: expected tokens of its answer.
        ttft_s: seconds until its first token; None = not judged, or not by prediction.
        prefill_load: seconds of the waiting prompts, relative to its TTFT; None = not judged.
        decode_load: load of the decoding engines, 1 = full: now, or by prediction when its prompt
            is computed; None = not judged.
        refused: the reason: ``prefill``, ``decode``, or ``late``: it waited too long; empty = it is
            not.
        probe: whether it is let through although it would be refused, so that something is
            measured.
    """

    service_class: str
    admission: str
    output_tokens: float
    ttft_s: float | None = None
    prefill_load: float | None = None
    decode_load: float | None = None
    refused: str = ""
    probe: bool = False


@dataclass(frozen=True, slots=True)
class Reject:
    """Refuse a request.

    Attributes:
        request: its number.
        reason: for the client.
        retry_after_s: when the client may try again; 0 = it need not.
        code: the error's code.
        status: HTTP status.
        judgement: what was foreseen, if it is refused for that.
    """

    request: int
    reason: str
    retry_after_s: int
    code: str = "no_engine"
    status: int = 503
    judgement: Judgement | None = None


Choice = Assign | Hold | Reject
Effect = Assign | Continue | Reject
