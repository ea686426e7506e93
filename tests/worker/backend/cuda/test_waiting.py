"""What waits for the GPU waits as long as it was told."""

from __future__ import annotations

import pytest
import torch

from allspan.protos.api.errors import DeadlineExceeded
from allspan.worker.backend.cuda.event_wait import EventWaiter
from allspan.worker.backend.cuda.sampling import DeviceSampling


@pytest.mark.gpu
def test_a_hanging_gpu_is_given_up_and_a_busy_one_waited_for() -> None:
    sampling = DeviceSampling(1, 1024, torch.device("cuda"), waiter=EventWaiter(0.2))
    logits = torch.randn(1, 1024, device="cuda")
    sampling.launch_best(logits).result()
    torch.cuda._sleep(100_000_000)  # some 60 ms
    assert sampling.launch_best(logits).result().tolist() == [[int(logits.argmax())]]
    torch.cuda._sleep(2_000_000_000)
    with pytest.raises(DeadlineExceeded, match="the GPU has not finished"):
        sampling.launch_best(logits).result()
    torch.cuda.synchronize()
