"""The benchmark's limited link: bytes pass unchanged, one after the other."""

import socket
import threading

from bench.slow_link import Bucket, SlowLink


def test_bytes_pass_a_limited_link_unchanged_in_both_directions():
    said = bytes(range(256)) * 1_000
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def echo() -> None:
            connection, _ = listener.accept()
            with connection:
                while data := connection.recv(65_536):
                    connection.sendall(data)

        thread = threading.Thread(target=echo)
        thread.start()
        with SlowLink(f"127.0.0.1:{listener.getsockname()[1]}") as link:
            link.limit(50e6)
            host, port = link.address.split(":")
            with socket.create_connection((host, int(port)), 10.0) as near:
                near.settimeout(10.0)
                writer = threading.Thread(target=near.sendall, args=(said,))
                writer.start()
                answer = b""
                while len(answer) < len(said):
                    part = near.recv(65_536)
                    assert part
                    answer += part
                writer.join()
            thread.join(10.0)
            assert not thread.is_alive(), "the link closes what its other end has closed"
    assert answer == said


def test_a_bucket_gives_out_time_for_all_bytes_together():
    bucket = Bucket()
    bucket.take(1 << 40)
    bucket.limit(1e6)
    start = bucket.free_at
    for _ in range(4):
        bucket.take(250)
    assert bucket.free_at - start >= 0.00099
