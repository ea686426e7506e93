"""Products with weights in rows against float64: every format, few rows and many, whatever becomes of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from allspan.kernels.cuda.linear import cublas, quantise_input
from allspan.kernels.cuda.linear import packed_linear as linear
from allspan.kernels.cuda.linear.gemm import skinny, skinny_shared, skinny_sm90
from allspan.kernels.cuda.linear.packed_embedding import packed_embedding
from allspan.kernels.packed_spec import ROW_FORMATS, PackedSpec
from allspan.kernels.reference.packed_linear import packed_linear, unpack
from support.linear_cases import Case, check_add, check_gated, check_odd_sizes, check_store, spec_of, weight_of
from support.packed_cases import random_weight

FORMATS_AND_GROUPS = [
    ("bf16", 0),
    ("f16", 0),
    ("fp8", 0),
    ("fp8_block", 0),
    ("channel8", 0),
    ("channel4", 0),
    ("group8", 32),
    ("group8", 512),
    ("group4", 32),
    ("group4", 128),
    ("q8_0", 0),
    ("q4_0", 0),
    ("mxfp4", 0),
]


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("bf16", 0),
        ("fp8", 0),
        ("fp8_block", 0),
        ("channel8", 0),
        ("group4", 32),
        ("group8", 512),
        ("q8_0", 0),
        ("mxfp4", 0),
    ],
)
def test_odd_sizes_agree_with_float64(name: str, group: int, device: str) -> None:
    check_odd_sizes(name, group, device)


def test_odd_sizes_of_more_rows_agree_with_float64(device: str) -> None:
    check_odd_sizes("group4", 32, device, 11)
    check_odd_sizes("q8_0", 0, device, 11)
    check_odd_sizes("mxfp4", 0, device, 11)


@pytest.mark.parametrize(
    ("name", "group", "rows"), [("f16", 0, 3), ("group4", 32, 2), ("fp8", 0, 3), ("group4", 32, 11), ("group8", 32, 70)]
)
def test_odd_sizes_in_half_precision_agree_with_float64(name: str, group: int, rows: int, device: str) -> None:
    check_odd_sizes(name, group, device, rows, is_half=True)


@pytest.mark.parametrize(("check", "rows"), [(check_store, 1), (check_gated, 6), (check_add, 9), (check_gated, 33)])
def test_few_rows_agree_with_float64(check: Callable[[Case], None], rows: int, device: str) -> None:
    check(Case(spec_of("group4", 64, (19, 19), 200), rows, device))


def test_all_weights_of_a_small_product_may_be_on_their_way_at_once(device: str) -> None:
    for rows in (1, 8):  # of several spans a warp on a GPU of few multiprocessors, such as the emulated one
        check_add(Case(spec_of("bf16", 0, (23,), 2816), rows, device))
        check_gated(Case(spec_of("bf16", 0, (19, 19), 2048), rows, device))


@pytest.mark.parametrize(("name", "group"), [("channel8", 0), ("group4", 32)])
def test_x_that_exceeds_shared_memory_is_read_in_place_or_with_the_weight(
    name: str, group: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(spec_of(name, group, (170, 170), 300), 5, device)
    forms = [form for form in skinny._forms(case.spec, 2) if not form.whole]
    for some in (forms, ()):
        monkeypatch.setattr(skinny, "_forms", lambda *_, some=some: some)
        check_gated(case)


@pytest.mark.parametrize("name", ["channel8", "bf16"])
def test_a_few_rows_of_which_one_is_not_finite_say_so_alone(name: str, device: str) -> None:
    for value in (math.inf, math.nan):
        case = Case(spec_of(name, 0, (24,), 200), 3, device)
        case.arguments[0][1, 5] = value
        out = case.out(torch.float32, 24)
        linear.packed_linear(*case.arguments, out)
        assert out[:, 1:25].isfinite().all(1).tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("name", "group", "parts", "inputs", "rows"),
    [
        ("group4", 32, (300,), 700, 16),  # blocks have an end of one tile and the beginning of the next
        ("group4", 32, (1300,), 300, 40),  # and tiles of their own before
        ("channel4", 0, (700,), 300, 20),
        ("channel8", 0, (70, 70), 330, 33),
        ("group8", 512, (70, 70), 700, 12),
        ("fp8", 0, (140,), 200, 9),
        ("fp8_block", 0, (140,), 300, 9),
    ],
)
def test_tiles_that_blocks_share_agree_with_float64(
    name: str, group: int, parts: tuple[int, ...], inputs: int, rows: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skinny_shared, "_LAUNCH_BYTES", -(1 << 40))
    case = Case(spec_of(name, group, parts, inputs), rows, device)
    (check_gated if len(parts) == 2 else check_add)(case)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes", [((3, 3), 8), ((19, 19), 200), ((640, 640), 1024), ((4736, 4736), 896), ((80, 80), 8192)]
)
@pytest.mark.parametrize(("name", "group"), FORMATS_AND_GROUPS)
def test_every_format_agrees_with_float64(
    name: str, group: int, sizes: tuple[tuple[int, int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles are shared or not, as it pays, or always."""
    for rows in (3, 13) if ROW_FORMATS[name].is_e4m3 else (3, 13, 29, 61):
        check_odd_sizes(name, group, "cuda", rows)
        if name != "bf16":
            check_odd_sizes(name, group, "cuda", rows, is_half=True)
    parts, inputs = sizes
    checks = [check_store, check_gated, check_add]
    for i, rows in enumerate((1, 9, 20, 33, 64, 130, 2, 5, 8, 9, 16, 17, 25, 32, 33, 56, 64, 65)):
        has_bias = i % 2 == 0
        if i == 6:
            monkeypatch.setattr(skinny_shared, "_LAUNCH_BYTES", -(1 << 40))
        if ROW_FORMATS[name].is_e4m3 and rows > 16:
            continue  # x becomes e4m3, too: test_layers_of_real_sizes_agree_with_float64
        for is_half in (False, True) if name != "bf16" else (False,):
            case = Case(spec_of(name, group, parts, inputs), rows, "cuda", has_bias, i // 2 % 2, is_half)
            checks[i % 3](case)


@pytest.mark.parametrize(("check", "has_bias"), [(check_store, False), (check_add, False), (check_gated, True)])
def test_many_rows_agree_with_float64(check: Callable[[Case], None], has_bias: bool, device: str) -> None:
    """Aligned and not."""
    check(Case(spec_of("bf16", 0, (24, 24), 64), 70, device, has_bias, column=0))
    check(Case(spec_of("group8", 32, (19, 19), 90, 5), 70, device, has_bias))
    check(Case(spec_of("f16", 0, (24, 24), 64), 70, device, has_bias, column=0))


@pytest.mark.parametrize(("check", "is_half"), [(check_add, False), (check_gated, False), (check_gated, True)])
def test_rows_of_eight_bits_agree_with_float64(check: Callable[[Case], None], is_half: bool, device: str) -> None:
    """As far as a scale for each of them lets them."""
    spec = replace(spec_of("channel8", 0, (24, 24), 90), activation="a8")
    case = Case(spec, 70, device, column=0, is_half=is_half)
    case.slack = 4.0 if is_half else 1.0  # of a code that is rounded the other way
    x = case.arguments[0].cpu().double()
    most = x.abs().amax(1, keepdim=True)
    seen = ((x / most * 127).round() * most / 127).to(device)
    case.product = case.with_bias(seen @ weight_of(spec, device)[1].T)
    check(case)


def test_rows_of_eight_bits_with_a_scale_each_are_those_of_the_reference(device: str) -> None:
    """Of more than 128 inputs, these have a scale for each 128 there."""
    case = Case(replace(spec_of("channel8", 0, (24, 24), 120), activation="a8"), 70, device)
    x, weight, bias, spec, column = case.arguments
    expected, out = torch.full((70, 50), math.nan), case.out(torch.float32, 48)
    packed_linear(x.cpu(), weight.cpu(), bias.cpu(), spec, column, expected)
    linear.packed_linear(*case.arguments, out)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.fixture
def hopper(device: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device, emulated as one with Hopper's own units."""
    if device == "cpu":
        driver = request.getfixturevalue("emulator")
        monkeypatch.setattr(driver, "_gpu", replace(driver.gpu(torch.device("cpu")), capability=(9, 0)))
    return device


def seen_as_e4m3(x: Tensor, group: int) -> Tensor:
    """float64, with a scale for each `group` inputs of a row."""
    grouped = functional.pad(x.float(), (0, -x.shape[1] % group)).view(len(x), -1, group)
    most = grouped.abs().amax(2, keepdim=True).clamp(min=1e-30)
    codes = (grouped * torch.full_like(most, 448.0).div(most)).to(torch.float8_e4m3fn)  # a number / most rounds twice
    return (codes.double() * most.double() / 448).flatten(1)[:, : x.shape[1]]


def check_e4m3(check: Callable[[Case], None], spec: PackedSpec, rows: int, device: str, is_half: bool = False) -> None:
    """As far as x in 8 bits lets them; tensor cores keep 14 bits of the sums of such products, bfloat16 8."""
    case = Case(spec, rows, device, column=0, is_half=is_half)
    case.slack = 3.0 if device == "cuda" else 1.0
    group = spec.block if spec.kind.scale_bytes else spec.inputs
    before = functional.pad(case.arguments[0].cpu(), (spec.k_offset, 0))
    seen = seen_as_e4m3(before, group)[:, spec.k_offset :].to(device)
    case.product = case.with_bias(seen @ weight_of(spec, device)[1].T)
    check(case)


@pytest.mark.parametrize(
    ("check", "held", "is_half"), [(check_add, 20480, False), (check_gated, 32, False), (check_gated, 20480, True)]
)
def test_rows_of_e4m3_agree_with_float64(
    check: Callable[[Case], None], held: int, is_half: bool, hopper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a block cannot keep a row."""
    monkeypatch.setattr(quantise_input, "_HELD_ROW", held)
    check_e4m3(check, spec_of("fp8", 0, (24, 24), 90), 70, hopper, is_half)


@pytest.mark.parametrize("check", [check_add, check_gated])
def test_rows_of_e4m3_in_blocks_agree_with_float64(check: Callable[[Case], None], hopper: str) -> None:
    """Their last block is not full; a rank's inputs may begin within one."""
    check_e4m3(check, spec_of("fp8_block", 0, (24, 24), 230), 67, hopper, is_half=check is check_gated)
    check_e4m3(check, spec_of("fp8_block", 0, (24, 24), 101, k_offset=37 + 64), 67, hopper)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8", "fp8_block"])
@pytest.mark.parametrize(("outputs", "inputs"), [(4608, 3584), (37888, 3584), (3584, 18944), (512, 2048)])
def test_layers_of_real_sizes_agree_with_float64(name: str, outputs: int, inputs: int) -> None:
    for rows in (1, 16, 64, 65, 500):
        spec = spec_of(name, 0, (outputs // 2, outputs // 2), inputs)
        if rows > 16:
            for is_half in (False, True):
                check_e4m3(check_add, spec, rows, "cuda", is_half)
        else:
            check_add(Case(spec, rows, "cuda"))


def test_blocks_that_cublas_does_not_multiply_become_bfloat16(device: str) -> None:
    """On other GPUs than Hopper (as emulated), and of layers whose features do not fill its tiles."""
    check_add(Case(spec_of("fp8_block", 0, (19,), 230), 66, device))


@pytest.mark.parametrize(
    ("spec", "rows", "splits", "is_half"),
    [
        (spec_of("channel4", 0, (90,), 800), 64, 3, False),
        (spec_of("group4", 32, (150,), 700), 40, 2, False),
        (spec_of("group4", 128, (70, 70), 200), 33, 1, False),
        (spec_of("group4", 32, (150,), 700), 40, 2, True),
    ],
)
def test_tiles_of_warpgroups_agree_with_float64(
    spec: PackedSpec, rows: int, splits: int, is_half: bool, hopper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all inputs, or in stretches that are added up."""
    cut = skinny_sm90.Cut(2, splits, -(-spec.features // 128))
    monkeypatch.setattr(skinny_sm90, "cut_of", lambda *_: cut)
    case = Case(spec, rows, hopper, is_half=is_half)
    (check_gated if len(spec.parts) == 2 else check_add)(case)


def test_wide_weights_agree_with_float64(device: str) -> None:
    """Whose blocks have 32 features, and their warps many k tiles."""
    check_add(Case(spec_of("group4", 32, (330,), 700), 2, device))
    check_add(Case(spec_of("bf16", 0, (20,), 2100), 2, device))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bf16", "channel8", "fp8"])
@pytest.mark.parametrize("rows", [1, 16, 40])
def test_a_captured_chain_computes_with_what_the_one_ahead_has_written(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each product reads what the one before wrote, though its blocks begin before that one ends."""
    monkeypatch.setattr(skinny_shared, "_LAUNCH_BYTES", -(1 << 40))
    gated, down = spec_of(name, 0, (1500, 1500), 1000), spec_of(name, 0, (1000,), 1500)
    weights = [random_weight(spec).cuda() for spec in (gated, down)]
    x, hidden = (torch.zeros(rows, width, device="cuda", dtype=torch.bfloat16) for width in (1000, 1500))
    out = torch.zeros(rows, 1000, device="cuda")

    def chain(pause: Callable[[], None]) -> None:
        out.zero_()
        for _ in range(20):
            linear.packed_gated_linear(x, weights[0], None, gated, 0, "silu", hidden)
            pause()
            linear.packed_linear_add(hidden, weights[1], None, down, 0, out)
            pause()
            x.copy_(functional.layer_norm(out, (1000,)))  # or sums grow from turn to turn until they are infinite

    chain(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(lambda: None)
    found = []
    for run in (lambda: chain(torch.cuda.synchronize), graph.replay):
        x.copy_(torch.randn(rows, 1000, generator=torch.Generator().manual_seed(1)))
        run()
        found.append(out.clone())
    assert found[0].isfinite().all()
    assert torch.equal(*found)


def check_embedding(name: str, group: int, device: str) -> None:
    spec = spec_of(name, group, (20,), 77, 13 if ROW_FORMATS[name].scale_bytes else 0)
    weight = random_weight(spec)
    ids = torch.tensor([4, 30, 23, 24, 3], dtype=torch.int32)
    values = unpack(weight, spec)
    expected = torch.stack([values[i - 4] if 4 <= i < 24 else torch.zeros(77) for i in ids.tolist()])
    out = torch.full((5, 77), math.nan, device=device)
    packed_embedding(ids.to(device), weight.to(device), spec, 4, out)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "group"), [("bf16", 0), ("group4", 32)])
def test_embeddings_are_the_rows_that_are_there(name: str, group: int, device: str) -> None:
    check_embedding(name, group, device)


def test_embeddings_of_another_type_are_refused(device: str) -> None:
    for name, dtype in (("bf16", torch.float16), ("f16", torch.bfloat16), ("group4", torch.float64)):
        spec = spec_of(name, 32 if name == "group4" else 0, (20,), 64)
        ids, out = torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(1, 64, dtype=dtype, device=device)
        with pytest.raises(ValueError, match=f"out: {dtype} is none of .* which {name} rows become"):
            packed_embedding(ids, random_weight(spec).to(device), spec, 0, out)


@pytest.mark.gpu
def test_embeddings_of_every_format() -> None:
    for name, group in FORMATS_AND_GROUPS:
        check_embedding(name, group, "cuda")


def test_a_rank_without_inputs_or_features_gives_its_bias_or_nothing(device: str) -> None:
    for rows in (2, 70):
        check_add(Case(spec_of("channel8", 0, (5,), 0), rows, device))
    check_add(Case(spec_of("bf16", 0, (0,), 64), 2, device))


def test_a_row_that_is_not_finite_says_so_alone(device: str) -> None:
    case = Case(replace(spec_of("channel8", 0, (24,), 64), activation="a8"), 70, device)
    case.arguments[0][3, 5] = math.inf
    out = case.out(torch.float32, 24)
    linear.packed_linear(*case.arguments, out)
    finite = out[:, 1:25].isfinite().all(1).tolist()
    assert [row for row in range(70) if not finite[row]] == [3]


def test_a_bias_that_is_filled_again_counts_from_then_on(device: str) -> None:
    case = Case(spec_of("bf16", 0, (16,), 64), 70, device)
    bias = case.arguments[2]
    assert bias is not None
    for more in (0, 8):
        bias += more
        case.product += more
        out = case.out(torch.bfloat16, 16)
        linear.packed_linear(*case.arguments, out)
        case.check(out, case.product)


def test_a_bias_is_rounded_in_one_place_for_each_type(device: str) -> None:
    """Captured graphs have its address."""
    bias = torch.zeros(8, device=device)
    first = cublas._rounded(bias, torch.bfloat16)
    assert cublas._rounded(bias, torch.float16).dtype == torch.float16
    bias += 1
    assert cublas._rounded(bias, torch.bfloat16) is first
    assert first.tolist() == [1.0] * 8
    with torch.inference_mode():
        unwatched = torch.zeros(8, device=device)
        for value in (0.0, 1.0):
            assert cublas._rounded(unwatched.fill_(value), torch.bfloat16).tolist() == [value] * 8


def test_what_does_not_fit_is_refused(device: str) -> None:
    case = Case(spec_of("bf16", 0, (16,), 64), 2, device)
    x, weight, bias, spec, _ = case.arguments
    out = case.out(torch.float32, 16)
    wrongs = {
        "x: torch.float32": (x.float(), weight, bias, spec, 1, out),
        "x: torch.float16 does not meet weights in bf16": (x.half(), weight, bias, spec, 1, out),
        "x: .* is not bfloat16": (x[:, :32].contiguous(), weight, bias, spec, 1, out),
        "weight: torch.uint8": (x, weight[:8], bias, spec, 1, out),
        "weight: lies in panels": (
            x,
            torch.zeros(1, 2048, dtype=torch.uint8),
            bias,
            replace(spec, memory="panels"),
            1,
            out,
        ),
        "bias: ": (x, weight, bias[:3], spec, 1, out),
        "out: .* does not take 2 rows of 19": (x, weight, bias, spec, 3, out),
    }
    for message, arguments in wrongs.items():
        with pytest.raises(ValueError, match=message):
            linear.packed_linear(*arguments)
    with pytest.raises(ValueError, match="two of one size"):
        linear.packed_gated_linear(x, weight, bias, spec, 1, "silu", out)
    with pytest.raises(ValueError, match=r"out: torch\.bfloat16"):
        linear.packed_linear_add(x, weight, bias, spec, 1, out.bfloat16())
