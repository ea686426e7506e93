"""Packed weights of linear layers: panels of 16 output features, which every CPU kernel streams from front to back, or,
for GPUs, rows (`PackedSpec.memory`). `allspan.kernels.row_layout` says how rows lie; the rest of this page is panels.

A packed weight is one contiguous uint8 tensor [panels, panel_bytes]. Panel p of a part holds its output features
16·p … 16·p + 15; what a part has too few is filled with zero scales (or zeros). Each part starts a panel of its own. Of
two parts that are `interleaved` (gate and up), panel 2·i is the first part's panel i and panel 2·i + 1 the second's.

A panel is a head (empty but for scales per channel) and then blocks along the input, each of `Format.block` inputs.
Inputs are counted from `k_offset` on, so that a rank whose slice starts within a quantisation group keeps the whole
group's scale. The first `k_offset` places of the first block, and those after the last input, may hold any codes: they
meet zeros of x.

All numbers are little-endian. "pairs" of 32 inputs: bfloat16 [16 pairs][16 features][2]. Codes of 32 inputs are
unsigned, in quads [8 quads][16 features][4]:
 8 bits  512 bytes, as they are.
 2 bits  128 bytes: bits 2·j and 2·j + 1 of byte i of half h are code i of quad 4·h + j.
 3 bits  the 2 low bits as above, then 64 bytes: bit i of the 64 of quad q (little-endian uint64 q) is bit 2 of
         code i.
 4 bits  256 bytes: the low half of byte i is code i of quads 0 … 3, the high half code i of quads 4 … 7.
 5 bits  the 4 low bits as above, then 64 bytes: bit i of the 64 of quad q (little-endian uint64 q) is bit 4 of code i.
 6 bits  the 4 low bits as above, then 128 bytes: bits 2·j and 2·j + 1 of byte i of half h are bits 4 and 5 of code i of
         quad 4·h + j.
A weight is (code - zero) · scale, or values[code] · scale where a format has `values`, or code · scale - offset where
it has offsets.

| format | block | head, then each block |
|---|---|---|
| f32 | 32 | float32 [32 inputs][16 features] |
| bf16 | 32 | pairs |
| channel8, channel4 | 32 | head: float32 scales [16], float32 offsets [16]; block: codes |
| group8, group4 | the group, 32 … 512 | float16 scales [16], float16 offsets [16], codes of each 32 |
| q8_0 (zero 128), q4_0 (zero 8) | 32 | float16 scales [16], codes |
| q5_0 (zero 16) | 32 | float16 scales [16], codes of 5 bits |
| q5_1 | 32 | float16 scales [16], float16 offsets [16], codes of 5 bits |
| q4_k, q5_k | 256 | float16 d [16], float16 dmin [16], uint8 scales s [8 groups of 32][16], uint8 mins m [8][16], \
codes of each 32; scale = d · s, offset = dmin · m |
| q6_k (zero 32), q3_k (zero 4) | 256 | float16 d [16], int8 scales s [16 groups of 16][16], codes of 6 or 3 bits; \
scale = d · s |
| q2_k | 256 | float16 d [16], float16 dmin [16], uint8 sm [16 groups of 16][16], codes of 2 bits; \
scale = d · (sm & 15), offset = dmin · (sm >> 4) |
| iq4_nl (values) | 32 | float16 scales [16], codes of 4 bits |
| mxfp4 (values) | 32 | uint8 e [16], codes of 4 bits; scale = 2^(e - 128) |
| iq4_xs, iq3_s, iq3_xxs, iq2_xxs (values) | 256 | float16 d [16], int8 scales s [8 groups of 32][16], codes of 4 \
bits, of iq2_xxs 3; scale = d · s · `step` |
| iq2_xs, iq2_s (values) | 256 | float16 d [16], int8 scales s [16 groups of 16][16], codes of 3 bits; \
scale = d · s · `step` |

GGUF's iq3 and iq2 types name four or eight weights at once by a place in a table of magnitudes, beside their signs.
Kernels would have to look these up one by one; here each weight has a code of its own, of its magnitude and its sign.

GGUF's q4_1 is group4 with a group of 32 and offset = -min. `allspan.kernels.reference.packed_linear` packs and unpacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FEATURES = 16
"""Output features of a panel."""

K_TILE_BYTES = 64
"""Bytes of codes in rows that lie together; a feature's begin at a multiple of them."""

MEMORIES = ("panels", "rows")

LAYOUT = 3
"""Version of everything on this page: raised by whoever changes a byte of it, so that weights that were packed and
saved before are refused."""


@dataclass(frozen=True, slots=True)
class Format:
    """How codes and scales lie in a panel; see the module's table."""

    bits: int
    """Bits of a quantised value: 2 to 6 or 8; 16 and 32 are plain floats."""
    zero: int | None = None
    """The code that means 0, where it is the same everywhere; None: offsets (or plain floats)."""
    block: int = 32
    """Inputs of a block; 0: the weight's `group`."""
    head_bytes: int = 0
    """Before the first block of a panel."""
    scale_bytes: int = 0
    """Before the codes of a block."""
    is_e4m3: bool = False
    """Codes are floating-point numbers of 8 bits."""
    is_e2m1: bool = False
    """Codes are floating-point numbers of 4 bits; `values` has twice each."""
    values: tuple[int, ...] = ()
    """What each code stands for, where that is not a number less `zero`."""
    step: float = 1.0
    """A power of two by which d · s is multiplied."""

    @property
    def is_float(self) -> bool:
        """Whether codes are floating-point numbers: in rows such weights have no offsets, and scales in float32, or of
        e2m1 in a byte."""
        return self.is_e4m3 or self.is_e2m1

    @property
    def is_quantised(self) -> bool:
        return self.bits <= 8


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _signed(*magnitudes: int) -> tuple[int, ...]:
    """The highest bit of a code is the sign."""
    return (*magnitudes, *(-each for each in magnitudes))


_IQ3_S = _signed(1, 3, 5, 7, 9, 11, 13, 15)
_IQ3_XXS = _signed(4, 12, 20, 28, 36, 44, 52, 62)
_IQ2 = _signed(8, 25, 43, 0)

FORMATS: Mapping[str, Format] = {
    "f32": Format(32),
    "bf16": Format(16),
    "channel8": Format(8, head_bytes=128),
    "channel4": Format(4, head_bytes=128),
    "group8": Format(8, block=0, scale_bytes=64),
    "group4": Format(4, block=0, scale_bytes=64),
    "q8_0": Format(8, zero=128, scale_bytes=32),
    "q4_0": Format(4, zero=8, scale_bytes=32),
    "q5_0": Format(5, zero=16, scale_bytes=32),
    "q5_1": Format(5, scale_bytes=64),
    "q4_k": Format(4, block=256, scale_bytes=320),
    "q5_k": Format(5, block=256, scale_bytes=320),
    "q6_k": Format(6, zero=32, block=256, scale_bytes=288),
    "q3_k": Format(3, zero=4, block=256, scale_bytes=288),
    "q2_k": Format(2, block=256, scale_bytes=320),
    "iq4_nl": Format(4, zero=0, scale_bytes=32, values=_IQ4),
    "mxfp4": Format(4, zero=0, scale_bytes=16, values=_FP4),
    "iq4_xs": Format(4, zero=0, block=256, scale_bytes=160, values=_IQ4),
    "iq3_s": Format(4, zero=0, block=256, scale_bytes=160, values=_IQ3_S),
    "iq3_xxs": Format(4, zero=0, block=256, scale_bytes=160, values=_IQ3_XXS, step=0.25),
    "iq2_xxs": Format(3, zero=0, block=256, scale_bytes=160, values=_IQ2, step=0.125),
    "iq2_xs": Format(3, zero=0, block=256, scale_bytes=288, values=_IQ2, step=0.125),
    "iq2_s": Format(3, zero=0, block=256, scale_bytes=288, values=_IQ2, step=0.125),
}

ROW_FORMATS: Mapping[str, Format] = {
    **{name: FORMATS[name] for name in ("bf16", "channel8", "channel4", "group8", "group4", "q8_0", "q4_0")},
    "f16": Format(16),
    "fp8": Format(8, zero=0, head_bytes=128, is_e4m3=True),
    "fp8_block": Format(8, zero=0, block=128, scale_bytes=64, is_e4m3=True),
    "mxfp4": Format(4, zero=0, scale_bytes=16, values=_FP4, is_e2m1=True),
}
"""The formats of weights in rows; `allspan.kernels.row_layout` says how they lie."""

ACTIVATIONS = ("f32", "bf16", "f16", "a8", "a16")
"""What a linear layer's input is turned into: with plain weights the same; with codes, integers of 8 bits (a8) or
16 (a16; not with q3_k and those after it) with a float32 scale for each `PackedSpec.x_group` inputs. Of fp8, "e4m3":
the same, a scale a row; of fp8_block for each 128 inputs."""


@dataclass(frozen=True, slots=True)
class PackedSpec:
    """What a packed weight holds. An attribute of ops: it never changes once a weight is made."""

    format: str
    activation: str
    parts: tuple[int, ...]
    """Output features of each part; together the columns of the product."""
    inputs: int
    """Input features of x, without the `k_offset` places."""
    k_offset: int = 0
    """Inputs of the first block that lie before this rank's first."""
    group: int = 0
    """Inputs that share a scale, of group8 and group4."""
    interleaved: bool = False
    """Two parts of the same size, panel by panel in turn."""
    memory: str = "panels"
    """Or "rows"."""

    @property
    def kind(self) -> Format:
        return (ROW_FORMATS if self.memory == "rows" else FORMATS)[self.format]

    @property
    def block(self) -> int:
        return self.kind.block or self.group

    @property
    def x_group(self) -> int:
        """Inputs of which integers share a scale: more where the weights' scales are not for each group."""
        return 128 if self.kind.head_bytes else 32

    @property
    def blocks(self) -> int:
        """Returns the number of blocks of a panel."""
        return -(-(self.k_offset + self.inputs) // self.block)

    @property
    def block_bytes(self) -> int:
        kind = self.kind
        return kind.scale_bytes + self.block * FEATURES * kind.bits // 8

    @property
    def panel_bytes(self) -> int:
        return self.kind.head_bytes + self.blocks * self.block_bytes

    @property
    def panels(self) -> int:
        return sum(-(-part // FEATURES) for part in self.parts)

    @property
    def features(self) -> int:
        return sum(self.parts)

    @property
    def depth(self) -> int:
        """Codes of a feature in rows: `k_offset` places, the inputs, and what fills the last `K_TILE_BYTES` bytes."""
        k_tile = 8 * K_TILE_BYTES // self.kind.bits
        return -(-(self.k_offset + self.inputs) // k_tile) * k_tile

    @property
    def groups(self) -> int:
        """Returns the number of quantisation groups of a feature's inputs, each with a scale."""
        kind = self.kind
        return self.blocks if kind.scale_bytes else int(bool(kind.head_bytes))

    @property
    def row_bytes(self) -> int:
        """Codes and scales of a feature in rows."""
        kind = self.kind
        return self.depth * kind.bits // 8 + self.qparams * (8 if kind.head_bytes else 4)

    @property
    def qparams(self) -> int:
        """Returns the number of qparams that a feature has in rows: one a group, or of e2m1 one for four groups."""
        return -(-self.groups // 4) if self.kind.is_e2m1 else self.groups

    @property
    def shape(self) -> tuple[int, int]:
        """Returns the shape of the uint8 tensor."""
        if self.memory == "rows":
            return self.features, self.row_bytes
        return self.panels, self.panel_bytes
