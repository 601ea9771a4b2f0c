"""Run a block where nothing of the machine is in its way; the test starts this with ``unshare``.

``python -m tests.docs.inside [node] PROGRAM...``: gives ``/run`` and the network of these
namespaces what a fresh machine has, starts a node at its default address if asked, and becomes the
program, at home. Whatever that leaves running ends with the PID namespace.
"""

import fcntl
import os
import socket
import struct
import subprocess
import sys

_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1


def main() -> None:
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    program = sys.argv[1:]
    if program[0] == "node":
        program = program[1:]
        small = ["--set", "host.capacity_bytes=256MiB", "--set", "host.extent_bytes=64MiB"]
        node = subprocess.Popen(["kvstore-server", *small], stdout=subprocess.PIPE, text=True)
        assert node.stdout is not None
        line = node.stdout.readline()
        if "ready" not in line:
            sys.exit(f"no node: {line!r}")
        os.set_inheritable(node.stdout.fileno(), True)  # the node may go on writing there
    del os.environ["PYTHONPATH"]  # by which this module was found
    os.chdir(os.environ["HOME"])
    os.execvp(program[0], program)


if __name__ == "__main__":
    main()
