"""The admin process as the node starts it: ``python -m kvstore.server.admin DESCRIPTOR``."""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """End with the node, whatever becomes of it, and serve until then."""
    # Before anything that takes time: the other sign of the node's end is that its socket closes.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the node, sent to its whole group
        signal.signal(number, signal.SIG_IGN)
    from kvstore.server.admin.process import run

    return run(int(sys.argv[1]))


if __name__ == "__main__":
    raise SystemExit(main())
