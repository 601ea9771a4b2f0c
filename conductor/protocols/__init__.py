"""How the two engines of a pair are asked, so that one hands the KV of a prompt to the other.

Another protocol is one more file here, and its line in :data:`PROTOCOLS`.
"""

from typing import Final

from conductor.protocols.base import PairProtocol
from conductor.protocols.reference import REFERENCE
from conductor.protocols.vllm import VLLM

PROTOCOLS: Final[dict[str, PairProtocol]] = {"reference": REFERENCE, "vllm": VLLM}
"""Protocols by name, as an engine's ``protocol`` says."""
