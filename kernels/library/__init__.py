"""The CUDA kernels under the names and conventions of FlashInfer 0.1 to 0.6.

Used as `import allspan.kernels.library as flashinfer`. docs/kernel-library.md lists what is there.
Nothing is imported before a name is used.
"""

from __future__ import annotations

import difflib
import importlib
from typing import Any

_MODULES = {
    "single": "single_decode_with_kv_cache single_prefill_with_kv_cache single_prefill_with_kv_cache_return_lse",
    "decode_batch": "BatchDecodeWithPagedKVCacheWrapper CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "prefill_batch": "BatchPrefillWithPagedKVCacheWrapper BatchPrefillWithRaggedKVCacheWrapper",
    "levels": "MultiLevelCascadeAttentionWrapper BatchDecodeWithSharedPrefixPagedKVCacheWrapper "
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper merge_state merge_state_in_place merge_states",
    "latent_batch": "BatchMLAPagedAttentionWrapper",
    "page": "append_paged_kv_cache append_paged_mla_kv_cache get_batch_indices_positions get_seq_lens",
    "rope": "apply_rope apply_rope_inplace apply_rope_pos_ids apply_rope_pos_ids_inplace apply_llama31_rope "
    "apply_llama31_rope_inplace apply_llama31_rope_pos_ids apply_llama31_rope_pos_ids_inplace "
    "apply_rope_with_cos_sin_cache apply_rope_with_cos_sin_cache_inplace",
    "elementwise": "rmsnorm fused_add_rmsnorm gemma_rmsnorm gemma_fused_add_rmsnorm silu_and_mul",
    "quantised_rows": "quantise_rows rms_norm_quantised add_rms_norm_quantised silu_mul_quantised",
    "adapters": "LoRAWeights bgmv sgmv",
    "sampling": "sampling_from_logits sampling_from_probs top_k_sampling_from_probs top_p_sampling_from_probs "
    "min_p_sampling_from_probs top_k_top_p_sampling_from_logits top_k_top_p_sampling_from_probs softmax",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}
_NEAREST = {
    "SegmentGEMMWrapper": "sgmv, which multiplies by both matrices of an adapter",
    "BatchAttention": "BatchPrefillWithPagedKVCacheWrapper, which takes single queries, too",
    "PODWithPagedKVCacheWrapper": "BatchPrefillWithPagedKVCacheWrapper, which takes single queries, too",
    "top_k_renorm_probs": "top_k_sampling_from_probs, which draws from what is left",
    "top_p_renorm_probs": "top_p_sampling_from_probs, which draws from what is left",
    "top_k_mask_logits": "top_k_top_p_sampling_from_logits, which draws from what is left",
    "chain_speculative_sampling": "sampling_from_probs",
    "gelu_and_mul": "silu_and_mul",
    "gelu_tanh_and_mul": "silu_and_mul",
    "layernorm": "rmsnorm",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"allspan.kernels.library.{_HOMES[name]}"), name)
    close = difflib.get_close_matches(name, _HOMES, 1, 0.5)
    nearest = _NEAREST.get(name) or (close[0] if close else "")
    raise AttributeError(f"{__name__} has no {name!r}" + (f"; nearest is {nearest}" if nearest else ""), name=name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
