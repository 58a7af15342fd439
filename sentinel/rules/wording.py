"""Anomalies in words: what a person reads first, in a page or a log line."""

from __future__ import annotations

import math

from sentinel.anomaly import Anomaly

_MUCH = 1000.0


def number(value: float | None) -> str:
    """Return a number with the digits a person needs: `3.42`, `1.2e-07`, `nan`."""
    if value is None:
        return "unknown"
    return str(value) if not math.isfinite(value) else f"{value:.4g}"


def count(n: int, noun: str) -> str:
    """Return `1 value`, `2 values`."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def subject(kind: str, name: str, statistic: str) -> str:
    """Return what the value is: `loss`, or `norm of wgrad layers.3.mlp.weight`."""
    if kind == "scalar":
        return name
    label = {"kurtosis": "kurtosis", "absmax": "largest absolute value", "zeros": "share of zeros"}.get(statistic, statistic)
    return f"{label} of {kind} {name}"


def excursion(
    kind: str, name: str, statistic: str, value: float, baseline: float, score: float, direction: int, why: str
) -> str:
    """Return the message of a finite onset: value, baseline and score in words."""
    text = f"{subject(kind, name, statistic)} is {number(value)}"
    if math.isfinite(baseline):
        ratio = value / baseline if baseline and value / baseline > 0 else math.nan
        if math.isfinite(ratio) and ratio >= 1.0 and direction >= 0:
            how = f"{number(ratio)} times" if ratio < _MUCH else f"{ratio:.1e} times"
            text += f", {how} its baseline {number(baseline)}"
        elif math.isfinite(ratio) and 0 < ratio < 1.0 and direction <= 0:
            text += f", 1/{number(1.0 / ratio)} of its baseline {number(baseline)}"
        else:
            text += f", its baseline {number(baseline)}"
    text += f" (score {number(score)}, 1 is anomalous)"
    return f"{text}; {why}" if why else text


def nonfinite(
    kind: str, name: str, num_nan: int, num_inf: int, num_elements: int, rank: int, micro_step: int | None, skipped: bool
) -> str:
    """Return the message of a tensor with values that are no numbers."""
    what = " and ".join(
        part for part in (f"{num_nan} NaN" if num_nan else "", f"{num_inf} infinite" if num_inf else "") if part
    )
    text = f"{kind} {name} holds {what} of {count(num_elements, 'value')} on rank {rank}"
    if micro_step is not None:
        text += f", micro-step {micro_step}"
    return text + ("; the optimizer skipped this step" if skipped else "")


def bad_scalar(name: str, text: str, ranks: tuple[int, ...], num_ranks: int) -> str:
    """Return the message of a scalar that is no number."""
    where = f"on rank {ranks[0]}" if len(ranks) == 1 else f"on {len(ranks)} of {num_ranks} ranks"
    return f"{name} is {text} {where}"


def ending(onset: Anomaly, lasted: int, settled: bool, goes_on_as: str = "") -> str:
    """Return the message of an episode's end."""
    named = onset.tag_name if onset.kind == "scalar" else f"{onset.kind} {onset.tag_name}"
    what = onset.message.split(" is ", 1)[0] if onset.baseline is not None else named
    if settled:
        return f"{what} settled at a new level, which is the new normal, after {count(lasted, 'step')}"
    if goes_on_as:
        return f"{what} was anomalous in {count(lasted, 'step')} and is no more alone; goes on as {goes_on_as}"
    return f"{what} is back to normal; it was anomalous in {count(lasted, 'step')}"
