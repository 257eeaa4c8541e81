"""Philox against its authors' known answers (Random123, kat_vectors)."""

import pytest
import torch

from engine.sampling.gumbel import philox4x32

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


def words(values: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.tensor([value]) for value in values]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    found = philox4x32(words(counter), words(key))
    assert tuple(int(word[0]) for word in found) == expected


def test_counters_and_keys_broadcast() -> None:
    counters, keys = torch.arange(5), torch.tensor([7, ONES])
    zero = torch.zeros((), dtype=torch.long)
    together = philox4x32((counters[None], zero, zero, zero), (keys[:, None], zero))
    for row, key in enumerate(keys):
        alone = philox4x32((counters[3], zero, zero, zero), (key, zero))
        assert [int(word[row, 3]) for word in together] == [int(word) for word in alone]
