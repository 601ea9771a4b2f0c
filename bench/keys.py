"""How long does it take to compute the prefix keys of a long prompt?

``keys/128k-64/list`` makes the keys of 131,072 tokens at 64 tokens a page from a list of ints,
``…/array`` from a numpy array; ``keys/grown`` from an array whose first 130,048 tokens have keys
already, so that 16 pages are new. The bound hashes the same new bytes in one piece.
"""

import argparse
import hashlib
from collections.abc import Callable
from typing import Final

import numpy as np

from bench import measure
from bench.measure import Progress, Report, Result, timed
from kvstore.protocol.page import page_keys

TOKENS: Final = 128 << 10
PAGE_TOKENS: Final = 64
NEW_PAGES: Final = 16
BOUND: Final = "sha256, same new bytes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this group."""
    parser.add_argument("--seconds", type=float, default=1.0, help="minimum duration of each case")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens in the prompt")


def run(options: argparse.Namespace) -> int:
    """Measure all three cases."""
    count = max(options.tokens // PAGE_TOKENS, NEW_PAGES + 1) * PAGE_TOKENS
    tokens = np.random.default_rng().integers(0, 2**17, count, dtype=np.uint32)
    listed = tokens.tolist()
    new = NEW_PAGES * PAGE_TOKENS
    known = page_keys(tokens[:-new], PAGE_TOKENS)
    size = f"{count >> 10}k-{PAGE_TOKENS}"
    cases: dict[str, tuple[Callable[[], object], bytes]] = {
        f"keys/{size}/list": (lambda: page_keys(listed, PAGE_TOKENS), tokens.tobytes()),
        f"keys/{size}/array": (lambda: page_keys(tokens, PAGE_TOKENS), tokens.tobytes()),
        "keys/grown": (
            lambda: page_keys(tokens, PAGE_TOKENS, known=known), tokens[-new:].tobytes(),
        ),
    }  # fmt: skip
    with Report(json=options.json) as report, Progress("keys", len(cases)) as progress:
        for name, (make, hashed) in cases.items():
            progress.step(name)
            report.add(_measured(name, make, hashed, options.seconds))
    return 0


def _measured(name: str, make: Callable[[], object], hashed: bytes, seconds: float) -> Result:
    bound = timed(lambda: hashlib.sha256(hashed).digest())
    measured = measure.interleave(timed(make), bound, min_seconds=seconds)
    value, bound_value = measured.case.median * 1e3, measured.bound.median * 1e3
    return Result(name, value, "ms", BOUND, bound_value, bound_value / value)
