"""The cosines and sines of rotary positions.

Frequencies and angles are rounded to float32 step by step as in the models' training code; the cosine and sine
themselves are taken in float64, on one thread, and rounded once, so that neither a vector length nor a thread
count shows in them.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from model.config import RopeConfig


def rotary_tables(rope: RopeConfig, head_dim: int, max_position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [max_position, head_dim / 2] each."""
    positions = torch.arange(max_position, dtype=torch.float32)
    angles = (positions[:, None] * _frequencies(rope, head_dim)).numpy().astype(np.float64)
    return torch.from_numpy(np.cos(angles)).float(), torch.from_numpy(np.sin(angles)).float()


def _frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians a token, float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.type == "linear":
        return frequencies / rope.factor
    if rope.type == "llama3":
        return _stretch_long_waves(frequencies, rope)
    return frequencies


def _stretch_long_waves(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3's scaling: waves longer than the original context / low_freq_factor are stretched by `factor`, those
    shorter than the original context / high_freq_factor are kept, and those between are interpolated."""
    turns = rope.original_max_position / (2 * math.pi / frequencies)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies
