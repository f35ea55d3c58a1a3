"""The generator against the published known answers, and its uniforms against what a uniform must be."""

import pytest

from model.randomness import philox4x32, uniform

# Known-answer vectors of the Random123 distribution for philox4x32-10: counter, key, result.
ONES = 0xFFFFFFFF
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_gives_the_known_answers(counter, key, result):
    assert philox4x32(counter, key) == result


def test_uniform_depends_on_each_argument_and_on_nothing_else():
    base = uniform(7, 0, 100)
    assert base == uniform(7, 0, 100)
    assert len({base, uniform(8, 0, 100), uniform(7, 1, 100), uniform(7, 0, 101), uniform(7 + 2**40, 0, 100)}) == 5


def test_uniforms_fill_the_unit_interval_evenly():
    values = [uniform(3, 0, position) for position in range(4000)]
    assert all(0.0 <= value < 1.0 for value in values)
    counts = [sum(1 for value in values if k / 10 <= value < (k + 1) / 10) for k in range(10)]
    chi_squared = sum((count - 400) ** 2 / 400 for count in counts)
    assert chi_squared < 30  # 9 degrees of freedom: p < 0.001 beyond 27.9
