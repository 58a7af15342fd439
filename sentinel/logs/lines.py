"""Lines that trainers print: `step 10/100 | loss 3.2 | norm 1.1`, `iter 100: loss 2.3`, Megatron's, torchtitan's, ..."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from sentinel.logs.columns import channels, is_aside, is_measured, named_role, normalised
from sentinel.logs.rows import CANONICAL, Rows, number
from sentinel.logs.tables import SUMMARY_KEYS

PEEK_LINES = 4096
"""Lines held and looked at, before the first is read, to know what the losses in them are. Too small: a long preamble hides
the first row; too large: memory and a late first row."""
_ROW_CHARS = 400
"""Characters from which a line is not tried as a row of a table; a bound on the time of its expression."""
_GAP_CHARS = 120
"""Characters before a number in which its name is looked for; a bound on time: names are shorter."""

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_NUMBER = re.compile(
    r"""(?<![\w./-])
        (?P<number>(?>[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?
                     |[-+]?(?:nan|inf(?:inity)?)(?:\(ind\))?))
        (?![\w%.])(?P<counter>\s*/)?""",
    re.VERBOSE | re.IGNORECASE,
)
_NAME_BEFORE = re.compile(
    r"""(?<![\w.])(?P<name>[A-Za-z_|](?:[\w./|-]|[ ](?=[A-Za-z_]))*+)   # words, one space between
        ["'`]?\s*(?:[:=]\s*|\s+|(?=\[))["'\[(]*\s*
        (?:(?:\w+\.)*(?:tensor|[a-z]*array|[a-z]*float\d*|item)\([\[(]*\s*)?$    # tensor(2.5), np.float64(2.5)""",
    re.VERBOSE | re.IGNORECASE,
)
_TABLE_ROW = re.compile(r"\s*[|\u2502\u2503]\s*([A-Za-z_][\w./ -]*?)\s*[|\u2502\u2503]\s*([-+.\w]+)\s*[|\u2502\u2503]?\s*$")
_LLM_C = re.compile(r"s:(\d+) (tel|eval|trl):(\S+)(?: lr:(\S+))?(?: norm:(\S+))?\s*$")
_KARPATHY = re.compile(r"(\d+) (train|val|hella) (\S+)\s*$")
_WORDS = re.compile(r"[A-Za-z_]+")
_SECTION = re.compile(
    r"(?<![\w./-])(?:(val)(?:id(?:ation|ating)?)?|(eval)(?:uat(?:ion|ing))?|(test)(?:ing)?|(dev)|(hold-?out)|(held-?out))(?![\w./-])",
    re.IGNORECASE,
)
_NOT_OF_STEP = frozenset(
    {"best", "min", "max", "minimum", "maximum", "avg", "average", "mean", "smooth", "smoothed", "ema", "nan", "skipped",
     "number", "of", "per", "scale", "aux", "router", "balance", "balancing", "z", "l1", "l2", "reg", "weight", "mtp",
     "remaining", "previous", "last", "every", "num", "consumed"}
)  # fmt: skip
"""Words before a known name that make another thing of it: `best loss`, `number of nan iterations`."""
_VERBS = ("is", "was", "at", "now")
_NO_NAMES = ("value", "i", "idx", "index", "s", "mse", "it")
"""What a column may be called and a word in a line is not."""


class _NumberName(NamedTuple):
    """What the text before a number calls it."""

    role: str
    """`loss`, `grad_norm`, `lr`, `step`, `epoch` or `aside`; empty: none of them."""
    name: str
    section: str
    """What of an evaluation stands in the text outside of the name: `Test set: average loss`; empty: nothing."""


class _GivenNumber(NamedTuple):
    """One number of a line that matters."""

    role: str
    name: str
    value: float


def read_lines(rows: Rows, lines: Iterable[tuple[int, str]]) -> None:
    """Read printed lines. A row is a step whose loss, norm or rate of the training itself is printed.

    What an evaluation says goes to the row of its step, or to the next one. Other lines are passed over.
    """
    lines = iter(lines)
    first = list(itertools.islice(lines, PEEK_LINES))
    dialect = _Dialect([line for _, line in first])
    step: float | None = None
    row_step: float | None = None
    row_line = ""
    first_step: float | None = None
    num_again = 0
    held: dict[str, float] = {}
    """What evaluations said since the last row."""
    for at, line in itertools.chain(first, lines):
        if any(key in line for key in SUMMARY_KEYS):
            continue
        found = dialect.given(line)
        given = next((value for role, _, value in found if role == "step"), None)
        if given is not None:
            step = given
        aside = {name: value for role, name, value in found if role == "aside"}
        measured = {role: value for role, _, value in reversed(found) if role in CANONICAL}
        if aside and "loss" in measured and dialect.has_points and _is_estimate(found):
            aside["eval/train_loss"] = measured.pop("loss")
        # A rate alone, before the first step: a setting.
        if not measured or (not rows.num_rows and given is None and list(measured) == ["lr"]):
            held |= aside
            continue
        is_given = given is not None and given == row_step != first_step and "loss" in measured and rows.has("loss")
        if is_given and not _alike(line, row_line):
            # fairseq's mean of the epoch, or a progress bar beside a logger.
            num_again += 1
            held |= aside
            continue
        is_more = rows.num_rows > 0 and step is not None and step == row_step and not any(map(rows.has, measured))
        if not is_more:
            rows.add(at)
            row_line = line
            row_step = step if given is not None or step != row_step else None
            first_step = row_step if first_step is None else first_step
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
    if num_again:
        rows.notes.append(f"{num_again} lines of another form tell a step again that was told already: left out")


class _Dialect:
    """How one file's lines are to be understood, as its first ones say."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._guessed: dict[str, str] = {}
        self._has_sections = False
        found = [list(self._named(line)) for line in lines]
        # Where every line has the word it says nothing: a logger that is called "test".
        self._has_sections = any(not _section(one) and any(named.role == "loss" for named, _ in one) for one in found)
        self._guessed = _guesses(found)
        given = [self.given(line) for line in lines]
        # nanoGPT prints estimates of both splits' losses now and then; where all lines are of that form they are the points.
        self.has_points = any({role for role, _, _ in one} & {"loss", "aside"} == {"loss"} for one in given)

    def given(self, line: str) -> list[_GivenNumber]:
        """Return what a line says, each role once, of evaluations all."""
        brief = _brief(line)
        if brief is not None:
            return brief
        found = list(self._named(line))
        section = _section(found) if self._has_sections else ""
        given: dict[str, _GivenNumber] = {}
        for named, value in found:
            role, name = named.role or self._guessed.get(named.name, ""), named.name
            if section and role in CANONICAL:
                role, name = ("aside", f"{section}/loss") if role == "loss" else ("", "")
            key = name if role == "aside" else role
            if role and key not in given:
                given[key] = _GivenNumber(role, name, value)
        return list(given.values())

    @staticmethod
    def _named(line: str) -> Iterator[tuple[_NumberName, float]]:
        if "\x1b" in line:
            line = _ANSI.sub("", line)
        row = _TABLE_ROW.match(line) if len(line) < _ROW_CHARS else None
        if row is not None:
            line = f"{row[1]}: {row[2]}"
        begin = 0
        for match in _NUMBER.finditer(line):
            start, text = match.start(), match["number"]
            before = line[max(begin, start - _GAP_CHARS) : start]
            named = _named_before(before, match["counter"] is not None)
            # "number of nan iterations: 0" is one name.
            if text[-1].isalpha() and not named.role and before.rstrip()[-1:] not in (":", "=", "(", "["):
                continue
            begin = match.end("number")
            if named.name or named.section:
                yield named, float(text.replace(",", "").removesuffix("(ind)"))


@lru_cache(maxsize=4096)
def _named_before(text: str, is_counter: bool) -> _NumberName:
    """Return what the text before a number says of it; trainers repeat themselves line by line.

    is_counter: the number is one of so many, `[10/196]`, and what stands before it no name but a heading.
    """
    match = _NAME_BEFORE.search(text)
    role, name, outside = "", "", text
    if match is not None:
        phrase = match["name"]
        role, name, before = _role_of(phrase)
        outside = f"{text[: match.start('name')]} {phrase if is_counter and not role else before}"
    section = _SECTION.search(outside)
    return _NumberName(role, name, next(word for word in section.groups() if word).lower() if section else "")


def _section(found: Sequence[tuple[_NumberName, float]]) -> str:
    """Return what of an evaluation stands before a line's loss."""
    for named, _ in found:
        if named.section:
            return named.section
        if named.role == "loss":
            break
    return ""


def _guesses(found: Iterable[Sequence[tuple[_NumberName, float]]]) -> dict[str, str]:
    """Return name -> role for what no line calls as the field does: `actor/pg_loss`, where there is no other loss."""
    names: Counter[str] = Counter()
    known: set[str] = set()
    for of_line in found:
        known.update(named.role for named, _ in of_line)
        names.update(named.name for named, _ in of_line if not named.role and is_measured(named.name))
    guessed: dict[str, str] = {}
    for role in CANONICAL:
        like = {name: times for name, times in names.items() if role not in known and channels([name])[name] == role}
        most = max(like.values(), default=0)
        if most > 1:
            guessed[min((len(name), name) for name, times in like.items() if 2 * times >= most)[1]] = role
    return guessed


def _is_estimate(found: Sequence[_GivenNumber]) -> bool:
    """Whether a loss beside an evaluation's is one too: `train loss`. Keras tells its own, `loss`, beside `val_loss`."""
    return any(role == "loss" and "train" in normalised(name).split("_") for role, name, _ in found)


def _alike(line: str, other: str) -> bool:
    """Whether two lines are of one form: the same words stand before their losses."""
    heads = [_WORDS.findall(_ANSI.sub("", one[: one.lower().find("loss")])) for one in (line, other)]
    return heads[0] == heads[1]


def _brief(line: str) -> list[_GivenNumber] | None:
    """Return what a line of llm.c's main.log says, or of build-nanogpt's; None: it is no such line."""
    try:
        if (match := _LLM_C.match(line)) is not None:
            step, what, value, lr, norm = match.groups()
            names = {"trl": ("loss", "loss"), "tel": ("aside", "val_loss"), "eval": ("aside", "eval/accuracy")}
            given = [("step", "step", step), (*names[what], value), ("lr", "lr", lr), ("grad_norm", "grad_norm", norm)]
        elif (match := _KARPATHY.match(line)) is not None:
            step, what, value = match.groups()
            names = {"train": ("loss", "loss"), "val": ("aside", "val_loss"), "hella": ("aside", "eval/hella")}
            given = [("step", "step", step), (*names[what], value)]
        else:
            return None
        numbers = [(role, name, number(text)) for role, name, text in given if text]
    except ValueError:
        return []
    return [_GivenNumber(role, name, value) for role, name, value in numbers if value is not None]


def _role_of(phrase: str) -> tuple[str, str, str]:
    """Return (role, name, words before it) of the words before a number: the whole of them, else the last ones."""
    words = phrase.replace("|", " ").split()
    while len(words) > 1 and words[-1].lower() in _VERBS:
        words.pop()
    for first in range(max(0, len(words) - 4), len(words)):
        name, before = " ".join(words[first:]), " ".join(words[:first])
        plain = normalised(name)
        if is_aside(plain) and "loss" in plain:
            return "aside", name.replace(" ", "_"), before
        role = named_role(name)
        if role is None or plain in _NO_NAMES:
            continue
        return ("", name, before) if _NOT_OF_STEP.intersection(normalised(before).split("_")) else (role[0], name, before)
    return "", words[-1] if words else "", " ".join(words[:-1])
