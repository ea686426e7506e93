"""FlashInfer's wrapper of attention over latents against float64, on a GPU's kernels and on those of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import allspan.kernels.library as flashinfer
from allspan.kernels.table import backends
from support.kernel_cases import BF16, F32, I8
from support.kernel_library import LOG2E, randn, workspace
from support.latent_cases import F8, attended_latents, held_rows, paged_latents

SIZES = (64, 16)
LENGTHS = [0, 1, 33, 214, 17, 3]
COUNTS = {"decodes": [1] * 6, "a few": [3] * 6, "some none": [1, 0, 1, 1, 0, 1], "chunks": [2, 1, 30, 40, 0, 3]}
FORMATS = {BF16: 5e-3, I8: 2e-2, F8: 2e-2}
"""How far the norm may be off what float64 gives of the same pages, on a GPU."""
NATIVE = backends()[0]


class Step:
    """Requests with `counts` queries, in pages of 16 tokens, and queries of them."""

    page = 16

    def __init__(self, counts: list[int], heads: int, dtype: torch.dtype, q_dtype: torch.dtype, device: str) -> None:
        cache, scales, indptr, indices = paged_latents(sum(SIZES), self.page, dtype, LENGTHS)
        self.cache, self.scales = cache.to(device), None if scales is None else scales.to(device)
        self.starts = torch.tensor([0, *counts]).cumsum(0).int()
        self.tables = [self.starts, indptr, indices, torch.tensor(LENGTHS).int()]
        self.heads, self.scale = heads, 40**-0.5
        self.q = [randn(sum(counts), heads, size, device=device, dtype=q_dtype) for size in SIZES]

    def planned(self, causal: bool, backend: str) -> Any:
        wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(str(self.cache.device)), backend=backend)
        wrapper.plan(*self.tables, self.heads, *SIZES, self.page, causal, self.scale, self.q[0].dtype, self.cache.dtype)
        return wrapper

    def expected(self, causal: bool) -> tuple[Tensor, Tensor]:
        held, q, found = held_rows(self.cache, self.scales), torch.cat(self.q, 2), []
        for r, length in enumerate(LENGTHS):
            pages = self.tables[2][self.tables[1][r] : self.tables[1][r + 1]].long().to(held.device)
            rows = held[pages].flatten(0, 2)[:length]
            own = q[self.starts[r] : self.starts[r + 1]]
            found.append(attended_latents(own, rows, SIZES[0], self.scale, causal))
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])


class SmallPages(Step):
    """Requests in pages of one token, as FlashInfer's users have them."""

    page = 1


def check(step: Step, backend: str, most: float) -> None:
    for causal in (True, False):
        out, lse = step.planned(causal, backend).run(*step.q, step.cache, scales=step.scales, return_lse=True)
        expected, sums = step.expected(causal)
        assert float((out.double() - expected).norm() / expected.norm()) < most, causal
        torch.testing.assert_close(lse.double(), sums, rtol=1e-5, atol=most)
        is_empty = sums == -torch.inf
        assert is_empty.any()
        assert not out[is_empty].any()


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", FORMATS, ids=["bfloat16", "int8", "e4m3"])
def test_outputs_and_sums_agree_with_float64_on_a_gpu(counts: str, dtype: torch.dtype, device: str) -> None:
    check(Step(COUNTS[counts], 5, dtype, BF16, device), "cuda", FORMATS[dtype])


@pytest.mark.parametrize("dtype", FORMATS, ids=["bfloat16", "int8", "e4m3"])
def test_pages_may_have_one_token(dtype: torch.dtype, device: str) -> None:
    check(SmallPages(COUNTS["a few"], 4, dtype, BF16, device), "cuda", FORMATS[dtype])
    check(SmallPages(COUNTS["a few"], 4, dtype, F32, "cpu"), NATIVE, 5e-3)


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("dtype", [F32, *FORMATS], ids=["float32", "bfloat16", "int8", "e4m3"])
def test_outputs_and_sums_agree_with_float64_on_a_cpu(dtype: torch.dtype, backend: str) -> None:
    is_rounded = dtype is not F32 and backend in ("cpu/avx512_bf16", "cpu/amx")
    for counts in COUNTS.values():
        check(Step(counts, 5, dtype, F32, "cpu"), backend, 5e-3 if is_rounded else 2e-6)


def test_queries_of_16_bits_have_outputs_of_16_bits_on_a_cpu() -> None:
    step = Step(COUNTS["a few"], 4, BF16, torch.float16, "cpu")
    out = step.planned(True, "fa2").run(*step.q, step.cache)
    assert out.dtype is torch.float16
    torch.testing.assert_close(out.double(), step.expected(True)[0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("backend", ["cuda", NATIVE])
def test_two_views_of_one_cache_are_that_cache(backend: str, device: str) -> None:
    device = device if backend == "cuda" else "cpu"
    step = Step(COUNTS["decodes"], 4, BF16, BF16, device)
    wrapper, both = step.planned(False, backend), step.cache[:, 0]
    whole = wrapper.run(*step.q, step.cache)
    assert torch.equal(wrapper.run(*step.q, both), whole)
    assert torch.equal(wrapper.run(*step.q, both[..., : SIZES[0]], both[..., SIZES[0] :]), whole)
    into, sums = torch.empty_like(step.q[0]), torch.empty(len(whole), 4, device=device)
    found = wrapper.run_return_lse(*step.q, both, out=into, lse=sums, return_lse_base_on_e=True)
    assert found[0] is into
    assert found[1] is sums
    assert torch.equal(into, whole)
    torch.testing.assert_close(sums.double() * LOG2E, step.expected(False)[1], rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [BF16, I8, F8], ids=["bfloat16", "int8", "e4m3"])
def test_appended_rows_are_where_attention_reads_them(dtype: torch.dtype, device: str) -> None:
    step = Step(COUNTS["decodes"], 4, dtype, BF16, device)
    cache = torch.zeros_like(step.cache)
    scales = None if step.scales is None else torch.zeros_like(step.scales)
    indptr = torch.tensor([0, *LENGTHS]).cumsum(0).int().to(device)
    where = flashinfer.get_batch_indices_positions(indptr, indptr.diff(), sum(LENGTHS) + 2)
    rows = randn(sum(LENGTHS) + 2, sum(SIZES), device=device, dtype=BF16)
    parts, both = rows.split(SIZES, 1), cache[:, 0]
    views = both[..., : SIZES[0]], both[..., SIZES[0] :]
    tables = step.tables[2], step.tables[1], step.tables[3]
    flashinfer.append_paged_mla_kv_cache(*parts, *where, *views, *tables, scales=scales)
    for r, length in enumerate(LENGTHS):
        pages = step.tables[2][step.tables[1][r] : step.tables[1][r + 1]].long().to(device)
        held = held_rows(cache[pages], None if scales is None else scales[pages]).flatten(0, 2)[:length]
        own = rows[sum(LENGTHS[:r]) :][:length].double()
        torch.testing.assert_close(held, own, rtol=0.07 if dtype is F8 else 0.0, atol=0.03 if dtype is not BF16 else 0)
    unused = set(range(len(cache))) - set(step.tables[2].tolist())
    assert not cache[list(unused)].float().any()


def test_a_graph_reads_what_later_plans_put_into_its_buffers(device: str) -> None:
    step = Step(COUNTS["decodes"], 4, BF16, BF16, device)
    buffers = [torch.zeros(size, dtype=torch.int32, device=device) for size in (7, 40, 6)]
    names = ("kv_indptr", "kv_indices", "kv_len_arr")
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(
        workspace(device), use_cuda_graph=True, backend="cuda", **dict(zip(names, buffers, strict=True))
    )
    assert wrapper.is_cuda_graph_enabled
    shorter = torch.tensor([0, 1, 5, 100, 17, 2]).int()
    for lengths in (shorter, step.tables[3]):
        wrapper.plan(*step.tables[:3], lengths, 4, *SIZES, 16, causal=True, sm_scale=step.scale)
        assert torch.equal(buffers[2].cpu(), lengths)
    right = step.planned(True, "cuda").run(*step.q, step.cache)
    assert torch.equal(wrapper.run(*step.q, step.cache), right)
    for tables, message in (
        ([torch.tensor([0, 3, 3, 4, 5, 5, 6]), *step.tables[1:]], "one query a request"),
        ([step.tables[0][:6], step.tables[1][:6], step.tables[2], step.tables[3][:5]], "buffers are for 6 requests"),
    ):
        with pytest.raises(ValueError, match=message):
            wrapper.plan(*tables, 4, *SIZES, 16, causal=True, sm_scale=step.scale)
    with pytest.raises(ValueError, match="kv_indices: use_cuda_graph needs it"):
        flashinfer.BatchMLAPagedAttentionWrapper(
            workspace(device), use_cuda_graph=True, backend="cuda", kv_indptr=buffers[0]
        )


def test_a_cpu_has_no_graphs() -> None:
    with pytest.raises(ValueError, match="use_cuda_graph: backend 'auto' on cpu has no graphs"):
        flashinfer.BatchMLAPagedAttentionWrapper(workspace("cpu"), use_cuda_graph=True)


def test_what_does_not_fit_is_refused_by_name() -> None:
    step = Step(COUNTS["decodes"], 4, BF16, F32, "cpu")
    wrapper, both = step.planned(True, "auto"), step.cache[:, 0]
    views = both[..., : SIZES[0]], both[..., SIZES[0] :]
    for caches, message in (
        ((views[0].contiguous(), views[1].contiguous()), r"kpe_cache: its rows do not lie behind .* \[\.\.\., :64\]"),
        ((views[0], views[1].contiguous()), "kpe_cache: its rows do not lie behind"),
        ((views[0],), r"ckv_cache: \(\d+, 16, 64\) is not \[pages, page_size, 80\]"),
        ((views[0], views[0]), r"kpe_cache: \(\d+, 16, 64\) is not \[pages, page_size, 16\]"),
        ((both[:, :8],), "ckv_cache: pages of 8 tokens are not plan's 16"),
        ((torch.cat((step.cache, step.cache), 1)[:, :1],), "ckv_cache: rows of 80 in strides .* one after the other"),
        ((step.cache.to(I8),), "scales: pages of torch.int8 have float32 .* none are given"),
    ):
        with pytest.raises(ValueError, match=message):
            wrapper.run(*step.q, *caches)
    with pytest.raises(ValueError, match=r"q_pe: torch\.int32 is not float32"):
        wrapper.run(step.q[0], step.q[1].int(), step.cache)
    with pytest.raises(ValueError, match=r"q_nope: \(5, 4, 64\) is not plan's \(6, 4, 64\)"):
        wrapper.run(step.q[0][:5], step.q[1], step.cache)
    with pytest.raises(TypeError, match="no argument 'kv_len'"):
        wrapper.run(*step.q, step.cache, kv_len=step.tables[3])
    with pytest.raises(ValueError, match=r"lse: torch.float64 \(6, 4\) is not contiguous torch.float32"):
        wrapper.run(*step.q, step.cache, lse=torch.empty(6, 4).double())
    with pytest.raises(RuntimeError, match="call plan first"):
        flashinfer.BatchMLAPagedAttentionWrapper(workspace("cpu")).run(*step.q, step.cache)


def test_plans_that_do_not_fit_are_refused_by_name() -> None:
    step = Step(COUNTS["decodes"], 4, BF16, F32, "cpu")
    wrapper, sizes = step.planned(True, "auto"), (4, *SIZES, 16)
    starts, indptr, indices, lengths = step.tables
    for tables, message in (
        ([starts[:4], indptr, indices, lengths], "qo_indptr: 4 of them do not go with 6 kv_len_arr"),
        ([starts.flip(0), indptr, indices, lengths], "qo_indptr: .* does not begin at 0"),
        ([starts, indptr, indices[:3], lengths], "kv_indptr: .* within the 3 of kv_indices"),
        ([starts, indptr, indices, lengths + 16], "kv_len_arr: request 0 has 16 tokens in pages for 0"),
        ([starts, indptr, indices[None], lengths], r"kv_indices: \(1, \d+\) has not one dimension"),
    ):
        with pytest.raises(ValueError, match=message):
            wrapper.plan(*tables, *sizes, True, 1.0)
    with pytest.raises(ValueError, match="page_size: 4, 64, 16 and 0 are given, at least 1 is wanted"):
        wrapper.plan(*step.tables, 4, *SIZES, 0, True, 1.0)
    with pytest.raises(TypeError, match="sm_scale is wanted"):
        wrapper.plan(*step.tables, *sizes, causal=True)
    with pytest.raises(TypeError, match="no argument 'custom_mask'"):
        wrapper.plan(*step.tables, *sizes, True, 1.0, custom_mask=None)


def test_rows_are_appended_to_their_own_request_s_pages_or_refused() -> None:
    """Two requests of two pages and one, with every argument of FlashInfer's by its name."""
    cache, rows = torch.zeros(4, 2, 5), torch.ones(3, 5)
    ids = {name: torch.tensor(each) for name, each in {"batch_indices": [0, 1, -1], "positions": [3, 1, 0]}.items()}
    table = {"kv_indices": torch.tensor([2, 0, 3]), "kv_indptr": torch.tensor([0, 2, 3])}
    given = {
        "append_ckv": rows[:, :3],
        "append_kpe": rows[:, 3:],
        "ckv_cache": cache,
        "kpe_cache": None,
        **ids,
        **table,
    }
    flashinfer.append_paged_mla_kv_cache(**given, kv_last_page_len=torch.tensor([2, 2]))
    assert cache.sum((1, 2)).tolist() == [5, 0, 0, 5]
    for changes, message in (
        ({"positions": torch.tensor([4, 1, 0])}, "positions: row 0 has place 4 of request 0, whose pages are for 4"),
        ({"positions": torch.tensor([4, 1])}, r"positions: \(2,\) is not \[3\]"),
        ({"batch_indices": torch.tensor([0, 2, 0])}, "batch_indices: 2 is no request of the 2"),
        ({"kv_indptr": torch.tensor([0, 2, 4])}, "kv_indptr: .* within the 3 of kv_indices"),
        ({"kv_indices": torch.tensor([2, -1, 3])}, "kv_indices: must be in 0 to 3"),
        ({"append_kpe": rows[:2, 3:]}, r"append_kpe: \(2, 2\) is not \[3 rows, elements\]"),
    ):
        with pytest.raises(ValueError, match=message):
            flashinfer.append_paged_mla_kv_cache(**given | changes)
    for changes, message in (({"kv_indptr": None}, "kv_indptr is wanted"), ({"kv_layout": "NHD"}, "no argument 'kv_l")):
        with pytest.raises(TypeError, match=message):
            flashinfer.append_paged_mla_kv_cache(**given | changes)
    assert cache.sum((1, 2)).tolist() == [5, 0, 0, 5]
