"""Tests of rules as YAML: inputs, and the anomalies and incidents expected of them; every mistake with FILE:LINE."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sentinel.anomaly import Severity
from sentinel.document import BrokenDocument, Located, Problem, read_document, show
from sentinel.file_keys import RULE_TESTS, belongs
from sentinel.known_words import nearest
from sentinel.rules.language.notation import BadNotation, expand
from sentinel.rules.language.schema import RULE_KINDS, RULE_STATISTICS, VALUE

FILE_KEYS = ("rules", "builtin", "tests")
TEST_KEYS = (
    "name", "ranks", "first_step", "skipped", "noise", "input", "expect", "expect_incidents", "only", "min_severity",
)  # fmt: skip
SERIES_KEYS = ("scalar", "tensor", "kind", "statistic", "values", "rank", "noise")
EXPECT_KEYS = ("rule", "step", "scalar", "tensor", "kind", "statistic", "rank", "severity", "detector")
INCIDENT_KEYS = ("opened", "verdict", "state", "severity", "skip_steps")
SUSPECTS = ("batch", "model", "precision", "hardware", "unknown")
STATES = ("open", "resolved", "settled", "merged")
SEVERITIES = tuple(severity.value for severity in Severity)
MAX_RANKS = 1024


class TestSeries(msgspec.Struct, frozen=True, kw_only=True):
    """What one scalar, or one tensor, was at each step."""

    name: str
    kind: str
    values: dict[str, tuple[float | None, ...]]
    """Statistic -> values, the first of them at the first step."""
    ranks: tuple[int, ...] = ()
    """Ranks that say so; empty: all."""
    noise: float = 0.0
    """Relative standard deviation of what is multiplied to the values."""
    line: int = 0


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """One anomaly's onset, or one incident, as a test expects it: only what is given is compared."""

    fields: dict[str, Any]
    line: int = 0


class RuleTest(msgspec.Struct, frozen=True, kw_only=True):
    """One test."""

    name: str
    line: int
    num_ranks: int = 1
    first_step: int = 0
    skipped: tuple[int, ...] = ()
    """Steps that the optimizer skipped."""
    series: tuple[TestSeries, ...]
    expect: tuple[Expected, ...] | None = None
    """Onsets of at least `min_severity`, all of them; None: not looked at."""
    incidents: tuple[Expected, ...] | None = None
    only: tuple[str, ...] = ()
    """Rules whose onsets are compared; empty: all."""
    min_severity: Severity = Severity.WARNING

    @property
    def num_steps(self) -> int:
        """Steps until the last value of any series."""
        return max((len(values) for one in self.series for values in one.values.values()), default=0)


class RuleTestFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of tests."""

    path: str
    rules: tuple[str, ...]
    """Packs under test, relative paths made absolute by the place of the file."""
    builtin: bool
    rule_tests: tuple[RuleTest, ...]


def read_rule_tests(path: str | Path) -> tuple[RuleTestFile, list[Problem]]:
    """Return the tests of a file, and everything that is wrong in it; with problems the tests are not to be run."""
    path = Path(path)
    reader = _RuleTestReader(str(path))
    nothing = RuleTestFile(path=str(path), rules=(), builtin=True, rule_tests=())
    try:
        document = read_document(path)
    except BrokenDocument as error:
        return nothing, [Problem(str(path), error.line, str(error))]
    if document is None or not isinstance(document.value, dict):
        return nothing, [Problem(str(path), 1, 'expected "tests:" and a list of tests')]
    reader.keys(document, FILE_KEYS, "")
    rules: list[str] = []
    for item in reader.list_of(document, "rules"):
        if isinstance(item.value, str):
            rules.append(item.value)
        else:
            hint = "; rules stand in a file of their own, named here" if isinstance(item.value, dict) else ""
            reader.complain(item, f"rules: expected paths or names of packs, got {show(item.plain())}{hint}")
    builtin = document.value.get("builtin")
    if builtin is not None and not isinstance(builtin.value, bool):
        reader.complain(builtin, f'"builtin" must be true or false, got {builtin.value!r}')
    tests = reader.list_of(document, "tests")
    if not tests:
        reader.complain(document, 'expected "tests:" and a list of tests, got none')
    rule_tests = [rule_test for at, item in enumerate(tests) if (rule_test := reader.rule_test(item, at)) is not None]
    names: dict[str, int] = {}
    for rule_test in rule_tests:
        if rule_test.name in names:
            reader.problems.append(
                Problem(
                    str(path),
                    rule_test.line,
                    f'test "{rule_test.name}" is there twice, first at line {names[rule_test.name]}',
                )
            )
        names.setdefault(rule_test.name, rule_test.line)
    found = RuleTestFile(
        path=str(path),
        rules=tuple(_beside(path, one) for one in rules),
        builtin=builtin is None or builtin.value is not False,
        rule_tests=tuple(rule_tests),
    )
    return found, sorted(reader.problems, key=lambda problem: problem.line)


def _beside(path: Path, rules: str) -> str:
    # A name of a pack that comes with Sentinel is no path; what lies beside the tests goes before it.
    beside = path.parent / rules
    return str(beside) if beside.exists() or "/" in rules or rules.endswith((".yaml", ".yml")) else rules


class _RuleTestReader:
    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[Problem] = []
        self._of = ""

    def complain(self, item: Located, message: str) -> None:
        self.problems.append(Problem(self.file, item.where, f"{self._of}{message}"))

    def keys(self, item: Located, known: Sequence[str], where: str) -> None:
        for key, value in item.value.items():
            if key not in known:
                hint = ("" if where or self._of else belongs(key, RULE_TESTS)) or nearest(key, known)
                self.complain(value, f"{where}unknown key {show(key)}{hint}")

    def list_of(self, item: Located, key: str) -> list[Located]:
        """Return the items of a list; a single value stands for a list of one."""
        found = item.value.get(key)
        if found is None or found.value is None:
            return []
        return found.value if isinstance(found.value, list) else [found]

    def rule_test(self, item: Located, at: int) -> RuleTest | None:
        self._of = ""
        if not isinstance(item.value, dict):
            self.complain(item, f'a test must be a mapping with "name", "input" and "expect", got {item.plain()!r}')
            return None
        name = self._text(item, "name") or f"test {at + 1}"
        self._of = f'test "{name}": '
        before = len(self.problems)
        self.keys(item, TEST_KEYS, "")
        num_ranks = self._count(item, "ranks", 1, 1, MAX_RANKS)
        noise = self._share(item, 0.0)
        inputs = self.list_of(item, "input")
        series = [one for entry in inputs if (one := self._series(entry, noise, num_ranks)) is not None]
        first: dict[tuple[object, ...], TestSeries] = {}
        for one in series:
            for key in ((one.kind, one.name, statistic, one.ranks) for statistic in one.values):
                if (other := first.setdefault(key, one)) is not one:
                    again = f'input "{one.name}" is there twice, first at line {other.line}: only one could count'
                    self.problems.append(Problem(self.file, one.line, f"{self._of}{again}"))
                    break
        if not inputs:
            self.complain(item, '"input" is missing; expected a list of series, each a "scalar" or "tensor" with "values"')
        reported = "expect" in item.value, "expect_incidents" in item.value
        if not any(reported):
            self.complain(item, 'expects nothing; add "expect: []" to say that nothing may be told')
        skipped = [entry.value for entry in self.list_of(item, "skipped")]
        if not all(isinstance(step, int) and not isinstance(step, bool) for step in skipped):
            self.complain(item.value["skipped"], f'"skipped" must be steps, got {skipped!r}')
        only = [entry.value for entry in self.list_of(item, "only")]
        least = self._word(item, "min_severity", SEVERITIES) or "warning"
        expect = tuple(self._expected(entry) for entry in self.list_of(item, "expect")) if reported[0] else None
        incidents = tuple(self._incident(entry) for entry in self.list_of(item, "expect_incidents")) if reported[1] else None
        if len(self.problems) > before:
            return None
        return RuleTest(
            name=name,
            line=item.line,
            num_ranks=num_ranks,
            first_step=self._count(item, "first_step", 0, 0, 2**40),
            skipped=tuple(skipped),
            series=tuple(series),
            expect=expect,
            incidents=incidents,
            only=tuple(map(str, only)),
            min_severity=Severity(least),
        )

    def _series(self, item: Located, noise: float, num_ranks: int) -> TestSeries | None:
        if not isinstance(item.value, dict):
            self.complain(item, f'input: expected a mapping with "scalar" or "tensor", got {item.plain()!r}')
            return None
        self.keys(item, SERIES_KEYS, "input: ")
        named = [key for key in ("scalar", "tensor") if key in item.value]
        if len(named) != 1:
            self.complain(item, 'input: expected "scalar: NAME" or "tensor: NAME", one of them')
            return None
        name = self._text(item, named[0])
        kind = "scalar" if named == ["scalar"] else self._word(item, "kind", RULE_KINDS) or ""
        if not kind and "kind" not in item.value:
            self.complain(item, f'input "{name}": a tensor needs a "kind": wgrad, activation, ...')
        statistic = self._word(item, "statistic", RULE_STATISTICS) or (VALUE if kind == "scalar" else "norm")
        written = item.value.get("values")
        if written is None:
            self.complain(item, f'input "{name}": "values" is missing; expected such as "1+0.1x20 5 1x10"')
            return None
        several = written.value if isinstance(written.value, dict) else {statistic: written}
        values = {}
        for key, entry in several.items():
            if key not in RULE_STATISTICS or (key == VALUE) != (kind == "scalar"):
                known = [one for one in RULE_STATISTICS if (one == VALUE) == (kind == "scalar")]
                self.complain(entry, f'input "{name}": unknown statistic "{key}"{nearest(key, known)}')
            try:
                plain = entry.plain()
                values[key] = tuple(expand(" ".join(map(str, plain)) if isinstance(plain, list) else str(plain)))
            except BadNotation as error:
                self.complain(entry, f'input "{name}": values: {error}')
        ranks = [entry.value for entry in self.list_of(item, "rank")]
        if not all(isinstance(rank, int) and 0 <= rank < num_ranks for rank in ranks):
            what = f'expected ranks of 0 to {num_ranks - 1}, got {ranks!r}; "ranks: N" of the test says how many there are'
            self.complain(item.value["rank"], f'input "{name}": {what}')
        return TestSeries(
            name=name, kind=kind, values=values, ranks=tuple(ranks), noise=self._share(item, noise), line=item.line
        )

    def _expected(self, item: Located) -> Expected:
        words = {"severity": SEVERITIES, "kind": RULE_KINDS, "statistic": RULE_STATISTICS}
        found = self._fields(item, "expect", EXPECT_KEYS, words, ("step", "rank"))
        if "rule" not in found:
            self.complain(item, 'expect: "rule" is missing')
        return Expected(fields=found, line=item.line)

    def _incident(self, item: Located) -> Expected:
        words = {"severity": SEVERITIES, "verdict": SUSPECTS, "state": STATES}
        found = self._fields(item, "expect_incidents", INCIDENT_KEYS, words, ("opened",))
        return Expected(fields=found, line=item.line)

    def _fields(
        self, item: Located, what: str, known: Sequence[str], words: Mapping[str, Sequence[str]], numbers: Sequence[str]
    ) -> dict[str, Any]:
        if not isinstance(item.value, dict):
            self.complain(item, f"{what}: expected a mapping such as {{{known[0]}: ...}}, got {item.plain()!r}")
            return {}
        self.keys(item, known, f"{what}: ")
        found = {}
        for key, entry in item.value.items():
            if key in words:
                found[key] = self._word(item, key, words[key])
            elif key in numbers and (isinstance(entry.value, bool) or not isinstance(entry.value, int)):
                self.complain(entry, f'{what}: "{key}" must be a whole number, got {entry.plain()!r}')
            else:
                found[key] = entry.plain()
        return found

    def _text(self, item: Located, key: str) -> str:
        found = item.value.get(key)
        if found is None:
            return ""
        if not isinstance(found.value, str):
            self.complain(found, f'"{key}" must be text, got {found.plain()!r}')
            return ""
        return found.value

    def _word(self, item: Located, key: str, known: Sequence[str]) -> str:
        word = self._text(item, key)
        if word and word not in known:
            self.complain(item.value[key], f'unknown {key} "{word}"{nearest(word, known)}')
            return ""
        return word

    def _count(self, item: Located, key: str, usual: int, least: int, most: int) -> int:
        def is_fine(one: object) -> bool:
            return isinstance(one, int) and least <= one <= most

        return int(self._number(item, key, usual, is_fine, f"{least} to {most}"))

    def _share(self, item: Located, usual: float) -> float:
        return float(self._number(item, "noise", usual, lambda one: 0 <= one < 1, "a share from 0 to 1"))

    def _number(self, item: Located, key: str, usual: float, is_fine: Callable[[Any], bool], wanted: str) -> float:
        found = item.value.get(key)
        if found is None:
            return usual
        if isinstance(found.value, bool) or not isinstance(found.value, int | float) or not is_fine(found.value):
            self.complain(found, f'"{key}" must be {wanted}, got {found.plain()!r}')
            return usual
        return found.value
