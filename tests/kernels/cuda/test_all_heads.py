"""RMSNorm of all heads together: in float64, with heads that stay."""

from __future__ import annotations

import pytest
import torch

from allspan.kernels.cuda.rows.all_heads import mean_squares, norm_heads
from support.cuda_rows import rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "q", "k", "size"), [(1, 48, 8, 128), (5, 3, 1, 20), (70, 4, 2, 64), (0, 2, 1, 8)])
def test_queries_and_keys_are_normed_and_values_stay(
    n: int, q: int, k: int, size: int, dtype: torch.dtype, device: str
) -> None:
    x = rows(n, (q + 2 * k) * size, dtype=dtype).view(n, q + 2 * k, size)
    shares = torch.zeros(2, q + 2 * k)
    shares[0, :q], shares[1, q : q + k] = 1 / (q * size), 1 / (k * size)
    weight = torch.randn((q + k) * size, generator=torch.Generator().manual_seed(1))
    found, means = x.clone().to(device), torch.full((n, 2), 7.0, device=device)
    mean_squares(found, shares.to(device), means)
    norm_heads(found, means, weight[: q * size].to(device), weight[q * size :].to(device), 1e-5)
    expected = x.double()
    for kind, part in enumerate((slice(0, q), slice(q, q + k))):
        squares = expected[:, part].square().mean((1, 2))
        torch.testing.assert_close(means[:, kind].cpu().double(), squares, rtol=1e-4, atol=1e-6)
        own = weight.view(-1, size)[part].double()
        expected[:, part] = expected[:, part] / (squares + 1e-5).sqrt()[:, None, None] * own
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-2, atol=1e-3)
    assert torch.equal(found[:, q + k :].cpu(), x[:, q + k :])


def test_what_does_not_fit_is_refused(device: str) -> None:
    x, means = rows(2, 48, device=device).view(2, 3, 16), torch.zeros(2, 2, device=device)
    weight = torch.zeros(64, device=device)
    with pytest.raises(ValueError, match="are fewer than the 80 weights"):
        norm_heads(x, means, weight, weight[:16], 1e-6)
    with pytest.raises(ValueError, match="shares"):
        mean_squares(x, torch.zeros(2, 4, device=device), means)
