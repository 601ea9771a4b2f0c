"""How far are the Conductor's initial estimates from published figures?

``break-even``: the bandwidth from which on fetching the KV of 8,192 tokens beats computing it, as
Mooncake (FAST'25) derives it from datasheets alone. ``ttft`` and ``prefill`` were measured, with
weights in FP8, by their authors. The last two have no figure beside them.
"""

import argparse
from typing import Final

from bench.measure import Report, Result
from conductor.costs.hardware import ACCELERATORS
from conductor.costs.prior import CostPrior, Efficiency, transfer_seconds
from conductor.costs.shapes import SHAPES

_IDEAL: Final = Efficiency(compute=1, memory=1, link=1, prompt_s=0, step_s=0)
_TOKENS: Final = 8192
_PAPER: Final = "Mooncake, FAST'25"
_NVL32: Final = "NVIDIA's blog on GH200 NVL32"
_LMSYS: Final = "LMSYS' blog of 2025-05-05"


def add_arguments(_: argparse.ArgumentParser) -> None:
    """There are none."""


def run(options: argparse.Namespace) -> int:
    """Print estimates beside published figures."""
    with Report(json=options.json) as report:
        for result in results():
            report.add(result)
    return 0


def results() -> list[Result]:
    """Estimates beside what was published, if anything; ``ratio`` is estimate / published."""
    found: list[Result] = []
    for name, gigabytes in (("a800", 6.0), ("h800", 19.0)):
        prior = CostPrior(SHAPES["llama3-70b"], ACCELERATORS[name], 8, _IDEAL)
        value = prior.kv_bytes(_TOKENS) / prior.prefill_seconds(_TOKENS) / 1e9
        found.append(_result(f"break-even/llama3-70b/8x{name}", value, "GB/s", _PAPER, gigabytes))
    nvl32 = CostPrior(SHAPES["llama3-70b"], ACCELERATORS["h200"], 32)
    ttft_ms = 1e3 * nvl32.prefill_seconds(32_768)
    found.append(_result("ttft/llama3-70b/32xgh200/32k", ttft_ms, "ms", _NVL32, 472))
    four_nodes = CostPrior(
        SHAPES["deepseek-v3"],
        ACCELERATORS["h100"],
        32,
        Efficiency(prompt_s=0),
    )
    tokens_per_s = 2000 / four_nodes.prefill_seconds(2000) / 4
    found.append(_result("prefill/deepseek-v3/8xh100/2k", tokens_per_s, "tokens/s", _LMSYS, 52_300))
    a800 = CostPrior(SHAPES["llama3-70b"], ACCELERATORS["a800"])
    network = transfer_seconds(40e9, a800.network)
    found.append(_result("transfer/40GB/8xa800", 40 / network, "GB/s", _PAPER, 87))
    h800 = CostPrior(SHAPES["llama3-70b"], ACCELERATORS["h800"])
    step_ms = 1e3 * h800.decode_step_seconds(32, 32 * _TOKENS)
    found.append(Result("step/llama3-70b/8xh800/32x8k", round(step_ms, 1), "ms"))
    found.append(Result("room/llama3-70b/8xh800", h800.kv_tokens_max, "tokens"))
    return found


def _result(case: str, value: float, unit: str, source: str, published: float) -> Result:
    return Result(case, round(value, 1), unit, source, published, round(value / published, 3))
