"""The header that C++ and CUDA include is made from the Python declarations."""

from __future__ import annotations

from allspan.kernels.abi.sampling import HEADER, SETTINGS, header


def test_the_header_is_the_one_that_the_declarations_make() -> None:
    assert HEADER.read_text() == header(), "run python -m allspan.kernels.abi.sampling"


def test_every_field_of_the_settings_is_aligned_to_its_size() -> None:
    assert all(offset % kind.itemsize == 0 for kind, offset, *_ in (SETTINGS.fields or {}).values())
