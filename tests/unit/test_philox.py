"""Philox against its authors' known answers (Random123, kat_vectors), and the draws made of it."""

import numpy as np
import pytest

from engine.philox import philox4x32, uniforms

ONES = 0xFFFFFFFF

KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def words(values: tuple[int, ...]) -> list[np.ndarray]:
    return [np.array([value], dtype=np.uint64) for value in values]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    found = philox4x32(words(counter), words(key))
    assert tuple(int(word[0]) for word in found) == expected


def test_a_draw_depends_on_its_own_counter_alone() -> None:
    draws = [(7, 0, 0), (7, 0, 1), (7, 1, 0), (8, 0, 0), (7 + 2**32, 0, 0)]
    together = uniforms(draws)
    assert [float(x) for x in together] == [float(uniforms([draw])[0]) for draw in draws]
    assert len(set(together.tolist())) == len(draws)


def test_draws_fill_the_half_open_unit_interval_evenly() -> None:
    numbers = uniforms([(seed, 0, 3) for seed in range(20_000)])
    assert numbers.dtype == np.float32
    assert 0.0 <= numbers.min() < 0.001
    assert 0.999 < numbers.max() < 1.0
    counts, _ = np.histogram(numbers, bins=16, range=(0, 1))
    assert abs(counts / 1250 - 1).max() < 0.15


def test_seeds_count_modulo_2_to_the_64() -> None:
    assert uniforms([(-1, 0, 0)]) == uniforms([(2**64 - 1, 0, 0)])
