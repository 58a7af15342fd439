"""StepCount: the number of the running step, in the trainer's own count."""

from __future__ import annotations


class StepCount:
    """Counts the steps of this process; the trainer may set the number at any time."""

    def __init__(self, first_step: int) -> None:
        self.current = first_step
        """Number of the running step; between two steps, the number of the next one."""
        self.first = first_step
        """Number of the first step of this process; changes when the trainer sets another one during that step."""
        self.num_begun = 0
        """Steps that began in this process."""

    def renumber(self, step: int) -> bool:
        """Give a number to the running step, or to the next; True where it is the first step that got another one."""
        self.current = step
        if self.num_begun:
            return False
        self.first = step
        return True

    def resume(self, step: int) -> None:
        """Go on counting behind a checkpoint; step: the one that comes next."""
        self.current = self.first = step
