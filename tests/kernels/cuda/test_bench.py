"""What `allspan bench kernels` times is checked first, each case of it can be built, and a side that fails is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from allspan.kernels.bench.__main__ import GROUPS, as_json, cases, run
from allspan.kernels.bench.adapters import Shape as Adapters
from allspan.kernels.bench.adapters import build as build_adapters
from allspan.kernels.bench.attention import INT8, UINT4, Shape, build_decode, build_prefill
from allspan.kernels.bench.cascade import Shape as Sharing
from allspan.kernels.bench.cascade import build as build_cascade
from allspan.kernels.bench.case import Built, Case, Launch
from allspan.kernels.bench.elementwise import build_norm, build_rotary, build_silu
from allspan.kernels.bench.latent import Shape as Latents
from allspan.kernels.bench.latent import build_latent
from allspan.kernels.bench.linear import Shape as Product
from allspan.kernels.bench.linear import build as build_product
from allspan.kernels.bench.measure import GraphClock, Result, measure
from allspan.kernels.bench.mixtures import Shape as Mixture
from allspan.kernels.bench.mixtures import build as build_experts
from allspan.kernels.bench.mixtures import build_router
from allspan.kernels.bench.sampling import Filter
from allspan.kernels.bench.sampling import build as build_sampling
from allspan.kernels.cuda.jit.modules import Gpu
from allspan.kernels.errors import BackendUnavailable

SMALL = Shape(2, 33, heads=4, kv_heads=2)
BUILDERS: dict[str, Callable[[str], Built]] = {
    "decode": lambda device: build_decode(SMALL, device),
    "decode int8": lambda device: build_decode(replace(SMALL, dtype=INT8), device),
    "decode uint4": lambda device: build_decode(replace(SMALL, dtype=UINT4), device),
    "prefill": lambda device: build_prefill(replace(SMALL, requests=1), device),
    "cascade": lambda device: build_cascade(Sharing(3, 32, 16, heads=4, kv_heads=2, dim=64), device),
    "latent": lambda device: build_latent(Latents(16, 2, 40, page=16), device),
    "latent drafts": lambda device: build_latent(Latents(16, 2, 40, queries=3, page=16), device),
    "norm": lambda device: build_norm(1, device),
    "silu": lambda device: build_silu(1, device),
    "rotary": lambda device: build_rotary(1, device),
    "product bf16": lambda device: build_product(Product("x", 128, 48, 2, "bf16"), device),
    "product int8": lambda device: build_product(Product("x", 128, 48, 2, "int8"), device),
    "product uint4": lambda device: build_product(Product("x", 256, 48, 2, "uint4"), device),
    "experts bf16": lambda device: build_experts(Mixture(3, "bf16", 128, 5, 2, 40), device),
    "experts fp8": lambda device: build_experts(Mixture(3, "fp8", 128, 5, 2, 40), device),
    "experts uint4": lambda device: build_experts(Mixture(3, "uint4", 128, 5, 2, 40), device),
    "experts mxfp4": lambda device: build_experts(Mixture(3, "mxfp4", 128, 5, 2, 40), device),
    "router": lambda device: build_router(Mixture(9, "bf16", 128, 5, 2, 40), device),
    "adapters": lambda device: build_adapters(Adapters(5, 3, 16, 4, 96, 80), device),
    "greedy": lambda device: build_sampling(2, 300, None, device),
    "top_k": lambda device: build_sampling(3, 3000, Filter(50, 0.9), device),
    "top_p": lambda device: build_sampling(3, 3000, Filter(top_p=0.9), device),
    "min_p": lambda device: build_sampling(3, 3000, Filter(min_p=0.1), device),
}


class FakeClock:
    """Runs each side once, and says how long its name is."""

    def times(self, sides: Mapping[str, Launch], sets: int, rounds: int) -> dict[str, list[float]]:
        for launch in sides.values():
            launch(sets - 1)
        return {name: [float(len(name)) + turn for turn in range(rounds)] for name in sides}


def measured(**changes: object) -> Result:
    built = Built({"ours": lambda i: None}, lambda name: None, 3, 100)
    case = Case("group", "case", lambda device: replace(built, **changes), num_bytes=10)
    (result,) = measure([case], "cpu", FakeClock(), 3, 1000)
    return result


def check(name: str, device: str) -> None:
    built = BUILDERS[name](device)
    for kernel, launch in built.ours.items():
        built.check(kernel)
        launch(built.sets - 1)


@pytest.mark.parametrize(
    "name",
    [
        *("decode int8", "prefill", "cascade", "latent drafts", "norm", "rotary", "product int8", "greedy"),
        "adapters",
        *("experts fp8", "experts mxfp4", "router"),
    ],
)
def test_a_case_finds_its_kernel_right(name: str, device: str) -> None:
    check(name, device)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BUILDERS)
def test_every_kind_of_case_finds_its_kernel_right(name: str) -> None:
    check(name, "cuda")


@pytest.mark.parametrize(
    "name", ["decode int8", "prefill", "norm", "product int8", "experts bf16", "adapters", "greedy"]
)
def test_a_case_finds_a_kernel_wrong_that_does_nothing(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built = BUILDERS[name](device)
    monkeypatch.setattr("allspan.kernels.cuda.jit.modules.driver", lambda: Idle())
    with pytest.raises(AssertionError):
        built.check(next(iter(built.ours)))


class Idle:
    def gpu(self, device: torch.device) -> object:
        return Gpu(5, 232448 - 1024)

    def launch(self, *arguments: object) -> None: ...


def test_the_best_of_each_side_counts_and_refusals_are_told() -> None:
    def refuse() -> Launch:
        raise RuntimeError("no such kernel\nmore words")

    sides = {"ours": lambda i: None, "slower of ours": lambda i: None}
    peers = {"a library": lambda: lambda i: None, "another library": lambda: lambda i: None, "old": refuse}
    result = measured(ours=sides, peers=peers)
    assert (result.ours.side, result.best_peer.side) == ("ours", "a library")  # type: ignore[union-attr]
    assert result.ratio == (9 + 1) / (4 + 1)
    assert [figure.refused for figure in result.figures if figure.side == "old"] == ["no such kernel"]
    assert as_json(result)["ratio"] == 2.0


def test_what_is_wrong_is_not_timed() -> None:
    def wrong(name: str) -> None:
        raise AssertionError("off by one")

    result = measured(check=wrong)
    assert (result.wrong, result.figures, result.ratio) == ("ours: off by one", (), None)


def test_what_does_not_fit_is_left_out() -> None:
    case = Case("group", "large", lambda device: pytest.fail("was built"), num_bytes=51)
    (result,) = measure([case], "cpu", FakeClock(), 3, 100)
    assert "do not fit" in result.left_out


@pytest.mark.parametrize("group", GROUPS)
def test_every_case_has_a_name_of_its_own(group: str) -> None:
    found = list(cases(group))
    assert len({case.name for case in found}) == len(found) > 2
    assert {case.group for case in found} == {group}


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailable, match=r"GPU|CPU build|NVRTC|CuPy"):
        next(run("decode", 1))


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS)
def test_the_first_case_of_each_group_is_timed(group: str) -> None:
    (result,) = measure(list(cases(group))[:1], "cuda", GraphClock(), 2, 1e10)
    assert not result.wrong
    assert result.ours is not None
    assert 0.5 < result.ours.us < 1000
