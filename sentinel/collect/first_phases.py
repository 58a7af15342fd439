"""Optimizers that take one step in two phases: the first moves the weights and is no step (SAM, say)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sentinel.collect.hooks.optimizers import Params, WatchedOptimizer

LEARNING_STEPS = 3
"""Steps in which weights that moved without a step of an optimizer are taken for its first phase. Too small: an optimizer
that begins late is missed; too large: a trainer that goes back to weights it has kept is taken for one."""
NUM_LOOKED_AT = 4
"""Parameters of each optimizer that are looked at later; a bound on time: an optimizer of two phases moves nearly all."""
MAX_SUSPECTS = 3
"""Times in a row that weights must move before a step to be a first phase later too. Too small: a trainer that restores
weights counts as one; too large: its steps are read wrongly for longer."""


class FirstPhases:
    """Decides whether gradients are cleared behind a first phase, or were thrown away."""

    def __init__(self, model_params: Callable[[], Params]) -> None:
        """model_params: the parameters of the model, now."""
        self._model_params = model_params
        self._noted_version = -1
        """Sum of the versions of all weights when a backward ended last; -1: they were not summed up."""
        self._has_ended = False
        """A first phase was over in this step."""
        self._is_in = False
        """The weights were moved by a first phase, and no backward has begun since."""
        self._is_two_phase = False
        """An optimizer with two phases was seen."""
        self._num_plain_steps = 0
        self._was_suspect = False
        """Since an optimizer stepped last, weights were moved without a step."""
        self._num_suspects = 0
        """Of that, how often before a step each, without one that was as any."""

    @property
    def _is_learning(self) -> bool:
        return self._is_two_phase or self._num_plain_steps < LEARNING_STEPS

    def moved(self) -> None:
        """An optimizer said that its first phase has moved the weights."""
        self._is_in = self._is_two_phase = True

    def over(self) -> None:
        """A backward began, or an optimizer stepped: what is cleared next is not what a first phase leaves."""
        self._is_in = False

    def backward_ended(self, watched: Sequence[WatchedOptimizer]) -> None:
        """Note how the weights stand."""
        most = None if self._is_learning else NUM_LOOKED_AT
        if self._is_learning:
            self._noted_version = self._version_of_all()
        for one in watched:
            one.note_version(most)

    def have_moved(self, dirty: Sequence[WatchedOptimizer]) -> bool:
        """Whether the weights were moved since the last backward, although none of these optimizers stepped.

        dirty: those whose gradients are about to be cleared; none: there is no optimizer to look at.
        """
        if self._is_in:
            return True
        if not dirty:
            return self._is_learning and self._noted_version not in (-1, self._version_of_all())
        if not any(one.has_moved for one in dirty):
            return False
        if self._is_learning:
            return True
        self._num_suspects += not self._was_suspect
        self._was_suspect = True
        return self._num_suspects >= MAX_SUSPECTS

    def ended(self) -> None:
        """A first phase is over: its gradients are cleared."""
        self._is_two_phase = self._has_ended = True

    def close(self, *, has_stepped: bool) -> None:
        """Forget the step that ended; has_stepped: an optimizer has in it."""
        if has_stepped:
            self._num_plain_steps += not self._has_ended
            self._num_suspects *= self._was_suspect
            self._was_suspect = False
        self._has_ended = self._is_in = False

    def _version_of_all(self) -> int:
        return sum(p._version for p in self._model_params())
