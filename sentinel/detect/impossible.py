"""ImpossibleFrame: a rank that writes frames which no rank can write."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from sentinel.detect.declaration import Declaration
from sentinel.detect.detector import State


class ImpossibleFrame(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Frames whose checksum is right and whose content is impossible: left out when they are read, and reported here.

    What is impossible needs no baseline. All that one rank writes within the quiet steps of the rule is one episode.
    """

    declares: ClassVar[Declaration] = Declaration(
        over="frames",
        summary="frames of a rank whose checksum is right and whose content is impossible",
        statistics=("frames_left_out",),
    )

    def state(self, num_series: int) -> State:
        """Return no arrays: what is impossible has no baseline."""
        return {}
