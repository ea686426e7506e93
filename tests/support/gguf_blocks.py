"""Random blocks of GGUF's types, also of those that the `gguf` package cannot make."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type

_PLACES = {
    "Q6_K": (208,),
    "Q3_K": (108,),
    "Q2_K": (80, 82),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
}
"""Where the float16 scales of a block lie, if not at its beginning."""


def random_blocks(kind: Type, rows: int, inputs: int, size: float = 1.0, seed: int = 5) -> npt.NDArray[np.uint8]:
    """uint8 [rows, bytes]: any bytes, but scales that make weights about `size` large."""
    elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 256, (rows, inputs // elements, block_bytes), dtype=np.uint8)
    _put_scales(kind, raw, generator.standard_normal(raw.shape[:2]).astype(np.float32) * 0.1 + 1)
    decoded = gguf.dequantize(raw.reshape(rows, -1), kind)
    _put_scales(kind, raw, generator.uniform(0.5, 1.5, raw.shape[:2]) * size / np.abs(decoded).mean())
    return raw.reshape(rows, -1)


def _put_scales(kind: Type, raw: npt.NDArray[np.uint8], scales: npt.NDArray[np.float64]) -> None:
    if kind is Type.MXFP4:
        raw[..., 0] = np.clip(np.round(np.log2(scales)) + 128, 0, 255)
        return
    for place in _PLACES.get(kind.name, (0,)):
        raw[..., place : place + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
