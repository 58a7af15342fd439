"""A config file that people edit while it is in use: its newest text, once it stands still."""

from __future__ import annotations

import os
import stat

import msgspec

from sentinel.errors import ConfigError
from sentinel.monitor_config import MAX_CONFIG_BYTES, MonitorConfig, hash_of, is_blank, parse_config

STABLE_S = 0.4
"""Seconds unchanged after which a text is whole. Too small: editors and copies that write in pieces are read half; too
large: an edit takes effect late."""


class ConfigText(msgspec.Struct, frozen=True, kw_only=True):
    """A text that stood still, and what it says."""

    text: bytes
    text_hash: str
    config: MonitorConfig | None = None
    """None: the text is broken."""
    problem: str = ""
    """Why it is broken: file, line, nearest known word."""


class ConfigFile:
    """Looks at one file, as often as it is asked. Links are followed at every look: a swapped one is an edit."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.problem = ""
        """Why the file cannot be read now; empty when it can."""
        self._reading: ConfigText | None = None
        self._candidate: tuple[str, int, int] | None = None
        self._since = 0.0

    def look(self, mono: float) -> ConfigText | None:
        """Return the file's text if it stands still; None while it is being written, or away.

        mono: seconds, a clock that never jumps.
        """
        try:
            text, mark = self._read()
        except OSError as error:
            self.problem, self._candidate = f"{self.path}: cannot be read: {error.strerror or error}", None
            return None
        except ConfigError as error:
            self.problem, self._candidate = str(error), None
            return None
        self.problem = ""
        text_hash = hash_of(text)
        if self._reading is not None and self._reading.text_hash == text_hash:
            self._candidate = None
            return self._reading
        candidate = (text_hash, *mark)
        if candidate != self._candidate:
            self._candidate, self._since = candidate, mono
        if mono - self._since < STABLE_S:
            return None
        self._candidate = None
        self._reading = self._understand(text, text_hash)
        return self._reading

    def _understand(self, text: bytes, text_hash: str) -> ConfigText:
        try:
            config = parse_config(text, self.path)
            if is_blank(text):
                raise ConfigError(f"{self.path}: the file is empty; for the defaults of every key write {{}}")
        except ConfigError as error:
            return ConfigText(text=text, text_hash=text_hash, problem="; ".join(str(error).splitlines()))
        return ConfigText(text=text, text_hash=text_hash, config=config)

    def _read(self) -> tuple[bytes, tuple[int, int]]:
        # Never wait for the other end of a pipe.
        fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{self.path}: expected a regular file, got mode {stat.filemode(status.st_mode)}")
            if status.st_uid not in (0, os.geteuid()):
                raise ConfigError(
                    f"{self.path}: edits are followed in files of uid {os.geteuid()} or root, this one is of {status.st_uid}"
                )
            if status.st_mode & stat.S_IWOTH:
                raise ConfigError(f"{self.path}: edits are not followed where everybody may write; chmod o-w")
            if status.st_size > MAX_CONFIG_BYTES:
                raise ConfigError(f"{self.path}: expected at most {MAX_CONFIG_BYTES} bytes, got {status.st_size}")
            text = b""
            while piece := os.read(fd, MAX_CONFIG_BYTES):
                text += piece
            return text, (status.st_mtime_ns, status.st_ino)
        finally:
            os.close(fd)
