"""FlashInfer's names over the CUDA kernels: its README example, and each function against float64."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import allspan.kernels.cuda as flashinfer
from support.kernel_library import LOG2E, Batch, attended, close, randn, turned, workspace


def readme(device: str, kv_len: int, heads: tuple[int, int], append_qo_len: int, mode: dict[str, str]) -> None:
    """The example of FlashInfer's README, checked."""
    num_kv_heads, head_dim = heads
    num_qo_heads = num_kv_heads
    k = randn(kv_len, num_kv_heads, head_dim, device=device)
    v = randn(kv_len, num_kv_heads, head_dim, device=device, seed=1)
    places = torch.arange(kv_len)

    q = randn(num_qo_heads, head_dim, device=device)
    close(flashinfer.single_decode_with_kv_cache(q, k, v), attended(q[None], k, v)[0][0])
    o_rope_on_the_fly = flashinfer.single_decode_with_kv_cache(q, k, v, **mode)
    close(o_rope_on_the_fly, attended(turned(q[None], places[-1:]), turned(k, places), v)[0][0])

    q = randn(append_qo_len, num_qo_heads, head_dim, device=device)
    close(flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True), attended(q, k, v, True)[0])
    o_rope_on_the_fly = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, **mode)
    close(o_rope_on_the_fly, attended(turned(q, places[-append_qo_len:]), turned(k, places), v, True)[0])

    q = randn(kv_len, num_qo_heads, head_dim, device=device)
    close(flashinfer.single_prefill_with_kv_cache(q, k, v, causal=False), attended(q, k, v)[0])


def test_the_readme_example_runs_small(device: str) -> None:
    readme(device, 40, (2, 64), 10, {"rotary_mode": "LLAMA"})


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [{"rotary_mode": "LLAMA"}, {"pos_encoding_mode": "ROPE_LLAMA"}])
def test_the_readme_example_runs(mode: dict[str, str]) -> None:
    readme("cuda", 2048, (32, 128), 128, mode)


SINGLE: list[dict[str, Any]] = [
    {"causal": True, "sm_scale": 0.3, "window_left": 9},
    {"causal": True, "logits_soft_cap": 2.0},
    {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 2.0, "rope_theta": 1e5},
    {"v_scale": 2.0, "q_scale": 0.5, "k_scale": 3.0},
]


@pytest.mark.parametrize("options", SINGLE)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_single_prefill_takes_options_and_layouts(options: dict[str, Any], layout: str, device: str) -> None:
    q, k, v = randn(20, 4, 64, device=device), randn(33, 2, 64, device=device), randn(33, 2, 64, device=device, seed=5)
    given = (k, v) if layout == "NHD" else (k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous())
    out, lse = flashinfer.single_prefill_with_kv_cache(q, *given, kv_layout=layout, return_lse=True, **options)
    scale = options.get("sm_scale", 64**-0.5) * options.get("q_scale", 1) * options.get("k_scale", 1)
    if "pos_encoding_mode" in options:
        angles = options["rope_scale"], options["rope_theta"]
        q, k = turned(q, torch.arange(13, 33), *angles), turned(k, torch.arange(33), *angles)
    window, cap = options.get("window_left", -1), options.get("logits_soft_cap", 0.0)
    right, right_lse = attended(q, k, v, options.get("causal", False), scale, window, cap)
    close(out, right * options.get("v_scale", 1))
    close(lse, right_lse)


@pytest.mark.parametrize("heads", [4, 34])
def test_single_decode_takes_any_group(heads: int, device: str) -> None:
    """34 query heads a KV head are more than the decode kernel takes."""
    q, k, v = (randn(*shape, 64, device=device, dtype=torch.bfloat16) for shape in ((heads,), (40, 1), (40, 1)))
    out, lse = flashinfer.single_decode_with_kv_cache(q, k, v, return_lse=True, window_left=7)
    right, right_lse = attended(q[None], k, v, window=7)
    close(out, right[0])
    close(lse, right_lse[0])


@pytest.mark.parametrize("form", ["NHD", "HND", "pair"])
def test_batch_decode_agrees_with_float64(form: str, device: str) -> None:
    batch = Batch([5, 0, 41, 8], device)
    q = randn(4, 6, 64, device=device)
    cache: Any = batch.cache if form != "HND" else batch.cache.transpose(2, 3).contiguous()
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), "HND" if form == "HND" else "NHD")
    wrapper.plan(*batch.table, 6, 2, 64, 8, q_data_type=torch.float16)
    out, lse = wrapper.run(q, cache if form != "pair" else (cache[:, 0], cache[:, 1]), return_lse=True)
    right, right_lse = batch.expected(q, [1] * 4)
    close(out, right)
    close(lse, right_lse)


def test_batches_turn_queries_and_keys_on_the_fly(device: str) -> None:
    batch, counts = Batch([5, 19], device), [2, 9]
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    decode.begin_forward(*batch.table, 4, 2, 64, 8)
    q = randn(2, 4, 64, device=device)
    close(decode.forward(q, batch.cache, rotary_mode="LLAMA"), batch.expected(q, [1, 1], rotary=True)[0])
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    prefill.plan(torch.tensor([0, 2, 11]), *batch.table, 4, 2, 64, 8, causal=True, pos_encoding_mode="ROPE_LLAMA")
    q = randn(11, 4, 64, device=device)
    close(prefill.run(q, batch.cache), batch.expected(q, counts, rotary=True, causal=True)[0])


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_float16_queries_read_quantised_pages(dtype: torch.dtype, device: str) -> None:
    """What is appended through the library, decode and prefill read to within what its pages hold."""
    batch, counts = Batch([5, 41], device), [1, 9]
    pages, _, page, heads, dim = batch.cache.shape
    shape, elements = (pages, heads, page), dim // 2 if dtype is torch.uint8 else dim
    cache = [torch.zeros(*shape, elements, dtype=torch.uint8, device=device).view(dtype) for _ in range(2)]
    if dtype is not torch.float8_e4m3fn:
        cache += [torch.zeros(pages, heads, 2, page, device=device) for _ in range(2)]
    indptr = torch.tensor([0, 5, 46], dtype=torch.int32, device=device)
    places = flashinfer.get_batch_indices_positions(indptr, indptr.diff(), 46)
    k, v = (torch.cat([batch.kv(r)[i] for r in range(2)]) for i in range(2))
    flashinfer.append_paged_kv_cache(k, v, *places, tuple(cache), batch.table[1], batch.table[0], batch.table[2], "HND")
    tolerance = {torch.int8: 0.01, torch.uint8: 0.25, torch.float8_e4m3fn: 0.1}[dtype]
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), "HND")
    decode.plan(*batch.table, 4, 2, 64, 8)
    q = randn(2, 4, 64, device=device)
    close(decode.run(q, tuple(cache)), batch.expected(q, [1, 1])[0], tolerance)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "HND")
    prefill.plan(torch.tensor([0, *counts]).cumsum(0), *batch.table, 4, 2, 64, 8, causal=True)
    q = randn(10, 4, 64, device=device)
    close(prefill.run(q, tuple(cache)), batch.expected(q, counts, causal=True)[0], 2 * tolerance)


@pytest.mark.parametrize("causal", [True, False])
def test_batch_prefill_agrees_with_float64(causal: bool, device: str) -> None:
    """Not causal, a request may have more queries than tokens."""
    batch, counts = Batch([12, 3, 41], device), [12, 0, 9] if causal else [5, 7, 9]
    indptr = torch.tensor([0, *counts]).cumsum(0).int()
    q = randn(sum(counts), 6, 64, device=device)
    right, right_lse = batch.expected(q, counts, causal=causal)
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    paged.plan(indptr, *batch.table, 6, 2, 64, 8, causal=causal)
    out, lse = paged.run(q, batch.cache, return_lse=True)
    close(out, right)
    close(lse, right_lse)
    k, v = (torch.cat([batch.kv(r)[i] for r in range(3)]) for i in range(2))
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    ragged.plan(indptr, torch.tensor([0, 12, 15, 56]), 6, 2, 64, causal=causal)
    into = torch.empty_like(q)
    assert ragged.run(q, k, v, out=into) is into
    close(into, right)


def test_plans_for_graphs_keep_their_tensors(device: str) -> None:
    first, second = Batch([5, 33], device), Batch([12, 7], device)
    buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (3, 9, 2)]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), *buffers)
    q = randn(2, 4, 64, device=device)
    out = torch.empty_like(q)

    def run() -> None:
        wrapper.run(q, first.cache, out=out)

    wrapper.plan(*first.table, 4, 2, 64, 8)
    run()
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay  # type: ignore[method-assign]
    second.cache = first.cache
    wrapper.plan(*second.table, 4, 2, 64, 8)
    run()
    close(out, second.expected(q, [1, 1])[0])
    with pytest.raises(ValueError, match="the buffers are for 2 requests"):
        wrapper.plan(*Batch([1, 1, 1], device).table, 4, 2, 64, 8)


def test_levels_are_one_attention(device: str) -> None:
    """Three requests share 16 tokens; two of queries, one causal level below."""
    shared, own = Batch([16], device), Batch([4, 9, 2], device)
    cache = torch.cat((shared.cache, own.cache))
    tables = [x.clone() for x in own.table]
    tables[1] += len(shared.cache)
    counts = [2, 1, 2]
    starts = torch.tensor([0, 2, 3, 5])
    q = randn(5, 4, 64, device=device)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(device))
    levels = [list(pair) for pair in zip(shared.table, tables, strict=True)]
    wrapper.plan([torch.tensor([0, 5]), starts], *levels, 4, 2, 64, 8, causal=True)
    k, v = shared.kv(0)
    pairs = [own.kv(r) for r in range(3)]
    rows = q.split(counts)
    joined = [
        attended(x, torch.cat((k, mine[0])), torch.cat((v, mine[1])), causal=True)[0]
        for x, mine in zip(rows, pairs, strict=True)
    ]
    close(wrapper.run(q, cache), torch.cat(joined))
    two = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace(device))
    two.begin_forward(*own.table, 4, 2, 64, 8)
    out = two.forward(q[:3], k, v, own.cache)
    right = [
        attended(x[None], torch.cat((k, mine[0])), torch.cat((v, mine[1])))[0]
        for x, mine in zip(q[:3], pairs, strict=True)
    ]
    close(out, torch.cat(right))


def test_alibi_and_sinks(device: str) -> None:
    """Slopes as FlashInfer has them, also of six heads; a sink counts once, whatever the levels."""
    batch, counts, heads = Batch([40, 0, 9], device), [3, 0, 2], 6
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3], device=device)
    sinks = torch.tensor([-1.0, 0.0, 2.0, 5.0, 1.0, 30.0], device=device)
    bent: dict[str, Any] = {"pos_encoding_mode": "ALIBI", "sinks": sinks}
    q = randn(5, heads, 64, device=device)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    prefill.plan(torch.tensor([0, 3, 3, 5]), *batch.table, heads, 2, 64, 8, causal=True, **bent)
    found = prefill.run(q, batch.cache, return_lse=True)
    right = batch.expected(q, counts, causal=True, bent=(slopes, sinks))
    close(found[0], right[0])
    close(found[1], right[1])
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    decode.plan(*batch.table, heads, 2, 64, 8, **bent)
    out, lse = decode.run(q[:3], batch.cache, return_lse=True)
    right = batch.expected(q[[0, 2]], [1, 0, 1], bent=(slopes, sinks))
    close(out[[0, 2]], right[0])
    close(lse[[0, 2]], right[1])
    assert not out[1].any()
    assert lse[1].isneginf().all()


def test_sinks_and_caps_of_levels(device: str) -> None:
    """A request without tokens of its own has its sink, too."""
    shared, own = Batch([16], device), Batch([5, 0], device)
    sinks = torch.tensor([-1.0, 0.0, 2.0, 5.0], device=device)
    cache, tables = torch.cat((shared.cache, own.cache)), [x.clone() for x in own.table]
    tables[1] += len(shared.cache)
    q, (k, v) = randn(2, 4, 64, device=device), shared.kv(0)
    pairs = [own.kv(r) for r in range(2)]
    for cap in (0.0, 2.0):
        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(device))
        levels = [list(pair) for pair in zip(shared.table, tables, strict=True)]
        starts = [torch.tensor([0, 2]), torch.tensor([0, 1, 2])]
        wrapper.plan(starts, *levels, 4, 2, 64, 8, sinks=sinks, logits_soft_cap=cap)
        two = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace(device))
        two.begin_forward(*own.table, 4, 2, 64, 8)
        right = [
            attended(x[None], torch.cat((k, mine[0])), torch.cat((v, mine[1])), cap=cap, bent=(None, sinks))[0]
            for x, mine in zip(q, pairs, strict=True)
        ]
        close(wrapper.run(q, cache), torch.cat(right))
        close(two.forward(q, k, v, own.cache, sinks=sinks, logits_soft_cap=cap), torch.cat(right))
    with pytest.raises(ValueError, match=r"pos_encoding_mode: 'ALIBI'.* no positions"):
        two.forward(q, k, v, own.cache, pos_encoding_mode="ALIBI")


def test_states_merge_in_any_order(device: str) -> None:
    v, s = randn(3, 4, 2, 64, device=device), randn(3, 4, 2, device=device, dtype=torch.float32)
    out, lse = flashinfer.merge_states(v, s)
    weight = torch.softmax(s.double() / LOG2E, 1)
    close(out, (v.double() * weight[..., None]).sum(1))
    half = flashinfer.merge_states(v[:, :2], s[:, :2]), flashinfer.merge_states(v[:, 2:], s[:, 2:])
    close(flashinfer.merge_state(*half[1], *half[0])[1], lse)
    kept, kept_lse = half[0][0].clone(), half[0][1].clone()
    mask = torch.tensor([True, False, True], device=device)
    flashinfer.merge_state_in_place(kept, kept_lse, *half[1], mask=mask)
    close(kept[mask], out[mask])
    torch.testing.assert_close(kept[1], half[0][0][1])


def test_anything_that_speaks_dlpack_is_taken(device: str) -> None:
    q, k, v = randn(4, 64, device=device), randn(9, 2, 64, device=device), randn(9, 2, 64, device=device, seed=1)
    foreign = [SimpleNamespace(__dlpack__=x.__dlpack__, __dlpack_device__=x.__dlpack_device__) for x in (q, k, v)]
    out = flashinfer.single_decode_with_kv_cache(*foreign)
    assert torch.equal(out, flashinfer.single_decode_with_kv_cache(q, k, v))
    with pytest.raises(TypeError, match="k: a list does not speak DLPack"):
        flashinfer.single_decode_with_kv_cache(q, [1.0], v)


def test_what_the_kernels_do_not_do_is_refused(device: str) -> None:
    q, k, v = randn(4, 64, device=device), randn(9, 2, 64, device=device), randn(9, 2, 64, device=device)
    decode = flashinfer.single_decode_with_kv_cache
    refusals: list[tuple[str, type[Exception], Any]] = [
        ("q: torch.float32 is not float16 or bfloat16; convert", ValueError, lambda: decode(q.float(), k, v)),
        ("bfloat16 and float16 in one call", ValueError, lambda: decode(q.bfloat16(), k, v)),
        ("kv_layout: 'NDH'", ValueError, lambda: decode(q, k, v, "NDH")),
        ("pos_encoding_mode: 'LINEAR'", ValueError, lambda: decode(q, k, v, pos_encoding_mode="LINEAR")),
        ("custom_mask: the kernels do not know it", ValueError, lambda: decode(q, k, v, custom_mask=q)),
        (
            r"sinks: torch.float32 \(4, 64\) is not contiguous float32 \(4,\)",
            ValueError,
            lambda: decode(q, k, v, sinks=q),
        ),
        ("scale: there is no such argument", TypeError, lambda: decode(q, k, v, scale=1.0)),
        (
            "causal: 12 queries are more than 9 tokens",
            ValueError,
            lambda: flashinfer.single_prefill_with_kv_cache(randn(12, 4, 64, device=device), k, v, causal=True),
        ),
        (
            "there is no plan",
            RuntimeError,
            lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device)).run(q[None], k),
        ),
    ]
    for message, kind, call in refusals:
        with pytest.raises(kind, match=message):
            call()


@pytest.mark.gpu
def test_a_tensor_of_the_host_is_refused() -> None:
    with pytest.raises(ValueError, match="input: is on cpu; copy it to a GPU"):
        flashinfer.rmsnorm(randn(2, 64, device="cpu"), randn(64, device="cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("page", [1, 16])
def test_many_requests_agree_with_float64(dtype: torch.dtype, dim: int, page: int) -> None:
    generator = torch.Generator().manual_seed(dim + page)
    lengths = torch.randint(1, 400, (128,), generator=generator).tolist()
    counts = [min(length, 1 + r % 37) for r, length in enumerate(lengths)]
    batch = Batch(lengths, "cuda", page, 4, dim)
    batch.cache = batch.cache.to(dtype)
    for heads in (4, 28, 32):
        q = randn(128, heads, dim, device="cuda", dtype=dtype)
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cuda"))
        decode.plan(*batch.table, heads, 4, dim, page)
        close(decode.run(q, batch.cache), batch.expected(q, [1] * 128)[0])
        q = randn(sum(counts), heads, dim, device="cuda", dtype=dtype)
        prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cuda"))
        prefill.plan(torch.tensor([0, *counts]).cumsum(0), *batch.table, heads, 4, dim, page, causal=True)
        close(prefill.run(q, batch.cache), batch.expected(q, counts, causal=True)[0])


def test_what_is_not_there_names_what_is_nearest() -> None:
    with pytest.raises(AttributeError, match="no 'top_k_renorm_probs'; nearest is top_k_sampling_from_probs"):
        _ = flashinfer.top_k_renorm_probs
    with pytest.raises(AttributeError, match="nearest is rmsnorm"):
        _ = flashinfer.rms_norm
    for name in dir(flashinfer):
        assert callable(getattr(flashinfer, name))


def test_importing_costs_nothing() -> None:
    code = "import sys, allspan.kernels.cuda as f; assert not {'torch', 'cupy', 'numpy'} & set(sys.modules); dir(f)"
    subprocess.run([sys.executable, "-c", code], check=True)
