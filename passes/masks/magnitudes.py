"""How large a number has to be to mean a mask, and how small to be lost: one place for every module that asks.

Scores of attended keys are taken to be smaller than the numbers of masks (README). In float32 a score is lost in what
is 2^25 times as large, and exp(v - max) is 0 where v is lower than the maximum by 104.
"""

from __future__ import annotations

import numpy as np

FLOAT16_MAX = 65504.0
FLOAT32_MAX = float(np.finfo(np.float32).max)

DOMINATING = -1e30
"""At most this, a number in place of a score, as a floor below it or added to it outweighs every score in float32."""
MODERATE = -1e3
"""With `--assume masks-dominate`, a constant of at most this is a mask."""
HUGE = 1e22
"""Scores below 1e14 are lost in a float32 number of this size."""
ROUNDS_SCORES_AWAY = -1e5
"""A number below this, added to a float32 score, leaves it less than seven bits behind the point."""
FINE = 256.0
"""A float32 number up to this leaves a score it is added to at least 15 bits behind the point."""
SHIFT = 1.0
"""One number up to this, added to all scores, rounds them no more than they are rounded anyway."""
UNSEEN = 2.0**-24
"""One number up to this is lost in scores of common size, also where a large addend rounds them."""

SMALL_SHARE = 0.1
"""Added to a mask's number, a number of up to this share of it leaves a mask."""
LOST_SHARE = 2.0**-26
"""Less than half of the last bit of a float32 number: added to it, such a share of it is lost."""

SMALLEST_SCALE, LARGEST_SCALE = 1e-30, 1e30
"""The sizes a scale may have: with others products of common size vanish or overflow in float32."""
