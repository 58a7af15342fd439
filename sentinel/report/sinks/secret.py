"""Secrets of sinks: the configuration names a file or an environment variable, and never holds them itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sentinel.errors import ConfigError


def read_secret(path: str, file: str, variable: str, environ: Mapping[str, str]) -> str:
    """Return the secret that `<path>_file` or `<path>_env` names; empty when neither is given.

    environ: the environment as the command line hands it down. ConfigError when what is named is not there or empty.
    """
    if file and variable:
        raise ConfigError(f"{path}: expected one of {path}_file and {path}_env, got both")
    if file:
        try:
            text = Path(file).expanduser().read_text().strip()
        except OSError as error:
            raise ConfigError(f"{path}_file: {file}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}_file: {file}: expected text in UTF-8, got other bytes") from error
        if not text:
            raise ConfigError(f"{path}_file: {file}: expected a secret, got an empty file")
        return text
    if variable:
        text = environ.get(variable, "").strip()
        if not text:
            raise ConfigError(f"{path}_env: expected the environment variable {variable} to be set, it is not")
        return text
    return ""
