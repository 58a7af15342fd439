"""Export formats of other packages: found by entry point, imported where one is asked for; what fails in one is named."""

from __future__ import annotations

from typing import get_args

from sentinel.entry_points import OutsidePart
from sentinel.errors import ConfigError, SentinelError
from sentinel.exception_words import described
from sentinel.exports.request import ExportFormat, ExportRequest, ExportSetting, Goes, Option, Written
from sentinel.outside_calls import misfit

ENTRY_POINTS = "sentinel.exports"
"""Group of entry points: the name of a format -> a class without arguments, or an object, that keeps `ExportFormat`."""
NEEDED = ("name", "goes_to", "options", "takes", "write")


class OutsideFormat:
    """An export format of another package, whose mistakes are errors that name the package."""

    def __init__(self, part: OutsidePart) -> None:
        """Import it. ConfigError where that fails, or where it does not keep `ExportFormat`."""
        self._where = part.where
        self._form = _loaded(part)

    @property
    def name(self) -> str:
        """What `--format` calls it."""
        return self._form.name

    @property
    def goes_to(self) -> Goes:
        """As its own says."""
        return self._form.goes_to

    @property
    def options(self) -> frozenset[Option]:
        """As its own says."""
        return frozenset(self._form.options)

    @property
    def takes(self) -> str:
        """As its own says."""
        return self._form.takes

    def write(self, request: ExportRequest, setting: ExportSetting) -> Written:
        """Have it write. ConfigError where it fails, or says that it wrote what is not there."""
        try:
            written: object = self._form.write(request, setting)
        except (SentinelError, OSError):
            raise
        except Exception as error:  # another package's code may fail in any way
            raise ConfigError(f"{self._where} failed: {described(error)}") from error
        if not isinstance(written, Written):
            what = f"write() gave {type(written).__name__}, expected a sentinel.exports.request.Written"
            raise ConfigError(f"{self._where} failed: {what}")
        if written.num_rows and request.output is not None and not request.output.exists():
            what = f"it says that it wrote {written.num_rows} rows, and {request.output} is not there"
            raise ConfigError(f"{self._where} failed: {what}; write to what sentinel.exports.output.text_output yields")
        return written


def _loaded(part: OutsidePart) -> ExportFormat:
    try:
        found = part.load_tried()
        form = found() if isinstance(found, type) else found
    except ConfigError as error:
        raise ConfigError(f"{part.where} {error}") from error
    except Exception as error:  # another package's code may fail in any way
        raise ConfigError(f"{part.where} cannot be made: {described(error)}") from error
    if problem := _shortcoming(form):
        raise ConfigError(f"{part.where} is no export format: {problem}; see sentinel.exports.request.ExportFormat")
    return form  # type: ignore[no-any-return]


def _shortcoming(form: ExportFormat) -> str:
    """Return in words what an object lacks to be an export format; empty: nothing."""
    lacking = [name for name in NEEDED if not hasattr(form, name)]
    if lacking:
        return f"it has no {' and no '.join(lacking)}"
    if form.goes_to not in get_args(Goes):
        return f"goes_to must be one of {', '.join(get_args(Goes))}, got {form.goes_to!r:.100}"
    if not isinstance(form.options, set | frozenset) or not form.options <= set(get_args(Option)):
        return f"options must be a set of {', '.join(get_args(Option))}, got {form.options!r:.100}"
    return misfit(form, {"write": ("request", "setting")})
