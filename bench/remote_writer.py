"""A process that stores fresh pages at a node at a constant rate, so that others hear of them.

``python -m bench.remote_writer ADDRESS PAGES_PER_S``: prints ``ready``; stores from a line ``go``
to a line ``rest`` on standard input, then prints how many pages; ends when that does.
"""

import os
import select
import sys
import threading
from time import monotonic
from typing import Final

from kvstore.protocol.page import KEY_BYTES
from kvstore.testing.lookups import WireClient

BATCH_PAGES: Final = 128
_never: Final = threading.Event()


def main() -> int:
    """Serve until standard input ends."""
    address, rate = sys.argv[1], int(sys.argv[2])
    client = WireClient(address, "announces")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while sys.stdin.readline():  # go
        began, stored = monotonic(), 0
        while not select.select([sys.stdin], [], [], 0)[0]:
            client.put(os.urandom(BATCH_PAGES * KEY_BYTES))
            stored += BATCH_PAGES
            _never.wait(max(0.0, began + stored / rate - monotonic()))
        if not sys.stdin.readline():  # rest
            break
        sys.stdout.write(f"{stored}\n")
        sys.stdout.flush()
    client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
