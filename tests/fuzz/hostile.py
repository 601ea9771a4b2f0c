"""A client process that sends what it likes: ``python -m tests.fuzz.hostile SOCKET SEED SECONDS``.

Its threads do not wait for answers, and read only some of them. It prints how many connections it
made and how many frames it sent.
"""

import json
import socket
import sys
import threading
from contextlib import suppress
from random import Random
from time import monotonic

from kvstore.protocol import wire
from tests.fuzz.messages import Client

THREADS = 3


def attack(path: str, client: Client, end_s: float, counts: dict[str, int]) -> None:
    while monotonic() < end_s:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, suppress(OSError):
            connection.settimeout(0.2)
            connection.connect(path)
            counts["connections"] += 1
            if client.chance.random() < 0.95:
                connection.sendall(wire.encode(wire.Hello(1, 1, 2, "fuzz", client.session, b"")))
                connection.sendall(wire.encode(client.open_space()))
            for _ in range(client.chance.randrange(200)):
                connection.sendall(client.frame())
                counts["frames"] += 1
                if client.chance.random() < 0.3:
                    with suppress(BlockingIOError):
                        connection.recv(1 << 16, socket.MSG_DONTWAIT)


def main() -> None:
    path, seed, seconds = sys.argv[1:]
    chance, end_s = Random(int(seed)), monotonic() + float(seconds)
    counts = [{"connections": 0, "frames": 0} for _ in range(THREADS)]
    threads = [
        threading.Thread(target=attack, args=[path, Client(Random(chance.random())), end_s, count])
        for count in counts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    totals = {name: sum(count[name] for count in counts) for name in counts[0]}
    sys.stdout.write(json.dumps(totals) + "\n")


if __name__ == "__main__":
    main()
