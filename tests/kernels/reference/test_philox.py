"""The generator against the vectors of its authors' library (Random123, kat_vectors), and its uniform numbers."""

import numpy as np
import pytest

from allspan.kernels.reference.philox import philox4x32, uniforms

FULL = 0xFFFFFFFF
VECTORS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([FULL] * 4, [FULL] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_known_answers(counter, key, expected):
    columns = np.array(counter, dtype=np.uint64)[:, None], np.array(key, dtype=np.uint64)[:, None]
    assert philox4x32(*columns)[:, 0].tolist() == expected


def test_a_number_depends_on_its_own_seed_and_position_alone():
    seeds = np.array([1, 2**64 - 1, 7], dtype=np.uint64)
    positions = np.array([5, 0, 2**40])
    together = uniforms(seeds, positions)
    alone = [uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(3)]
    assert together.tolist() == alone
    assert len(set(alone)) == 3


def test_uniforms_fill_the_unit_interval_evenly():
    values = uniforms(np.full(100_000, 42, dtype=np.uint64), np.arange(100_000))
    assert values.min() >= 0
    assert values.max() < 1
    counts, _ = np.histogram(values, bins=100, range=(0, 1))
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_square < 161  # 99 degrees of freedom: 1 in 10,000 is larger
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.015


def test_neighbouring_seeds_are_unrelated():
    values = uniforms(np.arange(100_000, dtype=np.uint64), np.zeros(100_000, dtype=np.int64))
    counts, _ = np.histogram(values, bins=100, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 161
