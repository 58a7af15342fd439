"""What a daemon that starts with a configuration here and now would meet: missing secrets, sinks that no alert reaches."""

from __future__ import annotations

import io
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from sentinel.control.config import unknown_rules
from sentinel.daemon.config import checked_document
from sentinel.detect import known_detectors
from sentinel.detect.dotted import is_dotted
from sentinel.document import Located, Problem
from sentinel.errors import ConfigError
from sentinel.known_words import nearest
from sentinel.report.message import message_of
from sentinel.report.sample_alert import sample_alert
from sentinel.report.sinks.secret import read_secret
from sentinel.report.sinks.sink_table import NotifyConfig, SinkConfig, build_sink
from sentinel.report.templates import NO_TEMPLATES, CompiledTemplates, TemplateFailure
from sentinel.typed_document import locate, named_document


class ConfigFindings(msgspec.Struct, frozen=True):
    """What is wrong with a configuration that can be read, and what is only suspicious."""

    problems: tuple[Problem, ...]
    """A daemon that starts here and now would refuse these, or could reach nobody."""
    warnings: tuple[Problem, ...]
    """A daemon would take these; they are hardly meant."""


def check_daemon_config(path: Path, environ: Mapping[str, str], rules: Collection[str]) -> ConfigFindings:
    """Return what does not resolve. environ: the environment that the daemon would have. Opens no connection.

    rules: names of those that it would judge by.

    ConfigError, one `FILE:LINE: what` a line, where the file cannot be read as a configuration at all.
    """
    document = named_document(path)
    config = checked_document(document, path)
    notify = config.notify
    wrong = [message for sink in notify.sinks for message in _unresolved(sink, notify, environ)]
    if notify.ca_file and not Path(notify.ca_file).is_file():
        wrong.append(f"notify.ca_file: {notify.ca_file}: expected a PEM file, found none")
    try:
        config.heartbeat.address(environ)
    except ConfigError as error:
        wrong.append(str(error))
    wrong += [f"mirrors.{one.name}: {why}" for one in config.mirrors if (why := one.problem(environ))]
    escalated = {name for step in notify.escalate for name in step.sinks}
    odd = [message for sink in notify.sinks for message in _warnings(sink, escalated)]
    for message in unknown_rules(config.control.policies, rules):
        odd.append(f"{message}; where a pack of yours has it, name that too: sentinel check-config {path} PACK")
    for at, policy in enumerate(config.control.policies):
        odd += _unknown_detectors(f"control.policies[{at}].detectors", policy.detectors)
    if not notify.sinks and document is not None and isinstance(document.value, dict) and "notify" in document.value:
        is_empty = not document.value["notify"].value
        odd += [] if is_empty else ["notify.sinks: there are none, so that nobody is notified of incidents"]
    return ConfigFindings(_placed(path, document, wrong), _placed(path, document, odd))


def _placed(path: Path, document: Located | None, messages: list[str]) -> tuple[Problem, ...]:
    """Return messages, each of which begins with its dotted path, with the line that this is written on."""
    root = document or Located({}, 1)
    lines = [locate(root, message.split()[0].rstrip(":"))[0].where for message in messages]
    return tuple(Problem(str(path), line, message) for line, message in zip(lines, messages, strict=True))


def _secrets(sink: SinkConfig) -> Iterator[tuple[str, str, str]]:
    """Yield (name, file, environment variable) of each secret that a sink may be given in either."""
    for field in sink.__struct_fields__:
        name = field.removesuffix("_file")
        if name != field and f"{name}_env" in sink.__struct_fields__:
            yield name, getattr(sink, field), getattr(sink, f"{name}_env")


def _unresolved(sink: SinkConfig, notify: NotifyConfig, environ: Mapping[str, str]) -> Iterator[str]:
    is_whole = True
    for name, file, variable in _secrets(sink):
        try:
            read_secret(f"notify.sinks.{sink.name}.{name}", file, variable, environ)
        except ConfigError as error:
            is_whole = False
            yield str(error)
    if is_whole:
        try:
            build_sink(sink, notify, environ, io.StringIO())
        except ConfigError as error:
            yield str(error)


def _warnings(sink: SinkConfig, escalated: Collection[str]) -> Iterator[str]:
    path = f"notify.sinks.{sink.name}"
    for name, file, _ in _secrets(sink):
        try:
            mode = Path(file).expanduser().stat().st_mode if file else 0
        except OSError:
            continue  # a problem already
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            who = "everybody" if mode & stat.S_IWOTH else "its group"
            yield f"{path}.{name}_file: {file}: {who} may write it, mode {stat.S_IMODE(mode):04o}; run: chmod go-w {file}"
    yield from _template_warnings(sink, path)
    if not sink.route.changes and sink.name not in escalated:
        yield f"{path}.route.changes: it is empty, so that no incident reaches this sink; leave it out for all changes"
    yield from _unknown_detectors(f"{path}.route.detectors", sink.route.detectors)


def _unknown_detectors(path: str, detectors: Sequence[str]) -> Iterator[str]:
    known = list(known_detectors())
    for at, detector in enumerate(detectors):
        if detector not in known and not is_dotted(detector):
            yield f'{path}[{at}]: unknown detector "{detector}"{nearest(detector, known)}'


def _template_warnings(sink: SinkConfig, path: str) -> Iterator[str]:
    """Yield why templates fail for a usual incident; what is wrong with them for any is a problem already."""
    templates = getattr(sink, "templates", NO_TEMPLATES)
    try:
        compiled = CompiledTemplates(templates, path, str)
    except ConfigError:
        return
    alert = sample_alert(sink.name, 0.0)
    try:
        compiled.applied(message_of(alert), alert)
    except TemplateFailure as error:
        yield str(error)
