"""Seconds estimated from a model's shape and its hardware, before anything was measured.

A **roofline**: each part of a step (with the weights, and with the KV) takes as long as its
operations at the accelerators' speed or its reads from their memory, whichever is longer; besides,
there is a constant. Real engines reach a part of what datasheets say;
:class:`Efficiency` has these parts. ``python -m bench costs`` prints estimates beside published
figures.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

from conductor.costs.hardware import Accelerator
from conductor.costs.shapes import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Which part of a datasheet's figures an engine reaches, and its constants.

    Attributes:
        compute: of operations; large prompts reach 0.4 to 0.6 on several accelerators.
        memory: of reads from memory.
        link: of networks and PCI Express. Mooncake (FAST'25) reaches 87 of 100 GB/s on four cards
            of 200 Gbit/s, and 190 of 400 GB/s on eight of 400 Gbit/s.
        room: of the accelerators' memory, that an engine uses for weights and KV.
        prompt_s: seconds of each prompt beside its computation.
        step_s: seconds of each decode step beside its computation.
        fetch_s: seconds of each fetch, and of each handoff, beside its bytes.
    """

    compute: float = 0.5
    memory: float = 0.7
    link: float = 0.7
    room: float = 0.9
    prompt_s: float = 0.005
    step_s: float = 0.002
    fetch_s: float = 0.005


USUAL = Efficiency()


class Link(NamedTuple):
    """A way for bytes.

    Attributes:
        bytes_per_s: what it carries in a second; more than 0.
        latency_s: until the first byte arrives.
    """

    bytes_per_s: float
    latency_s: float = 0.0


def transfer_seconds(size_bytes: float, link: Link, bytes_in_flight: float = 0.0) -> float:
    """Seconds until some bytes have arrived that now start behind others.

    ``latency + (bytes + bytes in flight) / bandwidth``: they are counted as if they arrive first.
    A link that is shared fairly may deliver these earlier, never later.

    Args:
        size_bytes: bytes to transfer; nothing takes no time.
        link: their way.
        bytes_in_flight: bytes on the same link that have not arrived.
    """
    if size_bytes <= 0:
        return 0.0
    return link.latency_s + (size_bytes + max(0.0, bytes_in_flight)) / link.bytes_per_s


class PrefillLine(NamedTuple):
    """``constant + max(floor, token n) + pair n (p + (n + 1) / 2)`` seconds: n tokens after p."""

    constant_s: float
    floor_s: float
    token_s: float
    pair_s: float

    def terms(self, new_tokens: float, prefix_tokens: float) -> tuple[float, float, float]:
        """Seconds beside the computation, of the weights, and of attention."""
        if new_tokens <= 0:
            return self.constant_s, 0.0, 0.0
        pairs = new_tokens * (prefix_tokens + (new_tokens + 1.0) / 2.0)
        return self.constant_s, max(self.floor_s, self.token_s * new_tokens), self.pair_s * pairs


class FetchLine(NamedTuple):
    """Seconds to bring KV to an engine: once, and for each byte by where that is.

    Attributes:
        constant_s: of each fetch, beside its bytes.
        memory_s: of a byte in the memory of its node.
        disk_s: of a byte on the disk of its node.
        network_s: of a byte at another node.
    """

    constant_s: float
    memory_s: float
    disk_s: float
    network_s: float

    def terms(
        self, memory_bytes: float, disk_bytes: float, network_bytes: float
    ) -> tuple[float, float, float, float]:
        """Seconds beside the bytes, of the node's memory, of its disk, and of another node."""
        return (
            self.constant_s, self.memory_s * memory_bytes, self.disk_s * disk_bytes,
            self.network_s * network_bytes,
        )  # fmt: skip


_DISK_BYTES_PER_S: Final = 6e9
"""One NVMe SSD with four lanes of PCI Express 4 reads so much; a node's disks are unknown."""


class CostPrior:
    """Seconds of one engine, by its model and its accelerators.

    Args:
        shape: of its model.
        accelerator: of which it has ``count``.
        count: accelerators that work together; 0 = as many as a usual machine has.
        efficiency: which part of their speed it reaches.

    Attributes:
        shape: of its model.
        network: its links to other machines together.
        host: its links to the memory of its machine together.
        prefill: what prompts take.
        fetch: what bringing KV to it takes.
        handoff_s: of a handoff to it, beside its bytes; with the step of the first token.
    """

    def __init__(
        self,
        shape: ModelShape,
        accelerator: Accelerator,
        count: int = 0,
        efficiency: Efficiency = USUAL,
    ) -> None:
        assert count >= 0
        count = count or accelerator.in_machine
        self.shape = shape
        self.network = Link(count * accelerator.network_bytes_per_s * efficiency.link)
        self.host = Link(count * accelerator.host_bytes_per_s * efficiency.link)
        flops = count * accelerator.flops * efficiency.compute
        self._read_per_s = count * accelerator.memory_bytes_per_s * efficiency.memory
        self._room_bytes = count * accelerator.memory_bytes * efficiency.room
        self._step_s = efficiency.step_s
        self._kv_bytes = shape.kv_bytes_per_token
        self._token_s = shape.flops_per_token / flops
        self._context_s = max(self._kv_bytes / self._read_per_s, shape.flops_per_read / flops)
        all_weights_s = shape.parameters * shape.weight_bytes / self._read_per_s
        self.prefill = PrefillLine(
            efficiency.prompt_s, all_weights_s, self._token_s, shape.flops_per_pair / flops
        )
        self.handoff_s = efficiency.fetch_s + self.decode_step_seconds(1.0, 0.0)
        self.fetch = FetchLine(
            efficiency.fetch_s, 1.0 / self.host.bytes_per_s, 1.0 / _DISK_BYTES_PER_S,
            1.0 / self.network.bytes_per_s,
        )  # fmt: skip

    def prefill_seconds(self, new_tokens: float, prefix_tokens: float = 0.0) -> float:
        """Seconds to compute the KV of the end of a prompt whose beginning is there.

        ``constant + max(n w / F, W / M) + a n (p + (n + 1) / 2) / F`` with n new tokens after a
        prefix of p: each token passes all weights (w operations) and attends to those before it and
        to itself (a operations each); the weights W are read once. F is operations and M bytes a
        second.
        """
        return sum(self.prefill.terms(new_tokens, prefix_tokens))

    def decode_step_seconds(self, batch: float, context_tokens: float) -> float:
        """Seconds until each of ``batch`` requests has its next token (TBT).

        ``constant + max(b w / F, W / M) + c max(a / F, k / M)`` with b requests whose contexts have
        c tokens in all: weights are read and multiplied at the same time, and so is the KV (k bytes
        and a operations a token), each once in a step.

        Args:
            batch: requests that decode together.
            context_tokens: tokens of all their prompts and outputs together.
        """
        return sum(self.step_terms(batch, context_tokens)) if batch > 0 else 0.0

    def step_terms(self, batch: float, context_tokens: float) -> tuple[float, float, float]:
        """Seconds of a step beside the computation, of the weights, and of the KV."""
        weights_s = max(self._token_s * batch, self.read_seconds(batch))
        return self._step_s, weights_s, self._context_s * context_tokens

    @property
    def step_line(self) -> tuple[float, float, float]:
        """Of :meth:`step_terms`: the first, seconds of each request, and of each token of context.

        The second term is not less than :meth:`read_seconds`.
        """
        return self._step_s, self._token_s, self._context_s

    def read_seconds(self, batch: float) -> float:
        """Seconds to read the weights that a step of so many requests needs."""
        return self.shape.weights_read(batch) * self.shape.weight_bytes / self._read_per_s

    def kv_bytes(self, tokens: float) -> float:
        """Bytes of the KV of some tokens."""
        return self._kv_bytes * tokens

    @property
    def kv_tokens_max(self) -> int:
        """Tokens whose KV fits beside the weights; 0 if these do not fit."""
        left = self._room_bytes - self.shape.parameters * self.shape.weight_bytes
        return max(0, int(left / self._kv_bytes))
