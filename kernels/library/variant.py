"""What attention is asked for beside its tensors: FlashInfer's keyword arguments, those of all its versions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from allspan.kernels.cuda.cache.pages import Scores
from allspan.kernels.library.arrays import Array, tensor

_OFF = {
    "custom_mask": "causal=True, or no mask",
    "packed_custom_mask": "causal=True, or no mask",
    "fixed_split_size": "the prefill wrappers, which cut no request",
    "disable_split_kv": "the prefill wrappers, which cut no request",
}
"""What no kernel does, and what is near."""
_IGNORED = {
    "use_tensor_cores", "backend", "enable_pdl", "use_fp16_qk_reduction", "allow_fp16_qk_reduction", "non_blocking",
    "data_type", "q_data_type", "kv_data_type", "o_data_type", "seq_lens", "block_tables", "jit_args", "tmp",
    "head_dim_vo",
}  # fmt: skip
"""How FlashInfer computes, not what: dtypes are those of the tensors."""


_MODES = ("NONE", "ROPE_LLAMA", "ALIBI")


@dataclass(frozen=True, slots=True)
class Variant:
    """See docs/kernel-library.md."""

    causal: bool = False
    pos_encoding_mode: str = "NONE"
    sm_scale: float | None = None
    window_left: int = -1
    logits_soft_cap: float | None = None
    rope_scale: float | None = None
    rope_theta: float | None = None
    q_scale: float | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    sinks: Array | None = None

    def but(self, options: dict[str, Any]) -> Variant:
        """Raises TypeError for a name that nobody knows, ValueError for what the kernels do not do."""
        given = dict(options)
        if "rotary_mode" in given:
            mode = given.pop("rotary_mode")
            given["pos_encoding_mode"] = {"LLAMA": "ROPE_LLAMA"}.get(mode, mode)
        for name, nearest in _OFF.items():
            value = given.pop(name, None)
            if value is not None and value is not False:
                raise ValueError(f"{name}: the kernels do not know it; nearest is {nearest}")
        known = {name: value for name, value in given.items() if name not in _IGNORED}
        if strange := sorted(set(known) - set(self.__slots__)):
            raise TypeError(f"{strange[0]}: there is no such argument (there are {', '.join(self.__slots__)})")
        variant = replace(self, **known)
        if variant.pos_encoding_mode not in _MODES:
            raise ValueError(f"pos_encoding_mode: {variant.pos_encoding_mode!r} is not one of {', '.join(_MODES)}")
        return variant

    @property
    def is_rotary(self) -> bool:
        return self.pos_encoding_mode == "ROPE_LLAMA"

    @property
    def knows_places(self) -> bool:
        """Whether it matters where a token stands."""
        return self.window_left >= 0 or self.pos_encoding_mode != "NONE"

    def scores(self, q: Tensor) -> Scores:
        """For queries [n, heads, head_dim]."""
        heads, head_dim = q.shape[1:]
        scale = 1 / math.sqrt(head_dim) if self.sm_scale is None else self.sm_scale
        for factor in (self.q_scale, self.k_scale):
            scale *= 1.0 if factor is None else float(factor)
        slopes = alibi_slopes(heads, q.device) if self.pos_encoding_mode == "ALIBI" else None
        sinks = None if self.sinks is None else tensor("sinks", self.sinks).float().contiguous()
        return Scores(scale, self.window_left, self.logits_soft_cap or 0.0, slopes, sinks)


@cache
def alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """float32 [heads]: 2^(-8k / m) with k = 1 … m for the largest power of two m up to `heads`, then every second one
    of 2m heads (O. Press et al., arXiv:2108.12409). Made once, so that captured graphs can count on it."""
    power = 1 << (heads.bit_length() - 1)
    exponents = [-8 * k / power for k in range(1, power + 1)]
    exponents += [-4 * (2 * k - 1) / power for k in range(1, heads - power + 1)]
    return torch.tensor(exponents, dtype=torch.float64).exp2().float().to(device)
