"""SeriesRoom: which series of a run are shown, so that a daemon stays within its bound whatever it follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

Key = tuple[str, ...]
"""Names one or several series that are shown together: their family first."""

MOST_OF_FAMILY: dict[str, int] = {"rule": 300, "health": 64, "norm": 600, "scalar": 64, "score": 16}
"""Family -> most keys of it that are shown of one run: none may take the room of all others."""


class SeriesRoom:
    """The details of one run that are shown: those that came first, and the same ones at each scrape."""

    def __init__(self) -> None:
        self.num_dropped = 0
        """Most series that had to be left out at once; it never goes down."""
        self._shown: set[Key] = set()
        self._order: dict[Key, None] = {}

    def fit(self, wanted: Mapping[Key, int], room: int) -> None:
        """Choose what is shown. wanted: key -> number of its series, the dearest first; room: most series in all."""
        order = [key for key in self._order if key in wanted]
        order += [key for key in wanted if key not in self._order]
        num_of_family: Counter[str] = Counter()
        num_left_out, shown = 0, []
        for key in order:
            family, num_series = key[0], wanted[key]
            if num_series > room or num_of_family[family] >= MOST_OF_FAMILY.get(family, len(order)):
                num_left_out += num_series
                continue
            shown.append(key)
            num_of_family[family] += 1
            room -= num_series
        self._order, self._shown = dict.fromkeys(shown), set(shown)
        self.num_dropped = max(self.num_dropped, num_left_out)

    def __contains__(self, key: Key) -> bool:
        return key in self._shown


def allotted(wanted: Sequence[int], is_live: Sequence[bool], room: int) -> list[int]:
    """Return how many series each run may have: live runs alike, then the others in their order.

    wanted: of each run; room: series for all of them. What a live run may have changes only when the number of live runs
    passes a power of two, so that series do not come and go.
    """
    num_live = sum(is_live)
    share = room // (1 << max(num_live - 1, 0).bit_length())
    found = [min(want, share) if live else 0 for want, live in zip(wanted, is_live, strict=True)]
    left = room - sum(found)
    for at, live in enumerate(is_live):
        if not live:
            found[at] = min(wanted[at], left)
            left -= found[at]
    return found
