"""Matchers: which alerts silences, maintenance, inhibition and routes mean, in the way of Alertmanager."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence

from sentinel.anomaly import Severity
from sentinel.errors import ConfigError
from sentinel.known_words import nearest
from sentinel.rank_identity import LABEL
from sentinel.regular_expression import RegularExpression
from sentinel.report.alert import Alert

MAX_MATCHERS = 20
"""Most matchers of one silence or window; a bound on the time that each message takes."""
MAX_TEXT = 500
"""Most characters of one matcher; a bound as above."""

_MATCHER = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_.-]*)\s*(=~|!~|!=|=)\s*(.*?)\s*", re.DOTALL)

_VALUES: dict[str, Callable[[Alert], Sequence[str]]] = {
    "run": lambda alert: (alert.incident.run,),
    "attempt": lambda alert: (str(alert.incident.attempt),),
    "incident": lambda alert: (alert.incident.id,),
    "severity": lambda alert: (alert.incident.severity.value,),
    "detector": lambda alert: alert.incident.detectors,
    "module": lambda alert: (alert.incident.module,),
    "segment": lambda alert: (alert.incident.segment,),
    "title": lambda alert: (alert.incident.title,),
    "rank": lambda alert: [str(rank) for rank in alert.incident.ranks],
    "host": lambda alert: [name for one in alert.context.ranks for name in (one.host, one.node) if name],
    "job": lambda alert: (alert.context.job,),
}
"""What a matcher may ask for -> the values that an alert has of it. Beside these, labels: `label.NAME`."""


def values_of(alert: Alert, name: str) -> Sequence[str]:
    """Return what an alert has under the name of a matcher; a label that it has not is the empty text."""
    if name.startswith(LABEL):
        return (alert.context.labels.get(name.removeprefix(LABEL), ""),)
    return _VALUES[name](alert)


def check_name(name: str, path: str) -> None:
    """Raise ConfigError where there is nothing under this name, with the nearest one that there is."""
    if name not in _VALUES and not (name.startswith(LABEL) and len(name) > len(LABEL)):
        raise ConfigError(f'{path}: unknown name "{name[:80]}"{nearest(name, [*_VALUES, "label.NAME"])}')


class Matchers:
    """`NAME=VALUE`, `NAME!=VALUE`, `NAME=~REGEX`, `NAME!~REGEX`, all of which have to hold. path: for errors."""

    def __init__(self, texts: Sequence[str], path: str) -> None:
        if len(texts) > MAX_MATCHERS:
            raise ConfigError(f"{path} must be at most {MAX_MATCHERS} matchers, got {len(texts)}")
        self._all = [_read(text, path) for text in texts]

    def match(self, alert: Alert) -> bool:
        """Return whether all hold of an alert. One of several values is enough for `=`; none may be it for `!=`."""
        return all(any(map(is_value, values_of(alert, name))) is is_wanted for name, is_value, is_wanted in self._all)


def _read(text: str, path: str) -> tuple[str, Callable[[str], bool], bool]:
    found = _MATCHER.fullmatch(text) if len(text) <= MAX_TEXT else None
    if found is None:
        raise ConfigError(
            f"{path}: expected NAME=VALUE, NAME!=VALUE, NAME=~REGEX or NAME!~REGEX of at most {MAX_TEXT} characters, got "
            f'"{text[:80]}"'
        )
    name, sign, value = found.groups()
    check_name(name, path)
    levels = [severity.value for severity in Severity]
    if name == "severity" and sign in ("=", "!=") and value not in levels:
        raise ConfigError(f'{path}: unknown severity "{value[:80]}"{nearest(value, levels)}')
    if sign in ("=", "!="):
        return name, functools.partial(str.__eq__, value), sign == "="
    try:
        return name, RegularExpression(value).fullmatch, sign == "=~"
    except ValueError as error:
        raise ConfigError(f"{path}: {name}{sign}: {error}") from error
