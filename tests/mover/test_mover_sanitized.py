"""The native mover under AddressSanitizer and UBSan: random jobs touch no byte they may not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "kvstore" / "mover" / "_mover.c"
FLAGS = [
    "-O1", "-g", "-std=c11", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra",
    "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer",
]  # fmt: skip
SEED = 20


def runtime(name: str) -> str:
    """Where gcc has a library of its sanitizers; a test that needs it skips without."""
    try:
        asked = subprocess.run(
            ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"gcc is needed ({error})")
    path = asked.stdout.strip()
    if not Path(path).is_absolute():
        pytest.skip(f"gcc has no {name}")
    return path


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runtime("libasan.so")
    runtime("libubsan.so")
    built = tmp_path_factory.mktemp("sanitized") / "mover.so"
    subprocess.run(["gcc", *FLAGS, "-o", str(built), str(SOURCE)], check=True, timeout=120)
    return built


def run(library: Path, spawn, *arguments: str):
    """Random jobs on a library, in a process that has the sanitizers' runtime from its start."""
    preloaded = f"{runtime('libasan.so')} {runtime('libubsan.so')}"
    command = [sys.executable, "-m", "tests.mover.jobs", str(library), *arguments]
    environment = {
        "LD_PRELOAD": preloaded,
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "PYTHONMALLOC": "malloc",  # so that lists that are passed as bytes have red zones too
        "PYTHONPATH": os.fspath(ROOT),
    }
    return spawn(command, env=environment)


@pytest.mark.soak("mover", minutes=1)
def test_random_jobs_touch_no_byte_but_their_own(library, spawn, soak_s):
    process = run(library, spawn, str(SEED), str(soak_s))

    assert process.wait(3 * soak_s + 30) == 0, process.report()
    assert int(process.stdout.split()[0]) > 100, "too few jobs ran"


@pytest.mark.soak("mover", minutes=1)
def test_the_sanitizer_sees_a_job_that_reads_past_its_list(library, spawn):
    """What the test above would not notice it could not prove."""
    process = run(library, spawn, "overread")

    assert process.wait(60) != 0
    assert "AddressSanitizer: heap-buffer-overflow" in process.stderr
