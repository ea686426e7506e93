"""Wrong arguments of the compiled ops: refused by name before a kernel sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from allspan.kernels.table import backends, op_set
from support.kernel_cases import attention, ints, linear, poison, randn

pytestmark = pytest.mark.skipif(backends() == ("reference",), reason="the compiled kernels are not built")


def attention_with(**changes: Any) -> list[Any]:
    arguments = attention(16, 16, [(2, 20), (1, 3)], [0, 1])
    arguments[6] = replace(arguments[6], **changes)
    return arguments


def with_sinks(sinks: torch.Tensor) -> list[Any]:
    arguments = attention(16, 16, [(2, 20), (1, 3)], [0, 1])
    arguments[5] = sinks
    return arguments


def linear_with(position: int, value: Any) -> list[Any]:
    arguments = linear(2, 8, 3, bias=True)
    arguments[position] = value
    return arguments


def quantised(width: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    return torch.zeros(2, 1, 4, width, dtype=dtype)


def append_with(**changes: Any) -> list[Any]:
    arguments = {
        "k": randn(1, 1, 8),
        "v": randn(1, 1, 8),
        "k_cache": randn(2, 1, 4, 8),
        "v_cache": randn(2, 1, 4, 8),
        "k_scales": None,
        "v_scales": None,
        "slots": ints([0]),
    }
    return list((arguments | changes).values())


REFUSALS: list[tuple[str, Callable[[], list[Any]], type[Exception], str]] = [
    ("linear", lambda: linear_with(0, randn(2, 9)), ValueError, r"linear: weight has shape \[3, 8\], not \[any, 9\]"),
    ("linear", lambda: linear_with(0, randn(8)), ValueError, r"linear: x has shape \[8\], not \[any, any\]"),
    ("linear", lambda: linear_with(0, [1.0]), TypeError, "linear: x is a list, not a torch tensor"),
    ("linear", lambda: linear_with(0, randn(2, 8).half()), TypeError, "linear: x is torch.float16, not torch.float32"),
    ("linear", lambda: linear_with(0, randn(8, 2).T), TypeError, "linear: x is not contiguous"),
    (
        "linear",
        lambda: linear_with(1, randn(3, 8).double()),
        TypeError,
        "weight is torch.float64, not",
    ),
    ("linear", lambda: linear_with(2, randn(4)), ValueError, r"linear: bias has shape \[4\], not \[3\]"),
    ("linear", lambda: linear_with(3, poison(2, 4)), ValueError, r"linear: out has shape \[2, 4\], not \[2, 3\]"),
    ("rms_norm", lambda: [randn(2, 8), randn(7), 1e-5, poison(2, 8)], ValueError, "rms_norm: weight has shape"),
    (
        "gated_mul",
        lambda: [randn(2, 7), "silu", poison(2, 4)],
        ValueError,
        r"gate_up has shape \[2, 7\], not \[2, 8\]",
    ),
    ("gated_mul", lambda: [randn(2, 8), "relu", poison(2, 4)], ValueError, "activation must be silu, gelu_tanh or"),
    ("soft_cap", lambda: [randn(2, 8), 0.0], ValueError, "soft_cap: cap must be above 0"),
    ("gather_rows", lambda: [randn(2, 8), ints([0, 2]), poison(2, 8)], ValueError, r"rows\[1\] is 2, not in \[0, 2\)"),
    ("gather_rows", lambda: [randn(2, 8), torch.tensor([0]), poison(1, 8)], TypeError, "rows is torch.int64, not"),
    ("put_columns", lambda: [randn(2, 3), 6, poison(2, 8)], ValueError, "out has fewer columns than x is to be put in"),
    ("put_columns", lambda: [randn(2, 3), -1, poison(2, 8)], ValueError, "out has fewer columns than x is to be put"),
    ("put_columns", lambda: [randn(2, 3), 2**63 - 1, poison(2, 8)], ValueError, "out has fewer columns than x is to"),
    (
        "rotary",
        lambda: [randn(1, 1, 8), randn(1, 1, 8), ints([4]), randn(4, 8)],
        ValueError,
        r"rotary: positions\[0\] is 4, not in \[0, 4\)",
    ),
    ("rotary", lambda: [randn(1, 1, 8), randn(1, 1, 8), ints([0]), randn(4, 10)], ValueError, "rotary: cos_sin"),
    (
        "append_kv",
        lambda: append_with(slots=ints([8])),
        ValueError,
        r"append_kv: slots\[0\] is 8, not in \[0, 8\)",
    ),
    ("append_kv", lambda: append_with(k_scales=poison(2, 1, 2, 4)), ValueError, "scales are given for pages of plain"),
    ("append_kv", lambda: append_with(k_cache=quantised(8)), ValueError, "k_cache and v_cache differ in dtype"),
    (
        "append_kv",
        lambda: append_with(k_cache=quantised(8), v_cache=quantised(8)),
        TypeError,
        "k_scales is a NoneType, not a torch tensor",
    ),
    (
        "append_kv",
        lambda: append_with(k_cache=quantised(8), v_cache=quantised(8), k_scales=poison(2, 1, 4, 2)),
        ValueError,
        r"k_scales has shape \[2, 1, 4, 2\], not \[2, 1, 2, 4\]",
    ),
    (
        "append_kv",
        lambda: append_with(k_cache=quantised(8, torch.uint8)),
        ValueError,
        r"k_cache has shape \[2, 1, 4, 8\], not \[any, 1, any, 4\]",
    ),
    ("append_kv", lambda: append_with(k_cache=quantised(8, torch.int32)), TypeError, "k_cache is torch.int32, not"),
    ("attention", lambda: attention_with(slopes=randn(3)), ValueError, r"slopes has shape \[3\], not \[2\]"),
    ("attention", lambda: attention_with(soft_cap=-1.0), ValueError, "soft_cap is negative"),
    ("attention", lambda: with_sinks(randn(3)), ValueError, r"sinks has shape \[3\], not \[2\]"),
    ("attention", lambda: attention_with(kv_head_of=ints([0, 2])), ValueError, r"kv_head_of\[1\] is 2"),
    ("attention", lambda: attention_with(page_indices=ints([0, 1, 9])), ValueError, r"page_indices\[2\] is 9"),
    ("attention", lambda: attention_with(kv_lens=ints([33, 3])), ValueError, "kv_lens has a request with more tokens"),
    ("attention", lambda: attention_with(kv_lens=ints([1, 3])), ValueError, "kv_lens has a request with fewer tokens"),
    ("attention", lambda: attention_with(qo_indptr=ints([0, 2, 4])), ValueError, "qo_indptr does not run from 0"),
    ("attention", lambda: attention_with(qo_indptr=ints([0, 4, 3])), ValueError, "qo_indptr decreases"),
    ("attention", lambda: attention_with(page_indptr=ints([0, 2, 4])), ValueError, "page_indptr leaves page_indices"),
]


@pytest.mark.parametrize(("op", "build", "error", "message"), REFUSALS, ids=[f"{r[0]}: {r[3]}" for r in REFUSALS])
def test_refuses(op: str, build: Callable[[], list[Any]], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        getattr(op_set("cpu"), op)(*build())
