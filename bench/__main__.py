"""``python -m bench GROUP [--json] [...]``: measure one thing, as ``bench/measure.py`` says how.

A group is a module with a docstring (its question), ``add_arguments(parser)`` and
``run(options) -> int``. It is imported only when it is asked for: some need torch.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Final, Protocol, cast

from bench import measure

GROUPS: Final = {
    "admission": "bench.admission",
    "conductor": "bench.conductor",
    "costs": "bench.costs",
    "demo": "bench.demo",
    "demo-cluster": "bench.demo_cluster",
    "demo-vllm": "bench.demo_vllm",
    "device": "bench.device",
    "figures": "bench.figures",
    "flood": "bench.flood",
    "handoff": "bench.handoff",
    "host": "bench.host",
    "index": "bench.index",
    "keys": "bench.keys",
    "kvpool": "bench.kvpool",
    "live": "bench.live",
    "loads": "bench.loads",
    "node": "bench.node",
    "policy": "bench.policy",
    "reclaim": "bench.reclaim",
    "remote": "bench.remote",
    "replay": "bench.replay",
    "simulate": "bench.simulate",
    "scheduling": "bench.scheduling",
    "slab": "bench.slab",
    "snapshot": "bench.snapshot",
    "ssd": "bench.ssd",
    "stores": "bench.stores",
    "structure": "bench.structure",
    "vllm": "bench.vllm",
}

_HELP: Final = "Run one group of benchmarks. `python -m bench GROUP --help` describes it."


class Group(Protocol):
    """What a module of :data:`GROUPS` offers."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the group's own options; ``--json`` is there already."""
        ...

    def run(self, options: argparse.Namespace) -> int:
        """Measure, print, and return the exit status."""
        ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one group and return the exit status of the process."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    chooser = argparse.ArgumentParser(prog="python -m bench", description=_HELP, add_help=False)
    chooser.add_argument("group", choices=sorted(GROUPS))
    if not given or given[0] in {"-h", "--help"}:
        chooser.print_help(sys.stderr)
        return 0 if given else 2
    name = chooser.parse_args(given[:1]).group
    group = cast("Group", importlib.import_module(GROUPS[name]))
    question = (group.__doc__ or "").strip().split("\n", 1)[0]
    parser = argparse.ArgumentParser(prog=f"python -m bench {name}", description=question)
    measure.add_arguments(parser)
    group.add_arguments(parser)
    options = parser.parse_args(given[1:])
    sys.stderr.write(f"{measure.machine_line()}\n")
    return group.run(options)


if __name__ == "__main__":
    sys.exit(main())
