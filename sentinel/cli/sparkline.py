"""A sparkline: values over steps as a row of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
ASCII = "_.-=+*%#"
"""Where the terminal has no blocks."""
NOT_FINITE = "!"


def sparkline(values: Sequence[float], width: int, *, is_ascii: bool = False) -> str:
    """Return at most `width` characters, from the least to the greatest finite value.

    Where there are more values than that, each character is the greatest of its share, so that a spike of one step is seen.
    `!`: at least one of its values is NaN or infinite.
    """
    ramp = ASCII if is_ascii else BLOCKS
    num = min(width, len(values))
    shares = [values[at * len(values) // num : (at + 1) * len(values) // num] for at in range(num)]
    finite = [one for one in values if math.isfinite(one)]
    least, most = min(finite, default=0.0), max(finite, default=0.0)
    return "".join(_mark(share, least, most, ramp) for share in shares)


def _mark(share: Sequence[float], least: float, most: float, ramp: str) -> str:
    if not all(map(math.isfinite, share)):
        return NOT_FINITE
    # Half of each first: the difference of the largest doubles would be infinite.
    size = most / 2 - least / 2
    height = (max(share) / 2 - least / 2) / size if size > 0 else 0.0
    return ramp[min(len(ramp) - 1, int(height * len(ramp)))]
