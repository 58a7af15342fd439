"""An anomaly in words: its value, its place, both."""

from __future__ import annotations

from collections.abc import Sequence

from sentinel.anomaly import Anomaly, is_liveness, is_nonfinite

_ALL_DIGITS = 17
"""Digits with which two different doubles are different words."""
_VALUE_WORDS = {"nan": "NaN", "inf": "inf", "-inf": "-inf"}


def value_words(anomaly: Anomaly) -> str:
    """`NaN`, `inf`, or `norm 12.5`"""
    if not is_nonfinite(anomaly):
        return f"{anomaly.statistic} {short_number(anomaly.value)}".lstrip()
    if anomaly.value_text:
        return _VALUE_WORDS.get(anomaly.value_text, anomaly.value_text)
    return "inf" if anomaly.statistic == "infs" else "NaN"


def short_number(value: float | None) -> str:
    """`12.5`; `nothing` where there is none."""
    return "nothing" if value is None else f"{value:.4g}"


def told_apart(value: float, other: float, digits: int = 4) -> tuple[str, str]:
    """Return two numbers with the fewest digits, from `digits` on, that tell them apart; equal ones are equal words."""
    words = (f"{value:.{digits}g}", f"{other:.{digits}g}")
    while words[0] == words[1] and value != other and digits < _ALL_DIGITS:
        digits += 1
        words = (f"{value:.{digits}g}", f"{other:.{digits}g}")
    return words


def against_words(value: float | None, baseline: float | None) -> str:
    """` 5.2 against 2.1`, ` 0.20572 against 0.20568`, ` 3, exactly its baseline`; what is not known is left out."""
    if value is None or baseline is None:
        return "".join(
            f" {word}{short_number(one)}" for word, one in (("", value), ("against ", baseline)) if one is not None
        )
    if value == baseline:
        return f" {short_number(value)}, exactly its baseline"
    return " {} against {}".format(*told_apart(value, baseline))


def where_words(rank: int | None, micro_step: int | None, step: int, ranks: Sequence[int] = ()) -> str:
    """`on rank 3, micro_step 1, step 41`, or `at step 41` where ranks were merged; ranks: one of these"""
    words = [] if rank is None else [f"rank {rank}"]
    if ranks:
        words = ["rank " + " or ".join(map(str, ranks))]
    if micro_step is not None:
        words.append(f"micro_step {micro_step}")
    words.append(f"step {step}")
    return ("at " if rank is None else "on ") + ", ".join(words)


def place_words(anomaly: Anomaly) -> str:
    """`activation of blocks.2: NaN on rank 3, micro_step 1, step 41`; of ranks and rows that do not come, their message."""
    if is_liveness(anomaly) and anomaly.message:
        return anomaly.message
    what = anomaly.tag_name if anomaly.kind == "scalar" else f"{anomaly.kind} of {anomaly.tag_name}"
    return f"{what}: {value_words(anomaly)} {where_words(anomaly.rank, anomaly.micro_step, anomaly.step)}"
