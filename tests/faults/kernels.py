"""A daemon as on an older kernel: ``python -m tests.faults.kernels HOW ARGUMENTS...``.

``pidfd_open``: before Linux 6.5, a process id leads to a pidfd. ``blind``: the peers are in another
PID namespace besides, and nothing tells of their end; what they held is kept for half a second.
"""

import os
import sys
from functools import partial
from typing import NoReturn

from kvstore.node.requests import NodeLimits
from kvstore.server import daemon, processes

KEPT_NS = 500_000_000


def _no_pidfd(_pid: int) -> NoReturn:
    raise PermissionError("as in another PID namespace")


def main() -> int:
    how, *arguments = sys.argv[1:]
    processes._SO_PEERPIDFD = 9999
    if how == "blind":
        os.pidfd_open = _no_pidfd
        daemon.NodeLimits = partial(NodeLimits, unwatched_ns=KEPT_NS)
    return daemon.main(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
