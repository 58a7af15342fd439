"""MessageTemplates: what a user has messages say instead, in Jinja2 without anything that could take long or do harm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from sentinel.errors import ConfigError, SentinelError
from sentinel.known_words import nearest
from sentinel.report.alert import Alert
from sentinel.report.message import AlertMessage, end_cut, visible

MAX_TEMPLATE = 8192
"""Most characters of a template; a bound on the time that it takes: what it may do grows with its length alone."""
MAX_TEXT = 8000
"""Most characters that one makes; a bound on messages."""
MAX_LOOPS = 2
"""Loops in one another; a bound on time: a list has twenty items at most."""
MAX_DEPTH = 40
"""Expressions in one another; a bound on the time that Jinja2 takes to compile them, which grows with its third power."""
MAX_ITEMS = 20

Values = dict[str, Any]
Escape = Callable[[str], str]

NAMES: Mapping[str, str] = {
    "run": "the run's name",
    "runs": "list: of incidents of several runs that are told as one the first twenty, else the run alone",
    "num_runs": "how many they are",
    "what": "what happened, with its step",
    "word": "what changed and how bad it is: `CRITICAL`, `now CRITICAL`, `CRITICAL resolved`",
    "headline": "all of that in one line",
    "change": "`opened`, `raised`, `worse`, `resolved`, ...",
    "severity": "`critical`, `warning`, `info`",
    "state": "`open`, `resolved`, `settled`, `ended`, `closed`, `merged`",
    "is_page": "whether somebody should get up",
    "is_over": "whether the incident is over",
    "is_repeated": "whether this may have come before",
    "incident": "id of the incident",
    "revision": "number of its revision",
    "attempt": "number of the run's attempt",
    "step": "the step in which it opened",
    "last_step": "the newest step that it spans",
    "module": "the module that it began in, where it is known",
    "segment": "the segment that it began in",
    "root": "where it began, in words",
    "cause": "what is suspected, one word",
    "to_do": "what to do",
    "job": "id of the job",
    "host": "host of the rank that it began on, or of its first",
    "ranks": "list of its ranks, the first twenty",
    "detectors": "list of detectors",
    "reasons": "list: why that is suspected",
    "machines": "list: the rank that it began on, and further ones, with `rank`, `host`, `node`, `pod`, `gpu`, `gpu_uuid`",
    "fields": "list: all that the message says, each with `name` and `text`",
    "links": "addresses by name: `links.incident`, `links.runbook`, `links.dashboard`; empty where there is none",
    "labels": "labels by name: `labels.team`",
}
"""Names that templates may use, and what they stand for."""
LISTS = ("runs", "ranks", "detectors", "reasons", "machines", "fields")
"""Those that a loop may go over."""
FILTERS = (
    "capitalize", "count", "d", "default", "first", "int", "join", "last", "length", "lower", "replace", "reverse", "round",
    "sort", "string", "trim", "truncate", "unique", "upper", "urlencode",
)  # fmt: skip


class MessageTemplates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Texts of your own, in Jinja2. Values are escaped as the service needs it; what the template says itself is not."""

    headline: str = ""
    """In place of the headline, one line. Empty: the usual one."""

    body: str = ""
    """In place of the lines below it, in the service's own markup. Empty: the usual ones."""


NO_TEMPLATES = MessageTemplates()


class TemplateFailure(SentinelError):
    """A template that cannot be filled in with what is known of an alert."""


class CompiledTemplates:
    """ConfigError, with the dotted path and the line of the template, where one holds what is not allowed."""

    def __init__(self, templates: MessageTemplates, path: str, escape: Escape) -> None:
        """path: of the sink, dotted. escape: makes text safe where the body goes."""
        self._headline = compiled(templates.headline, f"{path}.templates.headline", str) if templates.headline else None
        self._body = compiled(templates.body, f"{path}.templates.body", escape) if templates.body else None

    def applied(self, message: AlertMessage, alert: Alert) -> AlertMessage:
        """Return the message with the texts of the templates; TemplateFailure."""
        if self._headline is None and self._body is None:
            return message
        values = values_of(message, alert)
        title = " ".join(self._headline(values).split()) if self._headline else ""
        body = "\n".join(visible(line, MAX_TEXT) for line in self._body(values).splitlines()) if self._body else ""
        return msgspec.structs.replace(message, title=visible(title, MAX_TEXT), body=body)


def values_of(message: AlertMessage, alert: Alert) -> Values:
    """Return what the names of a template stand for."""
    incident, context = alert.incident, alert.context
    shown = partial(visible, limit=600)
    runs = alert.alike.runs if alert.alike is not None else (incident.run,)
    first = context.ranks[0] if context.ranks else None
    machines = [{"rank": one.rank} | {key: shown(getattr(one, key)) for key in _MACHINE} for one in context.ranks]
    return {
        "run": message.run, "runs": [shown(one) for one in runs[:MAX_ITEMS]], "num_runs": message.num_more + 1,
        "what": message.what, "word": message.word, "headline": message.headline(),
        "change": alert.change, "severity": incident.severity.value, "state": incident.state,
        "is_page": alert.is_page, "is_over": alert.is_closed, "is_repeated": alert.repeated,
        "incident": shown(incident.id), "revision": incident.revision, "attempt": incident.attempt,
        "step": incident.opened_step, "last_step": max(incident.last_step, incident.active_step),
        "module": shown(incident.module), "segment": shown(incident.segment), "root": shown(incident.root_name),
        "cause": shown(incident.suspected), "to_do": shown(incident.to_do), "job": shown(context.job),
        "host": shown((first.node or first.host) if first else ""), "ranks": list(incident.ranks[:MAX_ITEMS]),
        "detectors": [shown(one) for one in incident.detectors[:MAX_ITEMS]],
        "reasons": [shown(one) for one in incident.reasons[:MAX_ITEMS]],
        "machines": machines, "fields": [{"name": name, "text": text} for name, text in message.fields],
        "links": dict.fromkeys(("incident", "runbook", "dashboard"), "") | {one.name: one.url for one in message.links},
        "labels": {name: shown(value) for name, value in context.labels.items()},
    }  # fmt: skip


_MACHINE = ("host", "node", "pod", "gpu", "gpu_uuid")


def compiled(text: str, path: str, escape: Escape) -> Callable[[Values], str]:
    """Return what fills a template in; it raises TemplateFailure. ConfigError where the template is none that is allowed."""
    import jinja2
    import jinja2.sandbox

    if len(text) > MAX_TEMPLATE:
        raise ConfigError(f"{path}: expected at most {MAX_TEMPLATE} characters, got {len(text)}")
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        autoescape=False, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        finalize=lambda value: escape(value) if isinstance(value, str) else value,
    )  # fmt: skip
    environment.globals.clear()
    environment.filters = {name: environment.filters[name] for name in FILTERS}
    environment.filters["replace"] = _replaced
    try:
        tree = environment.parse(text)
        _check(tree, path)
        template = environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"{path}: line {error.lineno} of the template: {error.message}") from error
    except (SyntaxError, RecursionError) as error:
        raise ConfigError(f"{path}: it nests too deep") from error

    def fill(values: Values) -> str:
        parts: list[str] = []
        try:
            for part in template.generate(values):
                parts.append(part)
                if sum(map(len, parts)) > MAX_TEXT:
                    break
        except jinja2.UndefinedError as error:
            raise TemplateFailure(f'{path}: {error.message}; where it may be missing write |default("")') from error
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise TemplateFailure(f"{path}: {error}") from error
        return end_cut("".join(parts), MAX_TEXT)

    return fill


def _check(node: Any, path: str, scope: frozenset[str] = frozenset(NAMES), num_loops: int = 0, depth: int = 0) -> None:
    """Refuse what a message does not need: calls, arithmetic that grows, assignments, macros, imports."""
    from jinja2 import nodes

    where = f"{path}: line {node.lineno} of the template"
    if depth > MAX_DEPTH:
        raise ConfigError(f"{where}: it nests too deep, expected at most {MAX_DEPTH} levels")
    if not isinstance(node, _allowed_nodes()):
        raise ConfigError(f"{where}: {type(node).__name__.lower()} is not allowed; there are names, filters, if and for")
    if isinstance(node, nodes.Name) and node.ctx == "load" and node.name not in scope:
        raise ConfigError(f'{where}: unknown name "{node.name}"{nearest(node.name, sorted(scope))}')
    if isinstance(node, nodes.Filter) and node.name not in FILTERS:
        raise ConfigError(f'{where}: unknown filter "{node.name}"{nearest(node.name, FILTERS)}')
    if not isinstance(node, nodes.For):
        for child in node.iter_child_nodes():
            _check(child, path, scope, num_loops, depth + 1)
        return
    over: Any = node.iter
    while isinstance(over, (nodes.Filter, nodes.Getitem)):
        over = over.node
    if not isinstance(over, nodes.Name) or over.name not in LISTS:
        raise ConfigError(f"{where}: a loop goes over one of {', '.join(LISTS)}")
    if num_loops == MAX_LOOPS or node.recursive:
        raise ConfigError(f"{where}: expected at most {MAX_LOOPS} loops in one another")
    inner = scope | {one.name for one in [node.target, *node.target.find_all(nodes.Name)] if isinstance(one, nodes.Name)}
    _check(node.iter, path, scope, num_loops, depth + 1)
    for child in [*node.body, *node.else_, *([node.test] if node.test is not None else [])]:
        _check(child, path, inner | {"loop"}, num_loops + 1, depth + 1)


def _allowed_nodes() -> tuple[type[Any], ...]:
    from jinja2 import nodes

    return (
        nodes.Template, nodes.Output, nodes.TemplateData, nodes.Name, nodes.Getattr, nodes.Getitem, nodes.Const, nodes.If,
        nodes.For, nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Not, nodes.And, nodes.Or, nodes.Compare, nodes.Operand,
        nodes.Concat, nodes.List, nodes.Tuple, nodes.Slice, nodes.Keyword, nodes.Add, nodes.Sub, nodes.Neg,
    )  # fmt: skip


def _replaced(value: str, old: str, new: str) -> str:
    """Replace, within the bounds of a message: a hundred of them in a row would fill the memory otherwise."""
    return end_cut(end_cut(str(value), MAX_TEXT).replace(str(old), end_cut(str(new), 100)), MAX_TEXT)
