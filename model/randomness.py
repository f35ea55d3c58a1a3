"""Random numbers without state: a uniform is a function of (seed, sequence index, position).

Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
1, 2, 3" (SC 2011). Because no generator state exists anywhere, a token sampled again after a failover is the same.
"""

from __future__ import annotations

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four 32-bit random words for a 128-bit counter and a 64-bit key, given as 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = _MULTIPLIERS[0] * c0
        product1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, sequence_index: int, position: int) -> float:
    """A float in [0, 1) with 53 random bits. `seed` is an unsigned 64-bit integer."""
    counter = (position & _MASK, position >> 32, sequence_index, 0)
    high, low, _, _ = philox4x32(counter, (seed & _MASK, seed >> 32))
    return float(((high >> 5) << 26) | (low >> 6)) / float(1 << 53)
