"""Sighting: a tensor of the running forward at one site, and the entry and row that it is measured under.

The black box measures the borders of stem, blocks and head at every step, under their own names. Where modules are switched
on later, the module that makes a border's tensor sees it first: its row then becomes the border's, so that no series breaks
and no tensor stands twice. Where modules are measured from the first step on, its row has the module's name, and keeps it
when they are switched off: the border then measures it under that name. A module that is called more than once in a forward
lends none, for its name has other tensors too.
"""

from __future__ import annotations

from sentinel.collect.hooks.gradient_taps import GradientTap
from sentinel.collect.rows.tensor_table import TensorEntry


class Sighting:
    """One tensor at one site of the running forward."""

    __slots__ = ("entry", "hook", "is_border", "row", "serial")

    def __init__(self, entry: TensorEntry, *, is_border: bool = False) -> None:
        self.entry = entry
        self.is_border = is_border
        """The site is a border itself; not only that its tensor is one behind it."""
        self.row = -1
        """In the rows of the running step; -1: it is not measured."""
        self.hook: GradientTap | None = None
        """Waits for its gradient."""
        self.serial = 0
        """Of the ticket on which a compiled graph hands its gradient over; 0: none does."""
