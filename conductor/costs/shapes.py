"""Shapes of models: what their speed depends on. From the ``config.json`` of each model."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the speed of a model depends on.

    Attributes:
        parameters: all weights, embeddings and experts included.
        layers: transformer layers.
        heads: heads of queries in a layer.
        kv_heads: heads of keys and values in a layer.
        head_dim: elements of one head; mean of a key's and a value's if they differ.
        weight_bytes: bytes of one weight.
        value_bytes: bytes of one element of the KV.
        latent: elements of a token's KV in a layer if it is compressed (MLA); 0 = keys and values
            of each head.
        experts: routed experts in a layer; 0 = the model is dense.
        experts_per_token: number of routed experts in a layer that a token passes.
        expert_parameters: weights of all routed experts of all layers.
    """

    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    weight_bytes: float = 2.0
    value_bytes: float = 2.0
    latent: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_parameters: float = 0.0

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's KV in all layers."""
        elements = self.latent or 2 * self.kv_heads * self.head_dim
        return int(self.layers * elements * self.value_bytes)

    @property
    def flops_per_token(self) -> float:
        """Operations of one token with the weights: a multiplication and an addition for each."""
        return 2.0 * self.weights_read(1.0)

    @property
    def flops_per_pair(self) -> float:
        """Operations of one token's attention to one other: a score, and a weighted sum."""
        return 4.0 * self.layers * self.heads * self.head_dim

    @property
    def flops_per_read(self) -> float:
        """The same in a decode step, where compressed KV is used as it is (MLA)."""
        if not self.latent:
            return self.flops_per_pair
        return 4.0 * self.layers * self.heads * self.latent

    def weights_read(self, tokens: float) -> float:
        """Weights that a step with so many tokens needs; each token chooses experts by itself.

        An expert is needed if one of the tokens chooses it, so ``1 - (1 - k/n)^tokens`` of them.
        """
        if not self.experts:
            return self.parameters
        idle: float = (1.0 - self.experts_per_token / self.experts) ** tokens
        return self.parameters - idle * self.expert_parameters


SHAPES: Final = {
    "llama3-8b": ModelShape(parameters=8.03e9, layers=32, heads=32, kv_heads=8, head_dim=128),
    "llama3-70b": ModelShape(parameters=70.6e9, layers=80, heads=64, kv_heads=8, head_dim=128),
    "qwen2.5-72b": ModelShape(parameters=72.7e9, layers=80, heads=64, kv_heads=8, head_dim=128),
    # Routed experts: 58 layers of 256, each 3 matrices of 7168 x 2048; weights in FP8. A head's
    # key has 128 + 64 elements, its value 128; the latent has 512 + 64.
    "deepseek-v3": ModelShape(
        parameters=671e9, layers=61, heads=128, kv_heads=128, head_dim=160, weight_bytes=1.0,
        latent=576, experts=256, experts_per_token=8, expert_parameters=58 * 256 * 3 * 7168 * 2048,
    ),
    # As DeepSeek-V3, with 60 layers of 384 experts and half the heads.
    "kimi-k2": ModelShape(
        parameters=1.026e12, layers=61, heads=64, kv_heads=64, head_dim=160, weight_bytes=1.0,
        latent=576, experts=384, experts_per_token=8, expert_parameters=60 * 384 * 3 * 7168 * 2048,
    ),
    # The models of engine_adapters/reference, in float32.
    "reference-tiny": ModelShape(
        parameters=0.11e6, layers=2, heads=4, kv_heads=2, head_dim=16, weight_bytes=4, value_bytes=4
    ),
    "reference-demo": ModelShape(
        parameters=25.4e6, layers=8, heads=8, kv_heads=4, head_dim=64, weight_bytes=4, value_bytes=4
    ),
}  # fmt: skip
"""By name."""
