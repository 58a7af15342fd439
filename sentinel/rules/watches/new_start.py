"""Whether an attempt goes on with the weights of the one before, or trains anew, where what was learned says nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sentinel.step_view import StepView

FIRST_STEPS = 16
"""Steps by which an attempt's first judged step may follow the one that a rank says it begins with: those between were late,
or lost. Smaller: a resume that lost them counts as a new training; larger: a new training as a resume."""


def begins_anew(view: StepView, last_step: int) -> bool:
    """Return whether the first step of an attempt begins a training of its own. last_step: the newest judged before it.

    A step that goes on from there is a resume, and one that goes back is none, unless a rank says that it loaded our state
    (`monitor.load_state_dict`), or that its trainer begins behind step 1 (`first_step`, `set_step`, an adapter) and has not
    lost more than half of the way: a fine-tune from an early checkpoint is another training. A log has its steps alone.
    """
    if view.step > last_step:
        return False
    descriptors = [part.descriptor for part in view.parts]
    if any(0 <= view.step - one.resumed_step <= FIRST_STEPS for one in descriptors if one.resumed_step >= 0):
        return False
    begins = [one.first_step for one in descriptors] if descriptors else [view.step]
    is_reported = any(first > 1 and 0 <= view.step - first <= FIRST_STEPS for first in begins)
    return not is_reported or 2 * view.step < last_step
