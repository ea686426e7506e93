"""The structs and numbers that samplers in Python, C++ and CUDA share, declared once.

`python -m allspan.kernels.abi.sampling` writes sampling.cuh, which C++ and CUDA include; a test holds the two together.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

SETTINGS = np.dtype(
    [
        ("seed", np.uint64),
        ("top_p", np.float64),
        ("typical_p", np.float64),
        ("temperature", np.float32),
        ("min_z", np.float32),
        ("top_k", np.int32),
        ("is_random", np.int32),
    ]
)
"""What a row's draws need: 0 for no top_k, `min_z` the logarithm of min_p, `is_random` 0 for the most likely token."""

CHANGES = np.dtype(
    [
        ("repetition", np.float64),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("row", np.int32),
        ("words", np.int32),
        ("bias", np.int32),
        ("mask", np.int32),
        ("output_only", np.int32),
        ("unused", np.int32),
    ]
)
"""What a device does to a row of logits: the repetition penalty (of the output's tokens alone where `output_only`),
presence and frequency penalties, and rows of its tables of token counts, biases and masks, -1 for none."""

NOT_FINITE = -1
"""In place of a token: a logit is NaN or +inf."""
ALL_MASKED = -2
"""In place of a token: all logits are -inf."""

HEADER = Path(__file__).with_name("sampling.cuh")
_TYPES = {"uint64": "unsigned long long", "float64": "double", "float32": "float", "int32": "int"}


def header() -> str:
    """The text of sampling.cuh."""
    structs = "\n".join(_struct(name, dtype) for name, dtype in (("Settings", SETTINGS), ("Change", CHANGES)))
    return (
        "// Made by `python -m allspan.kernels.abi.sampling`, which says what each field is. Never edited.\n"
        "#ifndef ALLSPAN_SAMPLING_ABI\n#define ALLSPAN_SAMPLING_ABI\n\n"
        f"{structs}\nconstexpr int kNotFinite = {NOT_FINITE}, kAllMasked = {ALL_MASKED};\n\n#endif\n"
    )


def _struct(name: str, dtype: np.dtype[np.void]) -> str:
    fields = "".join(f"  {_TYPES[kind.name]} {field};\n" for field, (kind, *_) in (dtype.fields or {}).items())
    return f"struct {name} {{\n{fields}}};\nstatic_assert(sizeof({name}) == {dtype.itemsize});\n"


if __name__ == "__main__":
    HEADER.write_text(header(), encoding="utf-8")
