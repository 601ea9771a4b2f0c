"""Stands in for Mooncake's engine: the same calls, over sockets, with what it does wrong.

It reads whatever address is asked for in registered memory. A first contact with a peer that says
nothing blocks. ``FAKE_MOONCAKE_DEVICES``: names of devices that it finds.
``FAKE_MOONCAKE_REGISTER_S``: how long each registration takes. ``FAKE_MOONCAKE_DIES``: it ends at
once, and writes when into this file.
"""

import ctypes
import json
import os
import socket
import struct
import threading
import time
from itertools import count
from pathlib import Path

_REQUEST = struct.Struct("<QQ")
_WRITE = 1 << 63


class TransferEngine:
    def __init__(self):
        self._registered = {}
        self._batches = {}
        self._numbers = count(1)
        self._peers = set()
        self._never = threading.Event()

    def initialize(self, host, metadata, protocol, devices):
        assert metadata == "P2PHANDSHAKE"
        if starts := os.environ.get("FAKE_MOONCAKE_DIES"):
            with Path(starts).open("a") as file:
                file.write(f"{time.monotonic()}\n")
            os._exit(1)
        self._listener = socket.create_server((host, 0))
        threading.Thread(target=self._serve, daemon=True).start()
        return 0

    def get_local_topology(self):
        return json.dumps({"cpu:0": [os.environ.get("FAKE_MOONCAKE_DEVICES", "").split(), []]})

    def get_rpc_port(self):
        return self._listener.getsockname()[1]

    def register_memory(self, address, length):
        if any(
            at < address + length and address < at + size for at, size in self._registered.items()
        ):
            return -7
        self._never.wait(float(os.environ.get("FAKE_MOONCAKE_REGISTER_S", "0")))
        self._registered[address] = length
        return 0

    def unregister_memory(self, address):
        return 0 if self._registered.pop(address, None) else -1

    def batch_transfer_async_read(self, endpoint, buffers, peer_buffers, lengths):
        return self._begin(self._read, endpoint, buffers, peer_buffers, lengths)

    def batch_transfer_async_write(self, endpoint, buffers, peer_buffers, lengths):
        return self._begin(self._write, endpoint, buffers, peer_buffers, lengths)

    def _begin(self, move, endpoint, buffers, peer_buffers, lengths):
        assert len(buffers) == len(peer_buffers) == len(lengths) == 1
        host, port = endpoint.rsplit(":", 1)
        if endpoint not in self._peers:
            try:
                with socket.create_connection((host, int(port))) as peer:
                    peer.sendall(_REQUEST.pack(0, 0))
                    if not peer.recv(1):
                        return 0
            except OSError:
                return 0
            self._peers.add(endpoint)
        number = next(self._numbers)
        self._batches[number] = 0
        asked = (number, (host, int(port)), buffers[0], peer_buffers[0], lengths[0])
        threading.Thread(target=move, args=asked, daemon=True).start()
        return number

    def transfer_check_status(self, batch):
        return self._batches[batch]

    def _read(self, number, place, address, remote, length):
        target = memoryview((ctypes.c_char * length).from_address(address)).cast("B")
        try:
            with socket.create_connection(place) as peer:
                peer.sendall(_REQUEST.pack(remote, length))
                done = -1 if peer.recv(1) != b"+" else 0
                while 0 <= done < length:
                    came = peer.recv_into(target[done:])
                    done = done + came if came else -1
        except OSError:
            done = -1
        self._batches[number] = 1 if done == length else -1

    def _write(self, number, place, address, remote, length):
        try:
            with socket.create_connection(place) as peer:
                peer.sendall(_REQUEST.pack(remote, length | _WRITE))
                peer.sendall((ctypes.c_char * length).from_address(address))
                done = peer.recv(1) == b"+"
        except OSError:
            done = False
        self._batches[number] = 1 if done else -1

    def _serve(self):
        while True:
            peer, _ = self._listener.accept()
            threading.Thread(target=self._answer, args=(peer,), daemon=True).start()

    def _answer(self, peer):
        with peer:
            address, length = _REQUEST.unpack(peer.recv(_REQUEST.size, socket.MSG_WAITALL))
            write, length = length & _WRITE, length & ~_WRITE
            known = any(
                at <= address and address + length <= at + size
                for at, size in self._registered.items()
            )
            if known and write:
                target = memoryview((ctypes.c_char * length).from_address(address)).cast("B")
                done = 0
                while done < length and (came := peer.recv_into(target[done:])):
                    done += came
                peer.sendall(b"+" if done == length else b"-")
                return
            peer.sendall(b"+" if known or not length else b"-")
            if known:
                peer.sendall((ctypes.c_char * length).from_address(address))
