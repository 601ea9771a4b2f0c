"""Pushes over TLS beside the same over plain TCP."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.handoff_pools import PROMPT_BYTES, TURNS_MIN
from bench.handoff_processes import pushing
from bench.measure import Result, interleave, throughput
from kvstore.process.tls import CertificateFiles


def results(name: str, seconds: float) -> Iterator[Result]:
    """``push/tls/...``: a prompt's KV from pool to pool; nothing where there is no openssl."""
    program = shutil.which("openssl")
    if program is None:
        sys.stderr.write(f"{name} is left out: there is no program openssl to make a certificate\n")
        return
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        certificates = _certificates(program, Path(folder))
        with (
            pushing(permuted=False, certificates=certificates) as tls,
            pushing(permuted=False) as plain,
        ):
            measured = interleave(tls, plain, pairs=TURNS_MIN, min_seconds=seconds)
    yield throughput(name, PROMPT_BYTES, measured, "the same push without TLS")


def _certificates(program: str, folder: Path) -> CertificateFiles:
    """A certificate that is its own authority."""
    key, certificate = str(folder / "key.pem"), str(folder / "certificate.pem")
    subprocess.run(
        [program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "1", "-subj", "/CN=bench", "-keyout", key, "-out", certificate],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return CertificateFiles(certificate, key, certificate)
