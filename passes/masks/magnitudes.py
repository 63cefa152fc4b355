"""How large the number of a mask has to be, and how small a number has to be to get lost: the
limits for all modules.

Scores of attended keys are taken to be smaller than the numbers of masks (recognised.md). In
float32 a score is lost in a number that is 2^25 times as large, and exp(v - max) is 0 where v is at
least 104 below the maximum.
"""

from __future__ import annotations

import numpy as np

FLOAT16_MAX = 65504.0
FLOAT32_MAX = float(np.finfo(np.float32).max)

DOMINATING = -1e30
"""A number of at most this outweighs every score in float32, whether it replaces scores, is a floor
below them or is added to them."""
LOST_IN = -1e29
"""A number in which every score is lost, and which no kernel takes for -inf: some take -1e30 for
it."""
ASSUMED_MASK = -1e3
"""With `--assume masks-dominate`, a constant of at most this is a mask."""
HUGE = 1e22
"""Scores below 1e14 are lost in a float32 number of this size."""
ROUNDS_SCORES_AWAY = -1e5
"""After a number below this was added to it, a float32 score has about seven fractional bits left,
or fewer."""
MAX_FINE = 256.0
"""After a number of up to this size was added to it, a float32 score has at least 15 fractional
bits left."""
LARGE_HALF = 64.0
"""A number up to this, added to a 16-bit score, leaves it bits enough not to be rounded away."""
HARMLESS_SHIFT = 1.0
"""One number up to this size, added to all scores, rounds them no more than they are rounded
anyway."""
LOST_SHIFT = 2.0**-24
"""One number up to this size is lost in scores of common size, also where a large addend rounds
them."""

SMALL_SHARE = 0.1
"""A number stays large enough for a mask after a number of up to this share of it was added."""
LOST_SHARE = 2.0**-26
"""A share of a float32 number that is less than half of its last bit: it is lost when it is added
to the number."""

SMALLEST_SCALE, LARGEST_SCALE = 1e-30, 1e30
"""The range of a scale. Outside of it products of common size vanish or overflow in float32."""
