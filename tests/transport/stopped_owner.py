"""A process that has pages, for tests of transports: it grants them and says where."""

import signal
import sys
import time

from kvstore.testing.transfer_pages import TransferPages
from kvstore.transport.tcp import TcpTransport


def main() -> None:
    """Serve pages of the size and number in the arguments until a signal ends it."""
    size, count = map(int, sys.argv[1:])
    pages, transport = TransferPages(size, count), TcpTransport("127.0.0.1:0", 1)
    deadline_ns = time.monotonic_ns() + 60 * 10**9
    transport.grant(b"t" * 16, pages.granted(), deadline_ns)
    sys.stdout.write(f"serves at {transport.endpoint}\n")
    sys.stdout.flush()
    signal.pause()


if __name__ == "__main__":
    main()
