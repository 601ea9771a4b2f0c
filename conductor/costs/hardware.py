"""Accelerators: figures from their datasheets."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One accelerator at its best, one way for links.

    Attributes:
        flops: dense operations a second in bfloat16, without sparsity.
        memory_bytes_per_s: from its memory.
        memory_bytes: size of its memory.
        network_bytes_per_s: its share of the machine's network.
        host_bytes_per_s: from the machine's memory.
        in_machine: how many a usual machine has; an engine uses all unless told otherwise.
    """

    flops: float
    memory_bytes_per_s: float
    memory_bytes: float
    network_bytes_per_s: float
    host_bytes_per_s: float
    in_machine: int = 8


_GEN4: Final = 31.5e9
_GEN5: Final = 63.0e9
"""PCI Express with 16 lanes, one way."""


ACCELERATORS: Final = {
    # NVIDIA H100 SXM5 datasheet; DGX H100: eight network cards of 400 Gbit/s.
    "h100": Accelerator(
        flops=989e12, memory_bytes_per_s=3.35e12, memory_bytes=80e9,
        network_bytes_per_s=50e9, host_bytes_per_s=_GEN5,
    ),
    # As H100, with a slower NVLink only. The machines of Mooncake (FAST'25, section 5) have 8 x 400
    # Gbit/s.
    "h800": Accelerator(
        flops=989e12, memory_bytes_per_s=3.35e12, memory_bytes=80e9,
        network_bytes_per_s=50e9, host_bytes_per_s=_GEN5,
    ),
    # NVIDIA H200 SXM datasheet.
    "h200": Accelerator(
        flops=989e12, memory_bytes_per_s=4.8e12, memory_bytes=141e9,
        network_bytes_per_s=50e9, host_bytes_per_s=_GEN5,
    ),
    # NVIDIA H20: reduced compute; figures of vendors, there is no public datasheet.
    "h20": Accelerator(
        flops=148e12, memory_bytes_per_s=4.0e12, memory_bytes=96e9,
        network_bytes_per_s=50e9, host_bytes_per_s=_GEN5,
    ),
    # NVIDIA A100 80GB SXM datasheet; DGX A100: eight network cards of 200 Gbit/s.
    "a100-80g": Accelerator(
        flops=312e12, memory_bytes_per_s=2.039e12, memory_bytes=80e9,
        network_bytes_per_s=25e9, host_bytes_per_s=_GEN4,
    ),
    # As A100, with a slower NVLink only. The machines of Mooncake have 4 x 200 Gbit/s for eight.
    "a800": Accelerator(
        flops=312e12, memory_bytes_per_s=2.039e12, memory_bytes=80e9,
        network_bytes_per_s=12.5e9, host_bytes_per_s=_GEN4,
    ),
    # NVIDIA L40S datasheet; the network is a usual one: 200 Gbit/s for four.
    "l40s": Accelerator(
        flops=362e12, memory_bytes_per_s=0.864e12, memory_bytes=48e9,
        network_bytes_per_s=6.25e9, host_bytes_per_s=_GEN4, in_machine=4,
    ),
    # NVIDIA DGX B200 datasheet, an eighth of it: 72 PFLOPS FP8, 64 TB/s, 1,440 GB, 8 x 400 Gbit/s.
    "b200": Accelerator(
        flops=2250e12, memory_bytes_per_s=8.0e12, memory_bytes=180e9,
        network_bytes_per_s=50e9, host_bytes_per_s=_GEN5,
    ),
    # Two cores of a cloud machine: numpy multiplies matrices of 2048 x 2048 in float32 at 46 GFLOPS
    # there, and copies 256 MiB at 20 GB/s, reads and writes together; 10 Gbit/s.
    "cpu": Accelerator(
        flops=46e9, memory_bytes_per_s=20e9, memory_bytes=16e9,
        network_bytes_per_s=1.25e9, host_bytes_per_s=10e9, in_machine=1,
    ),
}  # fmt: skip
"""By name."""
