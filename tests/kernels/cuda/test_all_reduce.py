"""Sums over GPUs: that the ranks meet however they are delayed, that everybody gets the sum in rank order, and that a
peer who is gone is given up. Emulated, ranks take turns by chance and stores to each other arrive late, in any order;
on a GPU, the ranks are streams of one device (`tests/cluster` has processes)."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from allspan.kernels.cuda.comm import all_reduce
from allspan.kernels.cuda.comm.all_reduce import AllReduce, arena_parts
from support.emulator.driver import EmulatorDriver

EPS = 1e-5

Call = Callable[[int], None]


class Ranks:
    """Ends of several ranks on one device, and a way to run their calls beside each other."""

    def __init__(self, count: int, device: str, emulator: EmulatorDriver, patience_s: float = 0.0) -> None:
        flags, inboxes, stagings = arena_parts(count)
        self.arenas = [torch.zeros(flags + inboxes + stagings, dtype=torch.uint8, device=device) for _ in range(count)]
        for arena in self.arenas:
            arena[flags : flags + inboxes] = 0xFF
        addresses = [arena.data_ptr() for arena in self.arenas]
        patience_s = patience_s or (10.0 if device == "cuda" else 0.02)  # emulated time passes with each look
        blocks = 60 // count if device == "cuda" else 128  # all ranks' at once
        self.ends = [AllReduce(rank, addresses, device, patience_s, blocks) for rank in range(count)]
        self.device, self.count, self._emulator = device, count, emulator
        if device == "cuda":
            _load_kernels(AllReduce(0, addresses, device, 1e-6, blocks))
            for arena in self.arenas:
                arena[:flags] = 0
                arena[flags : flags + inboxes] = 0xFF
        self._streams = [torch.cuda.Stream() for _ in range(count)] if device == "cuda" else []

    def run(self, call: Call, seed: int = 0) -> None:
        """`call(rank)` makes that rank's calls."""
        if self.device == "cuda":
            torch.cuda.synchronize()
            for rank, stream in enumerate(self._streams):
                with torch.cuda.stream(stream):
                    call(rank)
            torch.cuda.synchronize()
            return
        with self._emulator.streams(self.count, seed) as streams:
            for rank in range(self.count):
                streams.current = rank
                call(rank)


def _load_kernels(end: AllReduce) -> None:
    """Each once, for nothing: a kernel that is loaded may wait for those that run, and these wait for each other."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for count in (8, 9_000_000):
            end.all_reduce(torch.zeros(count, dtype=dtype, device="cuda"))
    for width, dtype in itertools.product((64, 16384), (torch.bfloat16, torch.float16)):
        x, residual = torch.zeros(300, width, dtype=dtype, device="cuda"), torch.zeros(300, width, device="cuda")
        for rows in (1, 300):
            end.all_reduce_add_rms_norm(x[:rows], residual[:rows], residual[0], EPS, x[:rows])
    torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def few_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of summing, and messages in several pieces, within few elements."""
    if "device" in request.fixturenames and request.getfixturevalue("device") == "cpu":
        monkeypatch.setattr(all_reduce, "PUSH_BYTES", dict.fromkeys(range(9), 2048))
        monkeypatch.setattr(all_reduce, "STAGING_BYTES", 6144)
        monkeypatch.setattr(all_reduce, "_THREADS", 32)


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: str) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def in_rank_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def same_bits(got: Tensor, expected: Tensor) -> bool:
    return torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_messages_of_any_length_in_any_order_are_summed_in_rank_order(
    ranks: int, device: str, emulator: EmulatorDriver
) -> None:
    world = Ranks(ranks, device, emulator)
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    rounds = [(1, fp32), (515, bf16), (8, bf16), (1030, bf16), (7, bf16), (5000, bf16), (1601, fp32), (64, bf16)]
    rounds += [(515, fp16), (5000, fp16)]
    if device == "cuda":
        rounds = [(n, t) for n, t in rounds for _ in range(3)] + [(3_000_001, bf16), (9_000_000, fp32), (20, bf16)]
    data = [[random((n,), t, 100 * i + r, device) for r in range(ranks)] for i, (n, t) in enumerate(rounds)]
    sums = [in_rank_order(parts) for parts in data]

    def call(rank: int) -> None:
        for parts in data:
            world.ends[rank].all_reduce(parts[rank])

    world.run(call, seed=ranks)
    for (count, dtype), parts, expected in zip(rounds, data, sums, strict=True):
        for rank, part in enumerate(parts):
            assert same_bits(part, expected), f"{count} elements of {dtype} on rank {rank}"


@pytest.mark.parametrize("seed", range(4))
def test_many_rounds_meet_whoever_is_delayed(seed: int, device: str, emulator: EmulatorDriver) -> None:
    world = Ranks(2, device, emulator)
    chance = np.random.default_rng(seed)
    rounds = 150 if device == "cpu" else 400  # a stream takes a thousand launches ahead
    lengths = [int(n) for n in chance.choice([3, 100, 1500], rounds, p=[0.5, 0.4, 0.1])]
    data = [[random((n,), torch.bfloat16, i + 7 * r, device) for r in range(2)] for i, n in enumerate(lengths)]
    sums = [in_rank_order(parts) for parts in data]

    def call(rank: int) -> None:
        for parts in data:
            world.ends[rank].all_reduce(parts[rank])

    world.run(call, seed)
    wrong = [i for i, parts in enumerate(data) for part in parts if not same_bits(part, sums[i])]
    assert not wrong, f"rounds {wrong}"


@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    [(1, 64, torch.bfloat16), (7, 136, torch.bfloat16), (11, 512, torch.bfloat16), (3, 136, torch.float16)],
)
def test_the_fused_norm_has_the_bits_of_a_sum_and_a_norm(
    rows: int, width: int, dtype: torch.dtype, device: str, emulator: EmulatorDriver
) -> None:
    """The third is longer than what goes straight to every peer."""
    world = Ranks(2, device, emulator)
    x = [random((rows, width), dtype, 5 + rank, device) for rank in range(2)]
    residual = random((rows, width), torch.float32, 1, device)
    weight = random((width,), torch.float32, 2, device)
    residuals = [residual.clone() for _ in range(2)]
    out = [torch.full_like(part, float("nan")) for part in x]
    summed = in_rank_order(x)

    def call(rank: int) -> None:
        world.ends[rank].all_reduce_add_rms_norm(x[rank], residuals[rank], weight, EPS, out[rank])

    world.run(call)
    expected = residual + summed.float()
    norm = expected * torch.rsqrt(expected.pow(2).mean(1, keepdim=True) + EPS) * weight
    for rank in range(2):
        assert torch.equal(residuals[rank], expected)
        torch.testing.assert_close(out[rank].float(), norm, rtol=8e-3, atol=1e-3)
    assert same_bits(out[0], out[1])
    alone = AllReduce(0, [0], device)
    after, again = torch.empty_like(out[0]), residual.clone()
    alone.all_reduce_add_rms_norm(summed, again, weight, EPS, after)
    assert same_bits(after, out[0])


@pytest.mark.parametrize(("rows", "widths"), [(1, (64, 40)), (5, (301, 300)), (9, (36, 32, 32)), (3, (5, 4, 4))])
def test_columns_of_all_ranks_come_side_by_side(
    rows: int, widths: tuple[int, ...], device: str, emulator: EmulatorDriver
) -> None:
    world = Ranks(len(widths), device, emulator)
    parts = [random((rows, width), torch.float32, 3 + width, device) for width in widths]
    out = [torch.full((rows, sum(widths)), float("nan"), device=device) for _ in widths]
    sums = [torch.ones(9, device=device) for _ in widths]

    def call(rank: int) -> None:
        for _ in range(3):
            world.ends[rank].all_gather_columns(parts[rank], widths, out[rank])
            world.ends[rank].all_reduce(sums[rank])

    world.run(call, rows)
    for part in out:
        assert same_bits(part, torch.cat(parts, 1))
    assert all(bool((part == float(len(widths)) ** 3).all()) for part in sums)


def test_numbers_that_mean_nothing_elsewhere_are_sent_as_they_are(device: str, emulator: EmulatorDriver) -> None:
    """An inbox is full of NaNs while it waits."""
    values = [float("nan"), float("inf"), -0.0, 1.0, 3e38, 1e-45, 0.0, -float("inf")]
    bits = torch.tensor(values).view(torch.int32)
    bits[0] = -1
    world = Ranks(2, device, emulator)
    parts = [bits.view(torch.float32).to(device), torch.zeros(8, device=device)]
    world.run(lambda rank: world.ends[rank].all_reduce(parts[rank]))
    for part in parts:
        torch.testing.assert_close(part.cpu(), torch.tensor(values), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("count", [16, 5000])
def test_a_peer_that_never_comes_is_named_and_later_rounds_do_not_wait(
    count: int, device: str, emulator: EmulatorDriver
) -> None:
    world = Ranks(2, device, emulator, patience_s=2e-6 if device == "cpu" else 0.05)
    x = torch.ones(count, dtype=torch.bfloat16, device=device)
    end = world.ends[1]
    assert end.given_up is None
    for _ in range(3):
        end.all_reduce(x)
    if device == "cuda":
        torch.cuda.synchronize()
    assert end.given_up == 0


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("width", [896, 3584, 4096, 8192])
def test_real_widths_and_requests(ranks: int, width: int, emulator: EmulatorDriver) -> None:
    world = Ranks(ranks, "cuda", emulator)
    for rows in (1, 2, 5, 16):  # blocks of all ranks must find room on the one GPU
        x = [random((rows, width), torch.bfloat16, rank, "cuda") for rank in range(ranks)]
        weight, residual = random((width,), torch.float32, 9, "cuda"), random((rows, width), torch.float32, 8, "cuda")
        residuals = [residual.clone() for _ in range(ranks)]
        expected = residual + in_rank_order(x).float()

        def call(rank: int, x: list[Tensor] = x, residuals: list[Tensor] = residuals, weight: Tensor = weight) -> None:
            world.ends[rank].all_reduce_add_rms_norm(x[rank], residuals[rank], weight, EPS, x[rank])

        world.run(call)
        norm = expected * torch.rsqrt(expected.pow(2).mean(1, keepdim=True) + EPS) * weight
        for rank in range(ranks):
            assert torch.equal(residuals[rank], expected)
            torch.testing.assert_close(x[rank].float(), norm, rtol=8e-3, atol=1e-2)


@pytest.mark.gpu
def test_a_captured_round_goes_on_counting(emulator: EmulatorDriver) -> None:
    world = Ranks(2, "cuda", emulator)
    x = [torch.ones(4096, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    world.run(lambda rank: world.ends[rank].all_reduce(x[rank]))  # compiled outside of the capture
    graphs = []
    for rank in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[rank], stream=world._streams[rank]):
            for _ in range(5):
                world.ends[rank].all_reduce(x[rank])
    for part in x:
        part.fill_(1.0)
    world.run(lambda rank: graphs[rank].replay())
    world.run(lambda rank: graphs[rank].replay())
    assert all(bool((part == 2.0**10).all()) for part in x)


def test_what_would_be_read_wrongly_is_refused(device: str, emulator: EmulatorDriver) -> None:
    world = Ranks(2, device, emulator)
    end = world.ends[0]
    x = torch.zeros(4, 64, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match=r"x: .*contiguous bfloat16, float16 or float32"):
        end.all_reduce(x.t())
    with pytest.raises(ValueError, match=r"weight: .* must be contiguous torch.float32 \(64,\)"):
        end.all_reduce_add_rms_norm(x, x.float(), torch.zeros(63, device=device), EPS, x)
    with pytest.raises(ValueError, match="rank 0 of 9: at most 8"):
        AllReduce(0, [0] * 9, device)
