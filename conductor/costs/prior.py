"""Seconds estimated from a model's shape and its hardware, before anything was measured.

A **roofline**: a step takes as long as its operations at the accelerators' speed or its reads from
their memory, whichever is longer, and a constant. Real engines reach a part of what datasheets say;
:class:`Efficiency` has these parts. ``python -m bench costs`` prints estimates beside published
figures.
"""

from dataclasses import dataclass
from typing import NamedTuple

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
    """

    compute: float = 0.5
    memory: float = 0.7
    link: float = 0.7
    room: float = 0.9
    prompt_s: float = 0.005
    step_s: float = 0.002


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


class CostPrior:
    """Seconds of one engine, by its model and its accelerators.

    Attributes:
        shape: of its model.
        network: its links to other machines together.
        host: its links to the memory of its machine together.
    """

    def __init__(
        self,
        shape: ModelShape,
        accelerator: Accelerator,
        count: int = 0,
        efficiency: Efficiency = USUAL,
    ) -> None:
        """Compute the constants.

        Args:
            shape: of its model.
            accelerator: of which it has ``count``.
            count: accelerators that work together; 0 = as many as a usual machine has.
            efficiency: which part of their speed it reaches.
        """
        assert count >= 0
        count = count or accelerator.in_machine
        self.shape = shape
        self.network = Link(count * accelerator.network_bytes_per_s * efficiency.link)
        self.host = Link(count * accelerator.host_bytes_per_s * efficiency.link)
        self._flops = count * accelerator.flops * efficiency.compute
        self._read_per_s = count * accelerator.memory_bytes_per_s * efficiency.memory
        self._room_bytes = count * accelerator.memory_bytes * efficiency.room
        self._prompt_s = efficiency.prompt_s
        self._step_s = efficiency.step_s
        self._kv_bytes = shape.kv_bytes_per_token
        self._token_s = shape.flops_per_token / self._flops
        self._pair_s = shape.flops_per_pair / self._flops
        self._kv_read_s = self._kv_bytes / self._read_per_s
        self._attention_s = shape.flops_per_read / self._flops

    def prefill_seconds(self, new_tokens: float, prefix_tokens: float = 0.0) -> float:
        """Seconds to compute the KV of the end of a prompt whose beginning is there.

        ``max((n w + a n (p + (n + 1) / 2)) / F, W / M) + constant`` with n new tokens after a
        prefix of p: each token passes all weights (w operations) and attends to those before it and
        to itself (a operations each); the weights W are read once. F is operations and M bytes a
        second.
        """
        if new_tokens <= 0:
            return self._prompt_s
        pairs = new_tokens * (prefix_tokens + (new_tokens + 1.0) / 2.0)
        compute_s = self._token_s * new_tokens + self._pair_s * pairs
        return self._prompt_s + max(compute_s, self._weights_s(new_tokens))

    def decode_step_seconds(self, batch: float, context_tokens: float) -> float:
        """Seconds until each of ``batch`` requests has its next token (TBT).

        ``max((b w + a c) / F, (W + k c) / M) + constant`` with b requests whose contexts have c
        tokens in all: the weights and the KV (k bytes a token) are read once in each step.

        Args:
            batch: requests that decode together.
            context_tokens: tokens of all their prompts and outputs together.
        """
        if batch <= 0:
            return 0.0
        compute_s = self._token_s * batch + self._attention_s * context_tokens
        read_s = self._weights_s(batch) + self._kv_read_s * context_tokens
        return self._step_s + max(compute_s, read_s)

    def kv_bytes(self, tokens: float) -> float:
        """Bytes of the KV of some tokens."""
        return self._kv_bytes * tokens

    @property
    def kv_tokens_max(self) -> int:
        """Tokens whose KV fits beside the weights; 0 if these do not fit."""
        left = self._room_bytes - self.shape.parameters * self.shape.weight_bytes
        return max(0, int(left / self._kv_bytes))

    def _weights_s(self, tokens: float) -> float:
        """Seconds to read the weights that a step with so many tokens needs."""
        return self.shape.weights_read(tokens) * self.shape.weight_bytes / self._read_per_s
