"""Every kernel compiles for every architecture, without a GPU, and what was compiled is found again."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from allspan.kernels.cuda.jit import compiled as cache
from allspan.kernels.cuda.jit import warm as warming
from allspan.kernels.cuda.jit.compiled import compile_all, compile_missing, compiled, label
from allspan.kernels.cuda.jit.modules import Kernel, kernel
from allspan.kernels.cuda.jit.nvrtc import CompilationError, Compiled, Nvrtc, Usage, architecture, nvrtc, usage
from allspan.kernels.cuda.jit.variants import all_variants
from allspan.kernels.errors import BackendUnavailable
from support import artefacts

DOUBLE = 'extern "C" __global__ void f(float* x) { x[threadIdx.x] *= TWO; }\n'


@pytest.fixture(scope="session")
def compiler() -> Nvrtc:
    try:
        return nvrtc()
    except BackendUnavailable as error:
        pytest.skip(f"NVRTC is not installed: {error}")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`toy.cu` includes `toy.cuh`; kernels come from their folder."""
    (tmp_path / "toy.cuh").write_text("constexpr float kTwo = 2;\n")
    (tmp_path / "toy.cu").write_text('#include "toy.cuh"\n#define TWO kTwo\n' + DOUBLE)
    monkeypatch.setattr(cache, "FOLDER", tmp_path)
    return tmp_path / "toy.cu"


def first_and_last(kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """Of each name."""
    of_name = {one.name: [other for other in kernels if other.name == one.name] for one in kernels}
    return tuple(end for found in of_name.values() for end in (found[0], found[-1]))


def check_compiled(
    kernels: Sequence[Kernel], capability: tuple[int, int], compiler: Nvrtc, capsys: pytest.CaptureFixture[str]
) -> None:
    name = architecture(capability)
    for what, cubin in compile_all(kernels, name, compiler, artefacts.FOLDER / "cubins"):
        artefacts.use(cubin.path)
        assert cubin.path.read_bytes()[:4] == b"\x7fELF"
        for function, used in cubin.usage.items():
            if used.spilled_bytes:
                with capsys.disabled():
                    print(f"\n{label(what)}, {function}, {name}: {used.spilled_bytes} bytes of registers spilled")


@pytest.mark.timeout(600)
def test_every_source_compiles_for_hopper(compiler: Nvrtc, capsys: pytest.CaptureFixture[str]) -> None:
    """The first set of macros and the last of each kernel."""
    check_compiled(first_and_last(all_variants((9, 0))), (9, 0), compiler, capsys)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (10, 0)], ids=architecture)
def test_every_kernel_compiles_for_every_architecture(
    capability: tuple[int, int], compiler: Nvrtc, capsys: pytest.CaptureFixture[str]
) -> None:
    """With all its macros. sm_75 has half precision alone."""
    check_compiled(all_variants(capability), capability, compiler, capsys)


def test_what_was_compiled_is_found_again(
    compiler: Nvrtc, source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    toy = Kernel("toy.cu", "f", ())
    first = compiled(toy, "sm_80", compiler, tmp_path / "a")
    assert first.seconds > 0
    assert "compiled toy.cu for sm_80" in caplog.text
    assert first.usage["f"].registers > 0
    again = compiled(toy, "sm_80", compiler, tmp_path / "a")
    assert (again.path, again.seconds) == (first.path, 0)
    assert [path.name for path in (tmp_path / "a").iterdir()] == [first.path.name]


def test_only_what_is_not_there_is_compiled_ahead(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Counting:
        version = (13, 0)
        count = 0

        def compile(self, source: str, name: str, options: tuple[str, ...]) -> Compiled:
            self.count += 1
            return Compiled(b"", "")

    caplog.set_level(logging.INFO)
    counting: Any = Counting()
    toys = [Kernel("toy.cu", name, (("N", n),)) for n in (1, 2) for name in "fg"]
    compiled(toys[0], "sm_80", counting, tmp_path / "a")
    caplog.clear()
    for _ in range(2):
        compile_missing(toys, "sm_80", counting, tmp_path / "a")
        assert counting.count == 2
    assert [record.message.split(",")[0] for record in caplog.records] == ["kernels: compiling 1 for sm_80"]


def test_macros_architecture_and_what_is_included_make_another_file(
    compiler: Nvrtc, source: Path, tmp_path: Path
) -> None:
    def name(architecture: str = "sm_80", **defines: int) -> str:
        cache._text.cache_clear()
        return compiled(Kernel("toy.cu", "f", tuple(defines.items())), architecture, compiler, tmp_path).path.name

    names = {name(), name("sm_90a"), name(MORE=1), name(MORE=2)}
    source.with_suffix(".cuh").write_text("constexpr float kTwo = 2.5;\n")
    names.add(name())
    assert len(names) == 5


def test_a_folder_that_cannot_be_written_to_is_not_needed(
    compiler: Nvrtc, source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    found = compiled(Kernel("toy.cu", "f", ()), "sm_80", compiler, taken / "kernels")
    assert found.path.is_file()
    assert "set ALLSPAN_HOME" in caplog.text


def test_a_source_that_does_not_compile_says_where(compiler: Nvrtc, source: Path, tmp_path: Path) -> None:
    source.write_text(DOUBLE)
    with pytest.raises(CompilationError, match=r'toy.cu(.|\n)*identifier "TWO" is undefined'):
        compiled(Kernel("toy.cu", "f", ()), "sm_80", compiler, tmp_path)
    assert not list(tmp_path.glob("*.cubin"))


def test_an_architecture_has_its_own_instructions_from_hopper_on() -> None:
    assert [architecture(c) for c in ((8, 0), (8, 9), (9, 0), (12, 0))] == ["sm_80", "sm_89", "sm_90a", "sm_120a"]


def test_spills_are_read_from_the_compilers_log() -> None:
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'decode' for 'sm_100'
ptxas info    : Function properties for decode
ptxas         .     168 bytes stack frame, 64 bytes spill stores, 116 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 168 bytes cumulative stack size
"""
    assert usage(log) == {"decode": Usage(255, 64)}


def test_kernels_are_declared_once_and_by_value() -> None:
    assert kernel("a.cu", "f", B=1, A=2) is kernel("a.cu", "f", B=1, A=2)
    assert kernel("a.cu", "f", B=1, A=2) == Kernel("a.cu", "f", (("A", 2), ("B", 1)))
    found = all_variants((9, 0))
    assert {"attention/decode.cu", "attention/prefill.cu"} <= {one.file for one in found}
    assert all((Path(cache.FOLDER) / one.file).is_file() for one in found)


def test_half_precision_has_every_kernel_below_sm_80_too() -> None:
    files, below = ({one.file for one in all_variants(capability)} for capability in ((8, 0), (7, 5)))
    # Two stages of 32 latents take more shared memory than those GPUs have.
    assert files - below == {"latent/attend/attend.cu", "latent/expand.cu", "latent/attend/merge.cu"}
    assert below < files


@pytest.fixture
def one_toy(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All variants there are: two macros of one source, of which two kernels share one."""
    toys = (Kernel("toy.cu", "f", ()), Kernel("toy.cu", "g", ()), Kernel("toy.cu", "f", (("MORE", 1),)))
    monkeypatch.setattr(warming, "all_variants", lambda capability: toys if capability >= (8, 0) else ())
    monkeypatch.setenv("ALLSPAN_HOME", str(tmp_path / "home"))


@pytest.mark.usefixtures("compiler", "one_toy")
def test_warming_fills_the_cache_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for compiled_now, found in ((2, 0), (0, 2)):
        assert warming.main(["sm_90", "sm_90a"]) == 0
        told = capsys.readouterr()
        report = json.loads(told.out)
        assert report["folder"] == str(tmp_path / "home" / "kernels")
        assert list(report["architectures"]) == ["sm_90a"]
        counts = report["architectures"]["sm_90a"]
        assert (counts["compiled"], counts["found"]) == (compiled_now, found)
        assert told.err.count("for sm_90a") == compiled_now
    assert counts["num_bytes"] == sum(path.stat().st_size for path in (tmp_path / "home" / "kernels").iterdir())


@pytest.mark.usefixtures("compiler", "one_toy")
def test_warming_for_what_is_no_architecture_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for name, why in (("sm_3", "'sm_3' is no architecture"), ("sm_75", "they need sm_80 or later")):
        assert warming.main([name]) == 1
        assert why in json.loads(capsys.readouterr().out)["refused"]
