"""Several losses of one run: a total that is to fall, and terms or sides of a game of which one may rise for another."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SPLIT = re.compile(r"[/. ]+")
_TOTAL = frozenset({"loss", "total_loss", "loss_total", "train_loss", "training_loss", "total"})
_OF_EVALUATION = re.compile(r"(^|[/._ -])(eval|val|valid|validation|test|dev)([/._ -]|$)", re.IGNORECASE)


def is_of_evaluation(name: str) -> bool:
    """Return whether a loss is of data that nobody trains on: that it rises while others fall says something."""
    return bool(_OF_EVALUATION.search(name))


def parts(names: Sequence[str]) -> list[bool]:
    """Return for each logged loss whether it is a term of a sum or one side of a game.

    The total is the one name of fewest parts that says no more than that it is the loss (`loss`, `train/loss` beside
    `train/kl_loss`); where several do (`G/loss`, `D/loss`), none is. What an evaluation logs is no part.
    """
    own = _of_training(names)
    total = total_of(names)
    return [len(own) > 1 and i in own and i != total for i in range(len(names))]


def total_of(names: Sequence[str]) -> int | None:
    """Return the place of the total among logged losses; None where none is, or several are."""
    totals = _totals(names, _of_training(names))
    return totals[0] if len(totals) == 1 else None


def sides(names: Sequence[str]) -> list[bool]:
    """Return for each logged loss whether it is the loss of one of several players: `G/loss`, `D/loss`."""
    totals = _totals(names, _of_training(names))
    return [len(totals) > 1 and i in totals for i in range(len(names))]


def _of_training(names: Sequence[str]) -> list[int]:
    return [i for i, name in enumerate(names) if not is_of_evaluation(name)]


def _totals(names: Sequence[str], own: Sequence[int]) -> list[int]:
    """Return the places of the names of fewest parts that say no more than that they are a loss, of those in `own`."""
    split = [_SPLIT.split(name.lower()) for name in names]
    named = [i for i in own if split[i][-1] in _TOTAL]
    least = min((len(split[i]) for i in named), default=0)
    return [i for i in named if len(split[i]) == least]
