"""The emulator finds what it promises to find: kernels that would be wrong on a GPU, in one way each."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Protocol

import pytest
import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import Kernel
from support.emulator.driver import EmulatedFault, EmulatorDriver

KERNEL = '#include "ptx/ptx.cuh"\nextern "C" __global__ void f(float* out, const float* in) {{\n  {body}\n}}\n'
STAGE = "DYNAMIC_SHARED(held); copy16(smem(held) + 16 * threadIdx.x, in + 4 * threadIdx.x, true); commit(); "
TAKE = "out[threadIdx.x] = reinterpret_cast<float*>(held)[threadIdx.x ^ 32];"

PUT = "DYNAMIC_SHARED(held); float* const mine = reinterpret_cast<float*>(held) + threadIdx.x; *mine = blockIdx.x; "
MEET = "cluster_arrive(); cluster_wait(); "
LOOK = "out[blockIdx.x * 32 + threadIdx.x] = *of_block(mine, blockIdx.x ^ 1); "


class Run(Protocol):
    """Runs the body of a kernel in one cluster of so many blocks; what it wrote."""

    def __call__(self, body: str, threads: int = 64, shared: int = 1024, cluster: int = 1) -> Tensor: ...


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run(body: str, threads: int = 64, shared: int = 1024, cluster: int = 1) -> Tensor:
        source = tmp_path / "f.cu"
        source.write_text(KERNEL.format(body=body))
        out, given = torch.zeros(threads * cluster), torch.arange(4.0 * threads)
        kernel = Kernel(str(source), "f", (("CLUSTER", cluster),))
        EmulatorDriver().launch(kernel, (cluster,), threads, [out, given], shared)
        return out

    return run


def test_a_copy_arrives_when_it_is_waited_for(run: Run) -> None:
    expected = torch.arange(64).view(2, 32).flip(0).flatten().float()
    assert torch.equal(run(STAGE + "wait_for<0>(); __syncthreads(); " + TAKE), expected)


def test_a_copy_that_nobody_waits_for_does_not_arrive(run: Run) -> None:
    assert run(STAGE + "__syncthreads(); " + TAKE).isnan().all()


def test_what_another_warp_copied_is_not_there_without_a_barrier(run: Run) -> None:
    assert run(STAGE + "wait_for<0>(); " + TAKE).isnan().any()


@pytest.mark.parametrize("declared", ["DYNAMIC_SHARED(held);", "__shared__ float held[64];"])
def test_shared_memory_that_nobody_wrote_is_nan(declared: str, run: Run) -> None:
    assert run(declared + TAKE).isnan().all()


def test_blocks_of_a_cluster_see_each_others_shared_memory_once_they_have_met(run: Run) -> None:
    found = run(PUT + MEET + LOOK + MEET, threads=32, cluster=2)
    assert found.tolist() == [1.0] * 32 + [0.0] * 32
    assert run(PUT + "__syncthreads(); " + LOOK + MEET, threads=32, cluster=2).isnan().any()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (PUT + MEET + "if (blockIdx.x) return; for (int i = 0; i < 20; ++i) __syncthreads(); " + LOOK, "has ended"),
        (PUT + "cluster_arrive(); cluster_arrive();", "twice"),
        (PUT + "cluster_wait();", "has not come"),
        (PUT + "if (threadIdx.x) __syncthreads(); else { cluster_arrive(); cluster_wait(); }", "in vain"),
        ("__shared__ float held[32]; out[0] = *of_block(held, 1);", "not in dynamic shared memory"),
    ],
)
def test_what_no_cluster_puts_up_with_is_an_error(body: str, why: str, run: Run) -> None:
    with pytest.raises(EmulatedFault, match=why):
        run(body, threads=32, cluster=2)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("if (threadIdx.x % 2) __shfl_sync(~0u, 1, 0); else __ballot_sync(~0u, 1);", "at different collectives"),
        ("if (threadIdx.x % 2) __syncwarp(); else __syncthreads();", "wait for each other in vain"),
        ("DYNAMIC_SHARED(held); held[1024 + threadIdx.x] = 1;", "writes past its 1024 bytes of shared memory"),
        ("DYNAMIC_SHARED(held); copy16(smem(held) + 8, in, true);", "is not aligned"),
    ],
)
def test_what_no_gpu_puts_up_with_is_an_error(body: str, why: str, run: Run) -> None:
    with pytest.raises(EmulatedFault, match=why):
        run(body)


def test_a_launch_that_no_gpu_takes_is_an_error(run: Run) -> None:
    for wrong in ({"threads": 1025}, {"threads": 0}, {"shared": 1 << 18}):
        with pytest.raises(EmulatedFault, match="blocks of"):
            run("out[0] = 1;", **wrong)


def test_a_kernel_that_is_in_no_table_is_an_error(emulator: EmulatorDriver) -> None:
    with pytest.raises(EmulatedFault, match="`kernel_variants`"):
        emulator.launch(Kernel("attention/decode.cu", "decode", (("HEAD_DIMENSION", 64),)), (1,), 32, [], 0)


def test_arguments_arrive_by_their_types(run: Run) -> None:
    assert run("out[threadIdx.x] = in[threadIdx.x] * 0.5f;").tolist() == [math.ldexp(i, -1) for i in range(64)]
