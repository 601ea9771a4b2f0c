"""How the two engines of a pair are asked, so that one hands the KV of a prompt to the other.

Another protocol is one more file here, and its line in :data:`PROTOCOLS`.
"""

from typing import Final

from conductor.protocols.base import PairProtocol
from conductor.protocols.dynamo import DYNAMO
from conductor.protocols.push import PUSH
from conductor.protocols.reference import REFERENCE
from conductor.protocols.vllm import VLLM

__all__ = ["PROTOCOLS", "base", "hints", "own_protocols"]

PROTOCOLS: Final[dict[str, PairProtocol]] = {
    "reference": REFERENCE, "vllm": VLLM, "dynamo": DYNAMO, "push": PUSH,
}  # fmt: skip
"""Protocols by name. An engine's ``protocol`` names one that is not over another one."""


def own_protocols() -> list[str]:
    """Names that an engine's ``protocol`` may have."""
    return [name for name, protocol in PROTOCOLS.items() if protocol.over is None]
