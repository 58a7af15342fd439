"""An anomaly in words: its value, its place, both."""

from __future__ import annotations

from collections.abc import Sequence

from sentinel.anomaly import Anomaly, is_liveness, is_nonfinite

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
