"""Read rule packs: YAML, merged by rule name over the built-in default; every error with FILE:LINE."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sentinel.detect import known_detectors
from sentinel.document import BrokenDocument, Located, Problem, read_document, show, type_of
from sentinel.errors import RuleError
from sentinel.known_words import nearest
from sentinel.rules.language.fields import Fields
from sentinel.rules.language.pack_reading import Draft, PackReading, ReadReference, unknown_keys
from sentinel.rules.language.schema import Pack, Rule

PACKS = Path(__file__).parents[1] / "packs"
"""The packs that come with Sentinel: `default`, and opt-in ones."""

MAX_RULES = 2000
"""Most rules of a pack: each has a watch of its own, which every step asks. The default pack has 50."""

_Merged = tuple[dict[str, Located], dict[str, str], Draft]
"""Fields of a rule, the file of each, and the draft on top."""

PACK_KEYS = ("rules", "builtin")
RULE_KEYS = (
    "name", "detector", "match", "args", "severity", "actions", "episode_quiet_steps", "enabled", "reference",
    "description",
)  # fmt: skip


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
    builtin: False leaves the default pack out, as does `builtin: false` in a file, unless a path names it. A rule that gives
    no detector is a change of the default pack's rule of that name, and takes from there what it does not say, also where
    the rest of the default pack is left out: packs that come with Sentinel combine in any order.
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
    reading = PackReading(detectors if detectors is not None else known_detectors(), references)
    default = PACKS / "default.yaml"
    layers: list[dict[str, Draft]] = []
    is_named = False
    for given in paths:
        layer: dict[str, Draft] = {}
        for file in _files(given, reading):
            if file == default:
                is_named = True  # It is below all others, wherever it was named.
                continue
            drafts, leaves_out = _read_file(file, reading)
            builtin = builtin and not leaves_out
            _add_all(layer, drafts.values(), reading)
        layers.append(layer)
    defaults, _ = _read_file(default, reading)
    if builtin or is_named:
        layers.insert(0, defaults)
    below = {name: _merge(None, draft) for name, draft in defaults.items()}
    merged: dict[str, _Merged] = {}
    for layer in layers:
        for draft in layer.values():
            is_change = "detector" not in draft.given
            merged[draft.name] = _merge(merged.get(draft.name) or (below.get(draft.name) if is_change else None), draft)
    if len(merged) > MAX_RULES:
        reading.complain(str(next(reversed(merged.values()))[2].file), 1, f"{_too_many(len(merged))} of all files")
        return Pack(rules=()), reading.problems
    complete = (name for name, (given, _, _) in merged.items() if "detector" in given)
    reading.complete = list(dict.fromkeys([*below, *complete]))
    rules = [_build(given, files, draft, reading) for given, files, draft in merged.values()]
    reading.problems.sort(key=lambda problem: (problem.file, problem.line))
    return Pack(rules=tuple(rule for rule in rules if rule is not None and rule.enabled)), reading.problems


def _files(given: str | Path, reading: PackReading) -> list[Path]:
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


def _read_file(file: Path, reading: PackReading) -> tuple[dict[str, Draft], bool]:
    """Return the rules of a file as drafts by their names, and whether it leaves the default pack out."""
    name = str(file)
    try:
        document = read_document(file)
    except BrokenDocument as error:
        reading.complain(name, error.line, str(error))
        return {}, False
    if document is None or document.value is None:
        reading.complain(name, 1, 'empty file; expected "rules:" and a list of rules')
        return {}, False
    if not isinstance(document.value, dict):
        reading.complain(name, document.line, f'expected "rules:" and a list of rules, got {type_of(document.value)}')
        return {}, False
    unknown_keys(document.value, PACK_KEYS, "", name, reading)
    leaves_out = False
    if (builtin := document.value.get("builtin")) is not None:
        if isinstance(builtin.value, bool):
            leaves_out = not builtin.value
        else:
            reading.complain(name, builtin.where, f'"builtin" must be true or false, got {show(builtin.value)}')
    rules = document.value.get("rules")
    if rules is None:
        reading.complain(name, document.line, '"rules" is missing; expected a list of rules')
        return {}, leaves_out
    if not isinstance(rules.value, list):
        reading.complain(name, rules.where, f'"rules" must be a list, got {type_of(rules.value)}')
        return {}, leaves_out
    if len(rules.value) > MAX_RULES:
        reading.complain(name, rules.where, _too_many(len(rules.value)))
        return {}, leaves_out
    drafts: dict[str, Draft] = {}
    for item in rules.value:
        draft = _draft(item, name, reading)
        if draft is not None:
            _add_all(drafts, [draft], reading)
    return drafts, leaves_out


def _too_many(num_rules: int) -> str:
    return f"expected at most {MAX_RULES} rules (a rule may match many tensors by a glob), got {num_rules}"


def _add_all(layer: dict[str, Draft], drafts: Iterable[Draft], reading: PackReading) -> None:
    """Add drafts by their names, refusing a name that this file or directory has already."""
    for draft in drafts:
        first = layer.setdefault(draft.name, draft)
        if first is not draft:
            what = f'rule "{draft.name}" is there twice, first at {first.file}:{first.line}'
            reading.complain(draft.file, draft.line, what)


def _draft(item: Located, file: str, reading: PackReading) -> Draft | None:
    if not isinstance(item.value, dict):
        reading.complain(file, item.line, f"a rule must be a mapping with a name, got {type_of(item.value)}")
        return None
    name = item.value.get("name")
    if name is None:
        reading.complain(file, item.line, 'a rule needs a "name"')
        return None
    if not isinstance(name.value, str) or not name.value.strip():
        reading.complain(file, name.where, f'"name" must be text, got {show(name.value)}')
        return None
    if not name.value.isprintable():
        what = f'"name" must be text that can be printed, got {name.value!a}'
        reading.complain(file, name.where, what)
        return None
    unknown_keys(item.value, RULE_KEYS, f'rule "{name.value}": ', file, reading)
    return Draft(name.value, item.value, file, item.line)


def _merge(below: _Merged | None, draft: Draft) -> _Merged:
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


def _build(given: dict[str, Located], files: dict[str, str], draft: Draft, reading: PackReading) -> Rule | None:
    """Return the rule, or None when something in it is wrong, which is then among the problems."""
    before = len(reading.problems)
    reader = Fields(draft.name, given, files, reading)
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
        match_source=f"{files['match']}:{given['match'].where}" if "match" in given else "",
    )
    if detector in reading.detectors:
        reader.check_detector(rule)
    return rule if len(reading.problems) == before else None
