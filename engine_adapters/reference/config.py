"""The models: seeded random weights in two sizes."""

import hashlib
from dataclasses import dataclass
from typing import Final

_NUMERICS: Final = "1"  # change it whenever the same tokens give other K or V


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and seed of a model; equal configs have bit-equal weights.

    Attributes:
        head_dim: elements of one head, even.
        seed: seed of the random weights.
        max_model_len: maximum prompt and output tokens of one request together.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    max_model_len: int
    seed: int = 0

    @property
    def revision(self) -> str:
        """Identifies the weights and the arithmetic: differs whenever K or V differ."""
        return hashlib.sha256(f"{self!r} numerics {_NUMERICS}".encode()).hexdigest()[:16]


MODELS: Final = {
    config.name: config
    for config in (
        ModelConfig(
            name="tiny",
            hidden=64,
            layers=2,
            heads=4,
            kv_heads=2,
            head_dim=16,
            intermediate=128,
            max_model_len=32_768,
        ),
        ModelConfig(
            name="demo",
            hidden=512,
            layers=8,
            heads=8,
            kv_heads=4,
            head_dim=64,
            intermediate=1536,
            max_model_len=16_384,
        ),
    )
}
