"""Lines that trainers print: `step 10/100 | loss 3.2 | norm 1.1`, `iter 100: loss 2.3`, Megatron's, torchtitan's, ..."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from sentinel.ingest.log_columns import is_aside, named_role, normalised
from sentinel.ingest.log_rows import Rows, number
from sentinel.ingest.log_tables import SUMMARY_KEYS

PEEK_LINES = 4096
"""Lines looked at before the first is read, to know what the losses in them are (chosen)."""

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PAIR = re.compile(
    r"""(?P<name>[A-Za-z_|](?:[\w./|-]|[ ](?=[A-Za-z_])(?!(?:nan|inf|infinity)\b))*+)   # words, one space between
        ["'`]?\s*(?:[:=]\s*|\s+|(?=\[))["'\[(]*\s*
        (?P<number>(?>[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?
                     |[-+]?(?:nan|inf(?:inity)?)(?:\(ind\))?))
        (?![\w%.])""",
    re.VERBOSE | re.IGNORECASE,
)
_LLM_C = re.compile(r"s:(\d+) (tel|eval|trl):(\S+)(?: lr:(\S+))?(?: norm:(\S+))?\s*$")
_NOT_OF_STEP = frozenset(
    {"best", "min", "max", "minimum", "maximum", "avg", "average", "mean", "smooth", "smoothed", "ema", "nan", "skipped",
     "number", "of", "per", "scale", "aux", "router", "balance", "balancing", "z", "l1", "l2", "reg", "weight", "mtp",
     "remaining", "previous", "last", "every", "num", "consumed"}
)  # fmt: skip
"""Words before a known name that make another thing of it: `best loss`, `number of nan iterations`."""


def read_lines(rows: Rows, lines: Iterable[tuple[int, str]]) -> None:
    """Read printed lines. A row is a step of which the training's own loss, norm or rate is told.

    What an evaluation says goes to the row of its step, or to the next one. Other lines are passed over.
    """
    lines = iter(lines)
    first = list(itertools.islice(lines, PEEK_LINES))
    # nanoGPT prints estimates of both splits' losses now and then; where all lines are of that form they are the points.
    has_points = any(_tells_points(line) for _, line in first)
    step: float | None = None
    row_step: float | None = None
    held: dict[str, float] = {}
    """What evaluations said since the last row."""
    for _, line in itertools.chain(first, lines):
        if any(key in line for key in SUMMARY_KEYS):
            continue
        found = list(pairs_of(line))
        told = next((value for role, _, value in found if role == "step"), None)
        if told is not None:
            step = told
        aside = {name: value for role, name, value in found if role == "aside"}
        measured = {role: value for role, _, value in reversed(found) if role in ("loss", "grad_norm", "lr")}
        if aside and "loss" in measured and has_points and _is_estimate(found):
            aside["eval/train_loss"] = measured.pop("loss")
        if not measured:
            held |= aside
            continue
        is_more = rows.num_rows > 0 and step is not None and step == row_step and not any(map(rows.has, measured))
        if not is_more:
            rows.add()
            row_step = step if told is not None or step != row_step else None
            if row_step is not None:
                rows.put("step", row_step)
            for name, value in held.items():
                rows.put(name, value)
            held = {}
        epoch = next((value for role, _, value in found if role == "epoch"), None)
        for name, value in (*measured.items(), *aside.items(), *((("epoch", epoch),) if epoch is not None else ())):
            rows.put(name, value)
    if held and not rows.num_rows:
        rows.add()
    for name, value in held.items():
        if not rows.has(name):
            rows.put(name, value)


def _tells_points(line: str) -> bool:
    found = list(pairs_of(line))
    return any(role == "loss" for role, _, _ in found) and not any(role == "aside" for role, _, _ in found)


def _is_estimate(found: Sequence[tuple[str, str, float]]) -> bool:
    """Whether a loss beside an evaluation's is one too: `train loss`. Keras tells its own, `loss`, beside `val_loss`."""
    return any(role == "loss" and "train" in normalised(name).split("_") for role, name, _ in found)


def pairs_of(line: str) -> Iterator[tuple[str, str, float]]:
    """Yield (role, name, number) of what a line says: role `loss`, `grad_norm`, `lr`, `step`, `epoch`, or `aside`."""
    if "\x1b" in line:
        line = _ANSI.sub("", line)
    brief = _LLM_C.match(line)
    if brief is not None:
        yield from _llm_c(brief)
        return
    told = set()
    for match in _PAIR.finditer(line):
        role = _role_of(match["name"])
        if role is None:
            continue
        kind, name = role
        if kind != "aside" and kind in told:
            continue
        value = number(match["number"].replace(",", ""))
        if value is not None:
            told.add(kind)
            yield kind, name, value


def _llm_c(match: re.Match[str]) -> Iterator[tuple[str, str, float]]:
    step, what, value, lr, norm = match.groups()
    try:
        numbers = [number(text) if text else None for text in (step, value, lr, norm)]
    except ValueError:
        return
    of_step, of_value, of_lr, of_norm = numbers
    if of_step is not None:
        yield "step", "step", of_step
    if of_value is not None:
        role = "loss" if what == "trl" else "aside"
        yield role, {"trl": "loss", "tel": "val_loss", "eval": "eval/accuracy"}[what], of_value
    if of_lr is not None:
        yield "lr", "lr", of_lr
    if of_norm is not None:
        yield "grad_norm", "grad_norm", of_norm


def _role_of(phrase: str) -> tuple[str, str] | None:
    """Return (role, name) of the words before a number: the whole of them, else the last ones."""
    words = phrase.replace("|", " ").split()
    for first in range(max(0, len(words) - 4), len(words)):
        name = " ".join(words[first:])
        plain = normalised(name)
        if is_aside(plain) and "loss" in plain:
            return "aside", name.replace(" ", "_")
        role = named_role(name)
        if role is None or plain in ("value", "i", "idx", "index", "s", "mse", "it"):
            continue
        if _NOT_OF_STEP.intersection(normalised(" ".join(words[:first])).split("_")):
            return None
        return role[0], name
    return None
