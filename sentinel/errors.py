"""The error tree: callers can act on each difference."""

from __future__ import annotations

import msgspec


class SentinelError(Exception):
    """Anything Sentinel raises on purpose. The message says where, what was expected, what came, what to do."""


class ConfigError(SentinelError):
    """A configuration that cannot be used; names the dotted path, the bound and the value it got."""


class RuleError(SentinelError):
    """A rule pack that cannot be used; names file, line and the nearest known word."""


class WireError(SentinelError):
    """Bytes that are not the frame they claim to be."""


class UndefinedStatistic(SentinelError):
    """A statistic that nobody knows by that name."""


class StoreError(SentinelError):
    """A journal or run directory that cannot be used safely."""


class NotThere(StoreError):
    """Something that was asked for and is not kept: the history of a run that has none, an incident that a run lacks."""


class PackageMissing(ConfigError):
    """A question that a package answers which is not installed; names the package."""


class TookTooLong(SentinelError):
    """A question that was given up when its time was over; asked for less, it can be answered."""


class LogError(SentinelError):
    """A plain log that cannot be read; names file and line, what was expected and what came."""


MALFORMED: tuple[type[Exception], ...] = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What reading JSON or msgpack raises where it is not what was promised: not of its kind, not UTF-8, nested too deeply."""
