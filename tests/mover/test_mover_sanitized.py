"""The native mover and lookup under AddressSanitizer and UBSan: they touch no byte they may not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "kvstore" / "mover"
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
    return built(tmp_path_factory, "_mover.c")


@pytest.fixture(scope="module")
def lookup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory, "_table.c")


def built(tmp_path_factory: pytest.TempPathFactory, source: str) -> Path:
    runtime("libasan.so")
    runtime("libubsan.so")
    library = tmp_path_factory.mktemp("sanitized") / f"{source}.so"
    command = ["gcc", *FLAGS, "-o", str(library), str(SOURCES / source)]
    subprocess.run(command, check=True, timeout=120)
    return library


def run(library: Path, spawn, *arguments: str, program: str = "jobs"):
    """Random jobs on a library, in a process that has the sanitizers' runtime from its start."""
    preloaded = f"{runtime('libasan.so')} {runtime('libubsan.so')}"
    command = [sys.executable, "-m", f"tests.mover.{program}", str(library), *arguments]
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


@pytest.mark.soak("mover", minutes=1)
def test_random_lookups_in_nonsense_touch_no_byte_but_the_tables(lookup, spawn, soak_s):
    process = run(lookup, spawn, str(SEED), str(soak_s), program="lookups")

    assert process.wait(3 * soak_s + 30) == 0, process.report()
    assert int(process.stdout.split()[0]) > 20, "too few lookups were made"


@pytest.mark.soak("mover", minutes=1)
def test_the_sanitizer_sees_a_lookup_beyond_its_table(lookup, spawn):
    process = run(lookup, spawn, "overread", program="lookups")

    assert process.wait(60) != 0
    assert "AddressSanitizer: heap-buffer-overflow" in process.stderr
