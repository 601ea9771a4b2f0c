"""Entry point of the admin process: ``python -m kvstore.server.admin DESCRIPTOR``."""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Serve until the node ends."""
    # Set this first: the node's end also closes its socket, but a stopped process would not notice.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):  # for the node, but sent to the whole group
        signal.signal(number, signal.SIG_IGN)
    from kvstore.server.admin.process import run

    return run(int(sys.argv[1]))


if __name__ == "__main__":
    raise SystemExit(main())
