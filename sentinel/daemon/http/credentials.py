"""Credentials: the tokens and the certificate in force, read again when their files change."""

from __future__ import annotations

from pathlib import Path

from sentinel.daemon.http.certificate import Certificate
from sentinel.daemon.http.config import HttpConfig
from sentinel.daemon.http.tokens import load_tokens, read_tokens
from sentinel.errors import ConfigError


class Credentials:
    """What opens the door and what is shown at it. Broken files change nothing, and `problems` says so."""

    def __init__(self, state_dir: Path, config: HttpConfig) -> None:
        """Read tokens, made where there are none, and the certificate; ConfigError where they cannot be used."""
        self._path = state_dir / "tokens.json"
        self.tokens = load_tokens(state_dir)
        self.certificate = Certificate(Path(config.tls_cert), Path(config.tls_key)) if config.has_tls else None
        self._seen = self._stamp()
        self._tokens_problem = ""

    def refresh(self) -> None:
        """Read again what has changed; called once a second."""
        if self.certificate is not None:
            self.certificate.refresh()
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self.tokens = read_tokens(self._path)
        except ConfigError as error:
            self._tokens_problem = f"tokens: the former ones are in use: {error}"
        else:
            self._tokens_problem = ""

    def problems(self) -> list[str]:
        """Return in words why files as they are now are not in force."""
        tls = "" if self.certificate is None else self.certificate.problem
        return [problem for problem in (self._tokens_problem, tls and f"tls: {tls}") if problem]

    def _stamp(self) -> tuple[int, ...]:
        try:
            status = self._path.lstat()
        except OSError:
            return ()
        return status.st_mtime_ns, status.st_ino, status.st_size, status.st_mode, status.st_uid
