"""Goal: KV pools on a device keep one contract: on a late device, in host memory, and on CUDA."""

import pytest

torch = pytest.importorskip("torch")

from kvstore.testing.device import (  # noqa: E402
    DevicePoolContract,
    EngineMemory,
    LateDevice,
)
from kvstore.tier import lane  # noqa: E402
from kvstore.tier.gpu import CudaDevice, HostDevice  # noqa: E402
from kvstore.tier.lane import DeviceCopy  # noqa: E402


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("check", DevicePoolContract.CHECKS)
def test_a_pool_on_a_device_that_is_late_keeps_the_contract(check, seed):
    getattr(DevicePoolContract(lambda: LateDevice(seed)), check)()


ONE_JOB = "check_operations_do_not_grow_with_pages"
"""Holds of jobs that are staged at once."""


PAGE_BYTES = 6 * 4096 * 2
"""Of the contract's first shape; a page of its others has 512 KiB, or less than a third."""


@pytest.mark.parametrize(
    ("staging_bytes", "slice_pages"),
    [
        pytest.param(1, 1, id="a plane"),
        pytest.param(PAGE_BYTES * 2 // 3, 4, id="four planes of six, or a few of 11 pages"),
        pytest.param(PAGE_BYTES, 1, id="a page"),
        pytest.param(PAGE_BYTES * 3 + 1, 4, id="three pages of 11"),
        pytest.param(PAGE_BYTES * 8, 4, id="two slices"),
    ],
)
@pytest.mark.parametrize("check", sorted(set(DevicePoolContract.CHECKS) - {ONE_JOB}))
def test_a_pool_whose_jobs_are_staged_in_parts_keeps_the_contract(
    check, staging_bytes, slice_pages
):
    def open_device():
        return LateDevice(4, staging_bytes=staging_bytes)

    getattr(DevicePoolContract(open_device, slice_pages), check)()


def test_a_job_of_the_size_of_the_staging_memory_is_one_part_however_slices_fit(monkeypatch):
    size, pages = 4096, 11
    memory = EngineMemory(LateDevice(staging_bytes=pages * size), 4, size // 4, 0, 1, pages)
    monkeypatch.setattr(lane, "SLICE_BYTES", 4 * size)
    pool = memory.pool
    try:
        assert pool.restore(memory.pages(), memory.table, pool.fence(), DeviceCopy()) == pages
        assert pool.launches == 4
        pool.extract(memory.table, memory.addresses, size, memory.seeds, pool.fence(), DeviceCopy())
        assert pool.launches == 8
    finally:
        memory.close()


@pytest.mark.parametrize("check", DevicePoolContract.CHECKS)
def test_a_pool_in_host_memory_keeps_the_contract(check):
    getattr(DevicePoolContract(lambda: HostDevice("cpu:0")), check)()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("check", DevicePoolContract.CHECKS)
def test_a_pool_on_cuda_keeps_the_contract(check):
    getattr(DevicePoolContract(lambda: CudaDevice("cuda:0")), check)()


WITHOUT_WAITS = [
    "check_pages_reach_their_blocks_byte_for_byte",
    "check_pages_leave_their_blocks_byte_for_byte",
    "check_blocks_are_read_after_the_step_that_writes_them",
    "check_blocks_are_written_after_the_work_that_reads_them",
    "check_pages_after_a_damaged_one_stay_away",
    "check_layers_are_there_when_their_event_is_reached",
    "check_two_jobs_after_each_other_do_not_mix",
    "check_operations_do_not_grow_with_pages",
]


@pytest.mark.parametrize("check", WITHOUT_WAITS)
def test_the_contract_catches_who_does_not_wait(check):
    with pytest.raises(AssertionError):
        getattr(DevicePoolContract(lambda: LateDevice(1, hurried=True)), check)()


@pytest.mark.parametrize("check", WITHOUT_WAITS)
def test_the_contract_catches_streams_that_do_not_wait_for_each_other(check):
    """In some order of their work; the host waits."""

    def caught(seed: int) -> bool:
        try:
            getattr(DevicePoolContract(lambda: LateDevice(seed, unordered=True)), check)()
        except AssertionError:
            return True
        return False

    assert any(map(caught, range(6)))
