"""Hopper's products of many rows against float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from allspan.kernels.adapter_ops import AdapterWeights
from allspan.kernels.cuda.adapters import of_tiles
from allspan.kernels.cuda.adapters.adapted_linear import adapted_linear
from allspan.kernels.cuda.adapters.of_tiles import tile_adapters
from allspan.kernels.cuda.adapters.route import route_adapters
from allspan.kernels.cuda.jit import modules
from allspan.kernels.cuda.linear import packed_linear as linear
from allspan.kernels.cuda.linear.call import (
    ADD,
    GATED,
    GATED_CLAMPED,
    GATED_GELU_TANH,
    GATED_SILU,
    STORE,
    LinearCall,
    Output,
)
from allspan.kernels.cuda.linear.dispatch import choose
from allspan.kernels.cuda.linear.gemm import gemm_sm90 as module
from allspan.kernels.cuda.linear.gemm.gemm_sm90 import Scales, gemm_sm90
from allspan.kernels.errors import BackendUnavailable
from allspan.kernels.fused_ops import AdapterMatrices, BaseProduct
from allspan.kernels.packed_spec import PackedSpec
from allspan.kernels.reference.packed_linear import unpack
from support import kernel_oracle
from support.adapter_cases import added, empty_routing, low_of, of_rows, weights_of
from support.emulator.driver import EmulatorDriver
from support.packed_cases import random_weight

BF16, F16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


@pytest.fixture(scope="module")
def emulator() -> EmulatorDriver:
    return EmulatorDriver(multiprocessors=2, capability=(9, 0))


@pytest.fixture(autouse=True)
def hopper(request: pytest.FixtureRequest) -> None:
    """Its instructions are no other GPU's."""
    is_real = request.node.get_closest_marker("gpu") is not None
    if is_real and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no GPU of compute capability 9.0")


def check(
    kind: torch.dtype,
    epilogue: int,
    sizes: tuple[int, int, int],
    has_bias: bool,
    device: str,
    band: int = 2048,
    of: torch.dtype = BF16,
) -> None:
    """`kind`: of x and matrix; `of`: of out. sizes: rows, features, depth. What lies beside the product's columns stays
    as it was. Of sums of e4m3, tensor cores have some 14 bits."""
    rows, features, depth = sizes
    generator = torch.Generator(device).manual_seed(rows + features)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    x, matrix = random(rows, depth).to(kind), random(features, depth).to(kind)
    scales, bias = None, random(features) if has_bias else None
    product = x.double() @ matrix.double().T
    if kind == E4M3:
        scales = Scales(random(rows) % 1 + 0.5, (random(features, 2) % 1 + 0.5) / depth**0.5)
        product *= scales.rows.double()[:, None] * scales.qparams[:, 0].double()
    elif epilogue in GATED.values():
        matrix, product = (matrix.double() / depth**0.5).to(kind), product / depth**0.5
        product = x.double() @ matrix.double().T
    product += 0 if bias is None else bias
    if epilogue in GATED.values():
        gate_up, product = product, product.new_empty(rows, features // 2)
        kernel_oracle.gated_mul(gate_up, next(each for each in GATED if GATED[each] == epilogue), product)
    outputs = product.shape[1]
    all_of = torch.full(
        (rows + 1, -(-outputs // 8) * 8 + 16), 0.5, dtype=torch.float32 if epilogue == ADD else of, device=device
    )
    out = all_of[:rows, 8 : 8 + outputs]
    if epilogue == ADD:
        product += out
    else:
        out.fill_(math.nan)
    gemm_sm90(x, matrix, scales, bias, out, epilogue, band)
    tolerance, slack = 2e-3 if epilogue == ADD else 1e-2, 1.0
    if kind == E4M3 and device == "cuda":
        tolerance, slack = 2e-2, 50.0 if epilogue in GATED.values() else 15.0
    atol = slack * tolerance * product.abs().mean().item()
    torch.testing.assert_close(out.double(), product, rtol=tolerance, atol=atol)
    out.fill_(0.5)
    assert (all_of == 0.5).all()


@pytest.mark.parametrize(
    ("kind", "epilogue", "sizes", "has_bias"),
    [
        (BF16, STORE, (200, 328, 328), True),
        (BF16, ADD, (130, 264, 72), False),
        (BF16, GATED_SILU, (300, 2 * 136, 200), False),
        (E4M3, STORE, (70, 264, 144), True),
        (E4M3, ADD, (257, 300, 704), False),
        (E4M3, GATED_GELU_TANH, (129, 2 * 136, 272), True),
        (F16, GATED_GELU_TANH, (70, 2 * 136, 200), False),
        (BF16, GATED_CLAMPED, (70, 2 * 136, 200), False),
    ],
)
def test_small_products_agree_with_float64(
    kind: torch.dtype, epilogue: int, sizes: tuple[int, int, int], has_bias: bool, device: str
) -> None:
    """Tiles that are cut off at either side; blocks with several; bands of one tile."""
    check(kind, epilogue, sizes, has_bias, device, 256, F16 if kind is F16 else BF16)


def test_products_of_e4m3_in_half_precision_agree_with_float64(device: str) -> None:
    check(E4M3, STORE, (70, 264, 144), True, device, 256, F16)


@pytest.mark.gpu
@pytest.mark.parametrize("epilogue", [STORE, ADD, GATED_SILU])
@pytest.mark.parametrize(("kind", "of"), [(BF16, BF16), (F16, F16), (E4M3, BF16), (E4M3, F16)])
def test_products_of_every_size_agree_with_float64(kind: torch.dtype, of: torch.dtype, epilogue: int) -> None:
    shapes = ((16, 16), (272, 48), (4608, 3584), (3584, 896), (9472, 512), (272, 18944))
    for i, rows in enumerate((1, 64, 127, 129, 256, 1000, 4097, 8192)):
        for j, (features, depth) in enumerate(shapes):
            check(kind, epilogue, (rows, features, depth), (i + j) % 2 == 0, "cuda", 128 << i % 7, of)


@pytest.mark.gpu
def test_outputs_of_more_than_two_billion_elements() -> None:
    x, matrix = (torch.randn(n, 64, device="cuda").bfloat16() for n in (120_000, 18_944))
    out = torch.full((120_000, 18_944), math.nan, dtype=BF16, device="cuda")
    gemm_sm90(x, matrix, None, None, out, STORE)
    for rows in (slice(0, 300), slice(-300, None)):
        torch.testing.assert_close(out[rows].double(), x[rows].double() @ matrix.double().T, rtol=1e-2, atol=1e-2)
    assert not out.isnan().any()


def products(kind: str) -> list[tuple[Callable[..., None], PackedSpec, torch.dtype]]:
    activation = {"bf16": "bf16", "fp8": "e4m3"}[kind]
    spec = PackedSpec(kind, activation, (72, 72), 136, memory="rows")
    return [
        (linear.packed_linear, spec, BF16),
        (linear.packed_linear_add, spec, torch.float32),
        (linear.packed_gated_linear, spec, BF16),
    ]


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_linear_ops_take_it_where_it_pays(kind: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It and not another kernel; and what another kernel would have computed."""
    taken = []

    def noted(*arguments: object, **more: object) -> None:
        taken.append(arguments)
        gemm_sm90(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "gemm_sm90", noted)
    for op, spec, dtype in products(kind):
        x = torch.randn(70, spec.inputs, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
        weight, bias = random_weight(spec).to(device), torch.randn(spec.features, device=device)
        width = spec.parts[0] if op is linear.packed_gated_linear else spec.features
        found = []
        for does in (False, True):
            monkeypatch.setattr(module, "pays", lambda *_, does=does: does)
            out = torch.full((70, width + 8), 0.5, dtype=dtype, device=device)
            op(x, weight, bias, spec, 8, *(("silu",) if op is linear.packed_gated_linear else ()), out)
            found.append(out)
        torch.testing.assert_close(*found, rtol=2e-2, atol=5e-2)
        product = x.double().cpu() @ unpack(weight.cpu(), spec, torch.float64).T + bias.cpu()
        if op is linear.packed_linear:
            torch.testing.assert_close(found[1][:, 8:].double().cpu(), product, rtol=5e-2, atol=0.6)
    assert len(taken) == 3


def test_it_pays_where_it_saves_a_pass_and_fills_the_gpu(device: str) -> None:
    x = torch.zeros(2048, 512, dtype=BF16, device=device)
    weights = {kind: torch.zeros(8192, 1024, dtype=torch.uint8, device=device) for kind in ("bf16", "fp8")}
    out = torch.zeros(2048, 4104, dtype=BF16, device=device)

    def chosen(features: int, epilogue: int, rows: int = 2048, column: int = 8, kind: str = "bf16") -> str:
        parts = (features // 2, features // 2) if epilogue == GATED_SILU else (features,)
        spec = PackedSpec(kind, {"bf16": "bf16", "fp8": "e4m3"}[kind], parts, 512, memory="rows")
        output = Output(out[:rows] if epilogue != ADD else out[:rows].float(), column, epilogue)
        return choose(LinearCall(x[:rows], weights[kind], None, spec, output)).name

    assert chosen(4096, GATED_SILU) == "gemm_sm90"
    assert chosen(2048, STORE) == "cublas"  # which has no pass behind it
    assert chosen(2048, STORE, kind="fp8") == "gemm_sm90_e4m3"
    assert chosen(4096, GATED_SILU, rows=64) == "cublas"
    assert chosen(16, GATED_SILU, rows=257) == "cublas" or device == "cpu"
    assert chosen(4096, GATED_SILU, column=4) == "cublas"  # not aligned
    assert chosen(4088, GATED_SILU) == "cublas"  # what copies out would write past its columns
    unaligned = torch.zeros(2048 * 512 + 1, dtype=BF16, device=device)[1:].view(2048, 512)
    spec = PackedSpec("bf16", "bf16", (2048, 2048), 512, memory="rows")
    assert choose(LinearCall(unaligned, weights["bf16"], None, spec, Output(out, 8, GATED_SILU))).name == "cublas"
    assert choose(LinearCall(x, weights["bf16"], None, spec, Output(out.float(), 8, GATED_SILU))).name == "cublas"


@pytest.mark.gpu
def test_a_graph_replays_with_other_inputs() -> None:
    """A chain: each product reads what the one before wrote, though its blocks begin before that one ends."""
    x, residual = torch.zeros(600, 512, device="cuda", dtype=BF16), torch.zeros(600, 512, device="cuda")
    weights = [torch.randn(n, k, device="cuda").div(k**0.5).bfloat16() for n, k in ((2 * 1032, 512), (512, 1032))]
    hidden = torch.zeros(600, 1032, device="cuda", dtype=BF16)

    def chain(pause: Callable[[], None]) -> None:
        residual.zero_()
        for _ in range(10):
            gemm_sm90(x, weights[0], None, None, hidden, GATED_SILU)
            pause()
            gemm_sm90(hidden, weights[1], None, None, residual, ADD)
            pause()
            x.copy_(residual)

    chain(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(lambda: None)
    found = []
    for run in (lambda: chain(torch.cuda.synchronize), graph.replay):
        x.copy_(torch.randn(600, 512, generator=torch.Generator().manual_seed(1)))
        run()
        found.append(residual.clone())
    assert found[0].isfinite().all()
    assert found[0].abs().sum() > 0
    assert torch.equal(*found)


def test_what_does_not_fit_is_refused(device: str) -> None:
    x, matrix = torch.zeros(70, 64, dtype=BF16, device=device), torch.zeros(32, 64, dtype=BF16, device=device)
    out, scales = torch.zeros(70, 32, dtype=BF16, device=device), Scales(torch.zeros(70), torch.zeros(32, 2))
    wrongs = {
        "x: .* are not torch.bfloat16": (x, matrix[:, :32], None, None, out, STORE),
        "x: .* are not torch.float8": (x, matrix, scales, None, out, STORE),
        "out: .* is not torch.float32": (x, matrix, None, None, out, ADD),
        r"out: .* is not torch.bfloat16 \[70, 16\]": (x, matrix, None, None, out, GATED_SILU),
        "bias: ": (x, matrix, None, torch.zeros(31, device=device), out, STORE),
        "scales: ": (x.to(E4M3), matrix[:24].to(E4M3), scales, None, out[:, :24], STORE),
        "out: rows of 30 elements": (x, matrix[:30], None, None, out[:, :30], STORE),
        "both must be multiples of 16": (x[:, 1:33], matrix[:, 1:33], None, None, out, STORE),
    }
    for message, arguments in wrongs.items():
        with pytest.raises(ValueError, match=message):
            gemm_sm90(*arguments)


def test_other_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "driver", EmulatorDriver)
    x = torch.zeros(70, 64, dtype=BF16)
    with pytest.raises(BackendUnavailable, match=r"compute capability 9\.0, not 8\.0"):
        gemm_sm90(x, x, None, None, torch.zeros(70, 70, dtype=BF16), STORE)


@pytest.mark.parametrize(
    ("rows", "outputs", "rank", "epilogue", "kind"),
    [
        (300, 136, 16, GATED_SILU, BF16),
        (130, 200, 40, GATED_GELU_TANH, BF16),
        (70, 136, 8, GATED_CLAMPED, BF16),
        (129, 136, 17, GATED_SILU, F16),
    ],
)
def test_adapters_are_further_steps_of_a_gated_product(
    rows: int, outputs: int, rank: int, epilogue: int, kind: torch.dtype, device: str
) -> None:
    """Of several parts of the inputs; adapters of lower ranks, with other numbers behind them; rows without one have
    the bits of the product alone."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 200, generator=generator).to(kind)
    matrix = (torch.randn(2 * outputs, 200, generator=generator) / 200**0.5).to(kind)
    weights = weights_of((outputs, outputs), rank, kind)
    weights.panels.nan_to_num_(7.0)
    adapters = of_rows(rows, rows)
    adapters[:64] = adapters[:64].clamp(max=0)
    low = low_of(rows, weights, adapters)
    parts = torch.rand(3, rows, 2 * rank, generator=generator)
    sums = low * parts / parts.sum(0)
    both = added(sums.double().sum(0), weights, adapters, x.double() @ matrix.double().T)
    expected = both.new_empty(rows, outputs)
    kernel_oracle.gated_mul(both, next(each for each in GATED if GATED[each] == epilogue), expected)
    moved = AdapterWeights(*(each.to(device) for each in weights))
    routing = empty_routing(rows, device)
    route_adapters(adapters.to(device), None, routing)
    given = sums.to(device)
    out, alone = (torch.full((rows, outputs), math.nan, dtype=kind, device=device) for _ in range(2))
    gemm_sm90(x.to(device), matrix.to(device), None, None, alone, epilogue)
    extra = tile_adapters(given, moved, routing)
    gemm_sm90(x.to(device), matrix.to(device), None, None, out, epilogue, adapters=extra)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=2e-2, atol=5e-2 * float(expected.abs().mean()))
    assert torch.equal(out[adapters < 0], alone[adapters < 0])


def test_a_layer_of_many_rows_has_its_adapters_within_the_product(
    device: str, emulator: EmulatorDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More adapters than it takes have a pass behind it, with the same outcome."""
    rows, outputs, rank, inputs = 300, 136, 16, 72
    spec, a_spec = (PackedSpec("bf16", "bf16", parts, inputs, memory="rows") for parts in ((136, 136), (2 * rank,)))
    generator = torch.Generator().manual_seed(2)
    a = torch.randn(4, *a_spec.shape[:-1], a_spec.shape[-1] // 2, generator=generator).to(BF16).view(torch.uint8)
    second = AdapterWeights(*(each.to(device) for each in weights_of((outputs, outputs), rank, BF16)))
    second.panels.nan_to_num_(7.0)
    given = AdapterMatrices((a.to(device)), a_spec, *second)
    base = BaseProduct(random_weight(spec, 3).to(device), None, spec, "silu")
    routing = empty_routing(rows, device)
    route_adapters(of_rows(rows, 1).to(device), None, routing)
    x = torch.randn(rows, inputs, generator=generator).to(BF16).to(device)
    room = torch.zeros(rows, 2 * outputs, dtype=BF16, device=device)
    within, behind = (torch.full((rows, outputs), math.nan, dtype=BF16, device=device) for _ in range(2))
    emulator.launched.clear()
    adapted_linear(x, given, routing, base, room, within)
    launched = [(kernel.name, ("ADAPTED", 1) in kernel.defines) for kernel in emulator.launched]
    assert launched == ([] if device == "cuda" else [("shrink", False), ("pack_sums", False), ("gemm_sm90", True)])
    monkeypatch.setattr(of_tiles, "MOST_PLACES", 3)
    adapted_linear(x, given, routing, base, room, behind)
    torch.testing.assert_close(within.float(), behind.float(), rtol=0.02, atol=0.02 * float(behind.float().abs().max()))
