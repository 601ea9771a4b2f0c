"""Samples the next token, so that another engine can continue exactly where this one stopped.

The random number for a position depends only on (seed, position): there is no state to transfer,
and a request that is preempted, moved or restarted gets the same numbers again.
"""

import struct
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from engine_adapters.reference.tokenizer import VOCAB_SIZE

SEED_MAX = 2**63 - 1
LOGPROBS_MAX = 5
"""Alternatives to each token whose log-probabilities a request may ask for, as at OpenAI."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters.

    Attributes:
        temperature: at least 0; 0 is greedy.
        top_p: 0 < top_p <= 1: sample from the smallest set of tokens with this probability.
        seed: 0..SEED_MAX.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


def uniform(seed: int, position: int) -> float:
    """The random number of a position: 0 <= u < 1, 53 bits."""
    word = xxhash.xxh3_64_intdigest(struct.pack("<qq", seed, position))
    return float(word >> 11) * 2.0**-53


def sample(logits: torch.Tensor, sampling: Sampling, position: int) -> int:
    """Choose the token at ``position``.

    Args:
        logits: shape (vocab,), float32; -inf excludes a token.
        sampling: parameters of this request.
        position: absolute position of the token to choose.
    """
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    scaled = logits.double().numpy() / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    order = np.argsort(-weights, kind="stable")
    cumulative = np.cumsum(weights[order])
    # The nucleus ends with the token that reaches top_p; the sample is within its weight.
    size = int(np.searchsorted(cumulative, sampling.top_p * cumulative[-1])) + 1
    size = min(size, len(order))
    drawn = uniform(sampling.seed, position) * cumulative[size - 1]
    return int(order[min(int(np.searchsorted(cumulative, drawn, side="right")), size - 1)])


def logprobs_of(logits: torch.Tensor, token: int, count: int) -> dict[int, float]:
    """Log-probabilities under the model, whatever temperature and nucleus are.

    Args:
        logits: shape (vocab,), float32; -inf excludes a token.
        token: that was chosen.
        count: how many of the most probable tokens, at most :data:`LOGPROBS_MAX`.

    Returns:
        token → natural logarithm of its probability: of the chosen one first, then of the most
        probable ones, equal ones by number; excluded ones are left out.
    """
    numbers = torch.log_softmax(logits.double(), dim=-1).numpy()
    best = np.argsort(-numbers, kind="stable")[:count].tolist()
    wanted = [token, *(one for one in best if one != token and np.isfinite(numbers[one]))]
    return {one: float(numbers[one]) for one in wanted}


def are_logprobs(logprobs: dict[int, float], token: int) -> bool:
    """Whether these can be log-probabilities of a token and its alternatives, or are none."""
    right = all(0 <= one < VOCAB_SIZE and number <= 0.0 for one, number in logprobs.items())
    return right and (not logprobs or (token in logprobs and len(logprobs) <= LOGPROBS_MAX + 1))
