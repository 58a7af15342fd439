"""Which step runs, by the number that the trainer itself gives to it."""

from __future__ import annotations


class StepCount:
    """Counts the steps of this process; a trainer may say at any time which number is right."""

    def __init__(self, first_step: int) -> None:
        self.current = first_step
        """Number of the running step; between steps of the one that comes next."""
        self.first = first_step
        """Number of the first step of this process, as far as anybody knows by now."""
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
