"""The tables of docs/kernels.md say where each op is; a CUDA source lies beside the module that launches it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from allspan.kernels.cuda.linear.dispatch import KERNELS as KERNELS_OF_LINEAR
from allspan.kernels.table import CPU, CUDA, REFERENCE

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "kernels"
PAGE = (ROOT / "docs/kernels.md").read_text()
ROWS = {op: (cpu, cuda) for op, cpu, cuda in re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \|$", PAGE, re.MULTILINE)}


def path_of(target: str) -> str:
    """The file of a row of the op table, below its backend's folder; "reference" for what the reference does."""
    module = target.partition(":")[0]
    return "reference" if ".reference." in module else "/".join(module.split(".")[3:]) + ".py"


def test_every_op_has_a_row() -> None:
    assert set(ROWS) >= set(REFERENCE)


@pytest.mark.parametrize("op", REFERENCE)
def test_an_op_is_where_the_page_says(op: str) -> None:
    cpu, cuda = (cell.strip("`") for cell in ROWS[op])
    assert cuda == path_of(CUDA[op])
    if cpu == "reference":
        assert CPU[op] == REFERENCE[op]
    else:
        stem = {
            **dict.fromkeys(("add_rms_norm", "head_norm"), "rms_norm"),
            "gather_rows": "embedding",
            "adapted_linear": "packed_linear",
            **dict.fromkeys(("expert_linear", "expert_gated_linear"), "expert_product"),
        }.get(op, op)
        names = "packed_linear" if op.startswith("packed_") and op != "packed_embedding" else stem
        assert re.search(rf"\b{names}\(", (KERNELS / "cpu" / cpu).read_text()), f"{cpu} does not define {names}"


SOURCES = sorted(path.relative_to(KERNELS / "cuda").as_posix() for path in KERNELS.glob("cuda/**/*.cu"))


@pytest.mark.parametrize("source", SOURCES)
def test_a_cuda_source_is_launched_by_the_module_of_its_name(source: str) -> None:
    launcher = (KERNELS / "cuda" / source).with_suffix(".py")
    assert launcher.exists(), f"{source}: there is no {launcher.name} beside it"
    assert Path(source).name in launcher.read_text(), f"{launcher.name} does not name {source}"


def test_the_page_lists_the_kernels_of_linear_products() -> None:
    names = [
        name
        for row in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| `(?:gemm/|cublas)", PAGE, re.MULTILINE)
        for name in re.findall(r"\w+", row)
    ]
    assert sorted(names) == sorted(kernel.name for kernel in KERNELS_OF_LINEAR)
