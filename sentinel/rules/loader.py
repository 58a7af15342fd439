"""Read rule packs: YAML, merged by rule name over the built-in default; every error with FILE:LINE."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from sentinel.anomaly import Severity
from sentinel.detect import DETECTORS, known_detectors
from sentinel.detect.dotted import why_not
from sentinel.detect.windowed import RollingMedian
from sentinel.document import BrokenDocument, Located, parse
from sentinel.errors import RuleError, SentinelError
from sentinel.reference import Reference
from sentinel.rules.aggregate_match import read_aggregates
from sentinel.rules.guard import Guarded
from sentinel.rules.schema import ACTIONS, RULE_KINDS, RULE_STATISTICS, VALUE, Match, Pack, Rule

PACKS = Path(__file__).parent / "packs"
"""The packs that come with Sentinel: `default`, and opt-in ones."""

PACK_KEYS = ("rules", "builtin")
RULE_KEYS = (
    "name", "detector", "match", "args", "severity", "actions", "episode_quiet_steps", "enabled", "reference",
    "description",
)  # fmt: skip
MATCH_KEYS = ("kind", "name", "statistic", "rank", "aggregate")
SEVERITIES = tuple(severity.value for severity in Severity)


ReadReference = Callable[[Sequence[Path]], Reference]
"""Reads the logs and runs that `reference:` names. SentinelError where one cannot be read."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong in a pack."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


@dataclass(slots=True)
class _Draft:
    """A rule as one file gives it: only the fields that are there."""

    name: str
    given: dict[str, Located]
    file: str
    line: int


@dataclass(slots=True)
class _Reading:
    """What one load has found so far."""

    detectors: Mapping[str, type[Any]]
    references: ReadReference | None = None
    problems: list[Problem] = field(default_factory=list)
    complete: list[str] = field(default_factory=list)
    """Names of rules that have a detector."""

    def complain(self, file: str, line: int, message: str) -> None:
        self.problems.append(Problem(file, line, message))


def builtin_packs() -> dict[str, Path]:
    """Return name -> file of the packs that come with Sentinel."""
    return {path.stem: path for path in sorted(PACKS.glob("*.yaml"))}


def load_pack(
    paths: Iterable[str | Path] = (),
    *,
    builtin: bool = True,
    detectors: Mapping[str, type[Any]] | None = None,
    references: ReadReference | None = None,
) -> Pack:
    """Return the rules of `paths`, each merged over those before it, all over the built-in default pack.

    paths: files, directories (their *.yaml and *.yml, one level), or names of packs that come with Sentinel (`msprobe`).
    builtin: False leaves the default pack out, as does `builtin: false` in a file.
    references: reads what `reference:` names; None: that is checked to be there, not read.
    RuleError names everything that is wrong, one `FILE:LINE: what` a line.
    """
    pack, problems = read_pack(paths, builtin=builtin, detectors=detectors, references=references)
    if problems:
        raise RuleError("\n".join(map(str, problems)))
    return pack


def read_pack(
    paths: Iterable[str | Path] = (),
    *,
    builtin: bool = True,
    detectors: Mapping[str, type[Any]] | None = None,
    references: ReadReference | None = None,
) -> tuple[Pack, list[Problem]]:
    """Return what `load_pack` returns and every problem, without raising for any of them."""
    reading = _Reading(detectors if detectors is not None else known_detectors(), references)
    layers: list[list[_Draft]] = []
    for given in paths:
        layer: list[_Draft] = []
        for file in _files(given, reading):
            drafts, leaves_out = _read_file(file, reading)
            builtin = builtin and not leaves_out
            _add_all(layer, drafts, reading)
        layers.append(layer)
    if builtin:
        drafts, _ = _read_file(PACKS / "default.yaml", reading)
        layers.insert(0, drafts)
    merged: dict[str, tuple[dict[str, Located], dict[str, str], _Draft]] = {}
    for layer in layers:
        for draft in layer:
            merged[draft.name] = _merge(merged.get(draft.name), draft)
    reading.complete = [name for name, (given, _, _) in merged.items() if "detector" in given]
    rules = [_build(given, files, draft, reading) for given, files, draft in merged.values()]
    reading.problems.sort(key=lambda problem: (problem.file, problem.line))
    return Pack(rules=tuple(rule for rule in rules if rule is not None and rule.enabled)), reading.problems


def detector_arguments(detector: type[Any]) -> dict[str, Any]:
    """Return argument -> default of a detector class; `...` where an argument must be given."""
    if issubclass(detector, msgspec.Struct):
        return {
            item.name: ... if item.required else item.default if item.default is not msgspec.NODEFAULT else None
            for item in msgspec.structs.fields(detector)
        }
    parameters = inspect.signature(detector).parameters.values()
    named = [item for item in parameters if item.kind in (item.KEYWORD_ONLY, item.POSITIONAL_OR_KEYWORD)]
    return {item.name: ... if item.default is item.empty else item.default for item in named}


def build_detector(rule: Rule, detectors: Mapping[str, type[Any]]) -> Any:
    """Return the detector of `rule`, its arguments checked. RuleError says which argument is wrong and why."""
    cls = detectors[rule.detector]
    try:
        built = msgspec.convert(rule.args, cls) if issubclass(cls, msgspec.Struct) else cls(**rule.args)
    except msgspec.ValidationError as error:
        raise RuleError(_argument_error(str(error))) from error
    except SentinelError as error:
        raise RuleError(f"args: {error}") from error
    except (TypeError, ValueError) as error:
        raise RuleError(f"args of {rule.detector}: {error}") from error
    if cls in DETECTORS.values() or not is_series_detector(cls):
        return built
    return Guarded(built, f'detector "{rule.detector}" of rule "{rule.name}"')


def is_series_detector(detector: type[Any]) -> bool:
    """Whether a detector scores single series: those that compare ranks or copies, or watch the clock, do not."""
    return hasattr(detector, "score") and not hasattr(detector, "over")


def nearest(word: str, known: Sequence[str]) -> str:
    """Return `; did you mean "x"?`, or the list of what is known when nothing is near."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if not near:
        lower = {item.lower(): item for item in known}
        near = [lower[match] for match in difflib.get_close_matches(word.lower(), list(lower), n=1, cutoff=0.6)]
    return f'; did you mean "{near[0]}"?' if near else f"; known: {', '.join(known)}"


def _files(given: str | Path, reading: _Reading) -> list[Path]:
    path = Path(given)
    if path.is_dir():
        files = sorted([*path.glob("*.yaml"), *path.glob("*.yml")])
        if not files:
            reading.complain(str(path), 1, "no rule packs here; expected *.yaml or *.yml")
        return files
    if path.is_file():
        return [path]
    packs = builtin_packs()
    if str(given) in packs:
        return [packs[str(given)]]
    guess = nearest(str(given), list(packs)) if path.name == str(given) and not path.suffix else ""
    reading.complain(str(path), 1, f"no such file, directory or built-in pack{guess}")
    return []


def _read_file(file: Path, reading: _Reading) -> tuple[list[_Draft], bool]:
    """Return the rules of a file as drafts, and whether it leaves the default pack out."""
    name = str(file)
    try:
        document = parse(file.read_bytes().decode("utf-8"))
    except BrokenDocument as error:
        reading.complain(name, error.line, str(error))
        return [], False
    except UnicodeDecodeError as error:
        reading.complain(name, 1, f"not UTF-8: byte {error.start}")
        return [], False
    except OSError as error:
        reading.complain(name, 1, f"cannot be read: {error.strerror}")
        return [], False
    if document is None or document.value is None:
        reading.complain(name, 1, 'empty file; expected "rules:" and a list of rules')
        return [], False
    if not isinstance(document.value, dict):
        reading.complain(name, document.line, f'expected "rules:" and a list of rules, got {_type(document.value)}')
        return [], False
    _unknown_keys(document.value, PACK_KEYS, "", name, reading)
    leaves_out = False
    if (builtin := document.value.get("builtin")) is not None:
        if isinstance(builtin.value, bool):
            leaves_out = not builtin.value
        else:
            reading.complain(name, builtin.where, f'"builtin" must be true or false, got {_show(builtin.value)}')
    rules = document.value.get("rules")
    if rules is None:
        reading.complain(name, document.line, '"rules" is missing; expected a list of rules')
        return [], leaves_out
    if not isinstance(rules.value, list):
        reading.complain(name, rules.where, f'"rules" must be a list, got {_type(rules.value)}')
        return [], leaves_out
    drafts: list[_Draft] = []
    for item in rules.value:
        draft = _draft(item, name, reading)
        if draft is not None:
            _add_all(drafts, [draft], reading)
    return drafts, leaves_out


def _add_all(layer: list[_Draft], drafts: Iterable[_Draft], reading: _Reading) -> None:
    """Append drafts, refusing a name that this file or directory has already."""
    for draft in drafts:
        first = next((other for other in layer if other.name == draft.name), None)
        if first is None:
            layer.append(draft)
        else:
            what = f'rule "{draft.name}" is there twice, first at {first.file}:{first.line}'
            reading.complain(draft.file, draft.line, what)


def _draft(item: Located, file: str, reading: _Reading) -> _Draft | None:
    if not isinstance(item.value, dict):
        reading.complain(file, item.line, f"a rule must be a mapping with a name, got {_type(item.value)}")
        return None
    name = item.value.get("name")
    if name is None:
        reading.complain(file, item.line, 'a rule needs a "name"')
        return None
    if not isinstance(name.value, str) or not name.value.strip():
        reading.complain(file, name.where, f'"name" must be text, got {_show(name.value)}')
        return None
    _unknown_keys(item.value, RULE_KEYS, f'rule "{name.value}": ', file, reading)
    return _Draft(name.value, item.value, file, item.line)


def _merge(
    below: tuple[dict[str, Located], dict[str, str], _Draft] | None, draft: _Draft
) -> tuple[dict[str, Located], dict[str, str], _Draft]:
    """Return fields and the file of each: what a draft gives replaces, and `args` of the same detector merge by key."""
    files = dict.fromkeys(draft.given, draft.file)
    if below is None:
        return dict(draft.given), files, draft
    given, old_files, _ = below
    merged = {**given, **draft.given}
    same_detector = "detector" not in draft.given or (
        "detector" in given and draft.given["detector"].value == given["detector"].value
    )
    if not same_detector and "args" not in draft.given:
        merged.pop("args", None)
    elif same_detector and "args" in given and "args" in draft.given:
        old, new = given["args"], draft.given["args"]
        if isinstance(old.value, dict) and isinstance(new.value, dict):
            merged["args"] = Located({**old.value, **new.value}, new.line, new.key_line)
    return merged, {**old_files, **files}, draft


def _build(given: dict[str, Located], files: dict[str, str], draft: _Draft, reading: _Reading) -> Rule | None:
    """Return the rule, or None when something in it is wrong, which is then among the problems."""
    before = len(reading.problems)
    reader = _Fields(draft.name, given, files, reading)
    detector = reader.detector(draft)
    match = reader.match()
    rule = Rule(
        name=draft.name,
        detector=detector,
        match=match,
        args=reader.args(),
        severity=reader.severity(),
        actions=reader.actions(),
        webhook=reader.webhook,
        episode_quiet_steps=reader.quiet_steps(),
        enabled=reader.flag("enabled", True),
        reference=reader.reference(),
        description=reader.text("description"),
        source=f"{draft.file}:{draft.line}",
    )
    if detector in reading.detectors:
        reader.check_detector(rule)
    return rule if len(reading.problems) == before else None


class _Fields:
    """Reads the fields of one rule, complaining where each was written."""

    def __init__(self, name: str, given: dict[str, Located], files: dict[str, str], reading: _Reading) -> None:
        self._name, self._given, self._files, self._reading = name, given, files, reading
        self.webhook = ""

    def _complain(self, key: str, line: int, message: str) -> None:
        self._reading.complain(self._files[key], line, f'rule "{self._name}": {message}')

    def detector(self, draft: _Draft) -> str:
        item = self._given.get("detector")
        if item is None:
            enabled = self._given.get("enabled")
            if enabled is not None and enabled.value is False:
                near = difflib.get_close_matches(self._name, self._reading.complete, 1, 0.6)
                hint = f'; did you mean "{near[0]}"?' if near else ""
                what = f'rule "{self._name}": there is no such rule to switch off{hint}'
                self._reading.complain(draft.file, draft.line, what)
                return ""
            known = ", ".join(self._reading.detectors)
            # Without one it was probably to change a rule that is there.
            near = difflib.get_close_matches(self._name, self._reading.complete, 1, 0.6)
            hint = f'there is no such rule to change; did you mean "{near[0]}"? A rule of your own ' if near else ""
            self._reading.complain(draft.file, draft.line, f'rule "{self._name}": {hint}needs a "detector"; known: {known}')
            return ""
        if not isinstance(item.value, str):
            self._complain("detector", item.where, f'"detector" must be a name, got {_show(item.value)}')
            return ""
        if item.value not in self._reading.detectors:
            guess = nearest(item.value, list(self._reading.detectors))
            why = why_not(item.value, self._reading.detectors) or f'unknown detector "{item.value}"{guess}'
            self._complain("detector", item.where, why)
        return item.value

    def match(self) -> Match:
        everything = Match(kind=RULE_KINDS)
        item = self._given.get("match")
        if item is None:
            return everything
        if not isinstance(item.value, dict):
            self._complain("match", item.where, f'"match" must be a mapping, got {_type(item.value)}')
            return everything
        for key, value in item.value.items():
            if key not in MATCH_KEYS:
                self._complain("match", value.where, f'match: unknown key "{key}"{nearest(key, MATCH_KEYS)}')
        kinds = self._words(item, "kind", RULE_KINDS) or RULE_KINDS
        return Match(
            kind=tuple(kinds),
            name=self._words(item, "name", None) or ("*",),
            statistic=self._words(item, "statistic", RULE_STATISTICS),
            rank=self._ranks(item),
            aggregate=read_aggregates(item, lambda line, what: self._complain("match", line, what)),
        )

    def _words(self, match: Located, key: str, known: tuple[str, ...] | None) -> tuple[str, ...]:
        item = match.value.get(key)
        if item is None:
            return ()
        entries = item.value if isinstance(item.value, list) else [item]
        if not entries:
            what = f'match.{key}: an empty list matches nothing; leave "{key}" out to match all'
            self._complain("match", item.where, what)
        words: list[str] = []
        for entry in entries:
            if not isinstance(entry.value, str) or not entry.value:
                what = f"match.{key}: expected text or a list of text, got {_show(entry.value)}"
                self._complain("match", entry.where if entry is item else entry.line, what)
            elif known is not None and entry.value == "*" and key == "kind":
                words.extend(known)
            elif known is not None and entry.value not in known:
                guess = nearest(entry.value, known)
                self._complain("match", entry.line, f'match.{key}: unknown {key} "{entry.value}"{guess}')
            else:
                words.append(entry.value)
        return tuple(dict.fromkeys(words))

    def _ranks(self, match: Located) -> tuple[int, ...]:
        item = match.value.get("rank")
        if item is None:
            return ()
        entries = item.value if isinstance(item.value, list) else [item]
        ranks = []
        for entry in entries:
            if isinstance(entry.value, bool) or not isinstance(entry.value, int) or entry.value < 0:
                what = f"match.rank: expected ranks (0 or more) or a list of them, got {_show(entry.value)}"
                self._complain("match", entry.line, what)
            else:
                ranks.append(entry.value)
        return tuple(sorted(set(ranks)))

    def reference(self) -> Reference | None:
        """Return what the logs and runs under `reference` say; None where there is none, or they are only checked."""
        item = self._given.get("reference")
        if item is None or item.value is None or item.value == []:
            return None
        entries = item.value if isinstance(item.value, list) else [item]
        paths = []
        for entry in entries:
            if not isinstance(entry.value, str) or not entry.value:
                what = f"reference: expected a path or a list of paths, got {_show(entry.value)}"
                self._complain("reference", entry.line, what)
                continue
            beside = Path(self._files["reference"]).parent / entry.value
            paths.append(beside if beside.exists() else Path(entry.value))
            if not paths[-1].exists():
                self._complain("reference", entry.line, f'reference: there is no log or run "{entry.value}"')
                return None
        if self._reading.references is None or not paths:
            return None
        try:
            return self._reading.references(paths)
        except SentinelError as error:
            self._complain("reference", item.where, f"reference: {error}")
            return None

    def args(self) -> dict[str, Any]:
        item = self._given.get("args")
        if item is None or item.value is None:
            return {}
        if not isinstance(item.value, dict):
            self._complain("args", item.where, f'"args" must be a mapping, got {_type(item.value)}')
            return {}
        plain: dict[str, Any] = item.plain()
        return plain

    def check_detector(self, rule: Rule) -> None:
        """Check the arguments against the detector, and that it can watch what the rule matches."""
        cls = self._reading.detectors[rule.detector]
        item = self._given.get("args")
        known = tuple(detector_arguments(cls))
        args = item.value if item is not None and isinstance(item.value, dict) else {}
        unknown = [key for key in args if key not in known]
        for key in unknown:
            guess = nearest(key, known) if known else "; it takes none"
            self._complain("args", args[key].where, f'args: {rule.detector} has no argument "{key}"{guess}')
        sound = msgspec.structs.replace(rule, args={key: rule.args[key] for key in rule.args if key in known})
        try:
            build_detector(sound, self._reading.detectors)
        except RuleError as error:
            text = str(error)
            named = next((key for key in args if re.search(rf"\b{re.escape(key)}\b", text)), None)
            where = args[named].where if named else item.where if item else 0
            self._complain("args" if item else "name", where or self._given["name"].where, text)
        defaults = tuple(getattr(cls, "statistics", ()))
        match = self._given.get("match")
        where = match.where if match is not None else self._given["name"].where
        key = "match" if match is not None else "name"
        tensors = [kind for kind in rule.match.kind if kind != "scalar"]
        if "reference" in self._given and not (isinstance(cls, type) and issubclass(cls, RollingMedian)):
            what = f"reference: {rule.detector} judges no scalar beside its sisters; LossSpike and GradNormSpike do"
            self._complain("reference", self._given["reference"].where, what)
        if rule.match.aggregate and not is_series_detector(cls):
            what = f"match.aggregate: {rule.detector} watches no series of values; leave it out, or take another detector"
            self._complain(key, where, what)
        if VALUE in rule.match.statistic and tensors:
            self._complain(key, where, 'match.statistic: "value" is for kind scalar only')
        if rule.match.kind == ("scalar",) and rule.match.statistic not in ((), (VALUE,)):
            what = f'match.statistic: a scalar has no {rule.match.statistic[0]}; leave it out, or "value"'
            self._complain(key, where, what)
        if not rule.match.statistic and defaults == (VALUE,) and tensors:
            self._complain(key, where, f'{rule.detector} watches scalars; add "kind: scalar" to match, or a "statistic"')

    def severity(self) -> Severity:
        item = self._given.get("severity")
        if item is None:
            return Severity.WARNING
        if item.value in SEVERITIES:
            return Severity(item.value)
        guess = nearest(item.value, SEVERITIES) if isinstance(item.value, str) else f"; known: {', '.join(SEVERITIES)}"
        self._complain("severity", item.where, f"unknown severity {_show(item.value)}{guess}")
        return Severity.WARNING

    def actions(self) -> tuple[str, ...]:
        item = self._given.get("actions")
        if item is None:
            return ("notify",)
        if not isinstance(item.value, list):
            self._complain("actions", item.where, f'"actions" must be a list, got {_show(item.value)}')
            return ()
        actions = []
        for entry in item.value:
            name = entry.value
            if isinstance(name, dict) and tuple(name) == ("webhook",) and isinstance(name["webhook"].value, str):
                self.webhook, name = name["webhook"].value, "webhook"
                if not self.webhook.startswith(("http://", "https://")):
                    self._complain("actions", entry.line, f'webhook must be an http or https URL, got "{self.webhook}"')
            elif name == "webhook":
                self._complain("actions", entry.line, 'a webhook needs its URL: "- webhook: https://..."')
            if not isinstance(name, str) or name not in ACTIONS:
                guess = nearest(name, ACTIONS) if isinstance(name, str) else f"; known: {', '.join(ACTIONS)}"
                self._complain("actions", entry.line, f"unknown action {_show(name)}{guess}")
            else:
                actions.append(name)
        return tuple(dict.fromkeys(actions))

    def quiet_steps(self) -> int:
        item = self._given.get("episode_quiet_steps")
        if item is None:
            return 20
        if isinstance(item.value, bool) or not isinstance(item.value, int) or item.value < 0:
            what = f'"episode_quiet_steps" must be a number of steps, 0 or more, got {_show(item.value)}'
            self._complain("episode_quiet_steps", item.where, what)
            return 20
        return item.value

    def flag(self, key: str, default: bool) -> bool:
        item = self._given.get(key)
        if item is None:
            return default
        if not isinstance(item.value, bool):
            self._complain(key, item.where, f'"{key}" must be true or false, got {_show(item.value)}')
            return default
        return item.value

    def text(self, key: str) -> str:
        item = self._given.get(key)
        if item is None:
            return ""
        if not isinstance(item.value, str):
            self._complain(key, item.where, f'"{key}" must be text, got {_show(item.value)}')
            return ""
        return item.value


def _unknown_keys(given: Mapping[str, Located], known: tuple[str, ...], prefix: str, file: str, reading: _Reading) -> None:
    for key, item in given.items():
        if key not in known:
            reading.complain(file, item.where, f'{prefix}unknown key "{key}"{nearest(key, known)}')


def _argument_error(text: str) -> str:
    """Return msgspec's `Expected ..., got ... - at `$.k`` in this project's words."""
    found = re.match(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", text)
    assert found is not None
    what = found["what"].replace("`", "")
    what = what[:1].lower() + what[1:]
    return f"args.{found['path']}: {what}" if found["path"] else f"args: {what}"


def _type(value: object) -> str:
    names = {dict: "a mapping", list: "a list", str: "text", bool: "true or false", type(None): "nothing"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def _show(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else (
        repr(value) if isinstance(value, int | float) else _type(value)
    )
