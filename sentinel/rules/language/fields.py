"""Fields: one rule of a pack as its files give it, read key by key, each complaint where the key was written."""

from __future__ import annotations

import difflib
import math
import re
from pathlib import Path
from typing import Any

import msgspec

from sentinel.anomaly import Severity
from sentinel.detect.known import why_not
from sentinel.document import Located, show, type_of
from sentinel.errors import RuleError, SentinelError
from sentinel.known_words import nearest
from sentinel.reference import Reference
from sentinel.rules.language.aggregate_match import read_aggregates
from sentinel.rules.language.building import build_detector, detector_arguments, is_series_detector
from sentinel.rules.language.pack_reading import Draft, PackReading
from sentinel.rules.language.schema import ACTIONS, RULE_KINDS, RULE_STATISTICS, VALUE, Match, Rule

MATCH_KEYS = ("kind", "name", "statistic", "rank", "aggregate")
SEVERITIES = tuple(severity.value for severity in Severity)


_NUMBER = re.compile(r"[-+]?[\d.]+(?:[eE][-+]?\d+)?")


class Fields:
    """Reads the fields of one rule, complaining where each was written."""

    def __init__(self, name: str, given: dict[str, Located], files: dict[str, str], reading: PackReading) -> None:
        self._name, self._given, self._files, self._reading = name, given, files, reading
        self.webhook = ""

    def _complain(self, key: str, line: int, message: str) -> None:
        self._reading.complain(self._files[key], line, f'rule "{self._name}": {message}')

    def detector(self, draft: Draft) -> str:
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
            self._complain("detector", item.where, f'"detector" must be a name, got {show(item.value)}')
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
            self._complain("match", item.where, f'"match" must be a mapping, got {type_of(item.value)}')
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
                what = f"match.{key}: expected text or a list of text, got {show(entry.value)}"
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
                what = f"match.rank: expected ranks (0 or more) or a list of them, got {show(entry.value)}"
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
                what = f"reference: expected a path or a list of paths, got {show(entry.value)}"
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
            self._complain("args", item.where, f'"args" must be a mapping, got {type_of(item.value)}')
            return {}
        for key, entry in item.value.items():
            for one in entry.value if isinstance(entry.value, list) else [entry]:
                if isinstance(one.value, float) and not math.isfinite(one.value):
                    self._complain("args", entry.where, f"args.{key}: expected a finite number, got {show(one.value)}")
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
            if named is not None and text.endswith("got str") and isinstance(args[named].value, str):
                written = args[named].value
                text = f'{text} "{written}"' + ("; write it without quotes" if _NUMBER.fullmatch(written.strip()) else "")
            where = args[named].where if named else item.where if item else 0
            self._complain("args" if item else "name", where or self._given["name"].where, text)
        declares = cls.declares
        defaults = tuple(declares.statistics)
        match = self._given.get("match")
        where = match.where if match is not None else self._given["name"].where
        key = "match" if match is not None else "name"
        tensors = [kind for kind in rule.match.kind if kind != "scalar"]
        if "reference" in self._given and not declares.is_rolling:
            what = f"reference: {rule.detector} judges no scalar beside reference runs; LossSpike and GradNormSpike do"
            self._complain("reference", self._given["reference"].where, what)
        if rule.match.aggregate and not is_series_detector(cls):
            what = f"match.aggregate: {rule.detector} watches no series of values; leave it out, or take another detector"
            self._complain(key, where, what)
        if declares.over == "copies" and not tensors:
            self._complain(key, where, f"{rule.detector} compares copies of tensors; a scalar has none")
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
        self._complain("severity", item.where, f"unknown severity {show(item.value)}{guess}")
        return Severity.WARNING

    def actions(self) -> tuple[str, ...]:
        item = self._given.get("actions")
        if item is None:
            return ("notify",)
        if not isinstance(item.value, list):
            self._complain("actions", item.where, f'"actions" must be a list, got {show(item.value)}')
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
                self._complain("actions", entry.line, f"unknown action {show(name)}{guess}")
            else:
                actions.append(name)
        return tuple(dict.fromkeys(actions))

    def quiet_steps(self) -> int:
        item = self._given.get("episode_quiet_steps")
        if item is None:
            return 20
        if isinstance(item.value, bool) or not isinstance(item.value, int) or item.value < 0:
            what = f'"episode_quiet_steps" must be a number of steps, 0 or more, got {show(item.value)}'
            self._complain("episode_quiet_steps", item.where, what)
            return 20
        return item.value

    def flag(self, key: str, default: bool) -> bool:
        item = self._given.get(key)
        if item is None:
            return default
        if not isinstance(item.value, bool):
            self._complain(key, item.where, f'"{key}" must be true or false, got {show(item.value)}')
            return default
        return item.value

    def text(self, key: str) -> str:
        item = self._given.get(key)
        if item is None:
            return ""
        if not isinstance(item.value, str):
            self._complain(key, item.where, f'"{key}" must be text, got {show(item.value)}')
            return ""
        return item.value
