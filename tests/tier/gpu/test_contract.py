"""Goal: KV pools on a device keep one contract: on a late device, in host memory, and on CUDA."""

import pytest

torch = pytest.importorskip("torch")

from kvstore.testing.device import DevicePoolContract, LateDevice  # noqa: E402
from kvstore.tier.gpu import CudaDevice, HostDevice  # noqa: E402


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("check", DevicePoolContract.CHECKS)
def test_a_pool_on_a_device_that_is_late_keeps_the_contract(check, seed):
    getattr(DevicePoolContract(lambda: LateDevice(seed)), check)()


@pytest.mark.parametrize("check", DevicePoolContract.CHECKS)
def test_a_pool_in_host_memory_keeps_the_contract(check):
    getattr(DevicePoolContract(lambda: HostDevice("cpu:0")), check)()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("check", DevicePoolContract.CHECKS)
def test_a_pool_on_cuda_keeps_the_contract(check):
    getattr(DevicePoolContract(lambda: CudaDevice("cuda:0")), check)()


@pytest.mark.parametrize("check", [
    "check_pages_reach_their_blocks_byte_for_byte",
    "check_pages_leave_their_blocks_byte_for_byte",
    "check_blocks_are_read_after_the_step_that_writes_them",
    "check_layers_are_there_when_their_event_is_reached",
    "check_two_jobs_after_each_other_do_not_mix",
])  # fmt: skip
def test_the_contract_catches_who_does_not_wait(check):
    with pytest.raises(AssertionError):
        getattr(DevicePoolContract(lambda: LateDevice(1, hurried=True)), check)()
