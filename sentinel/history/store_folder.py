"""StoreFolder: a folder of an object store, or of any other file system that fsspec knows, as a history lies in it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from sentinel.errors import ConfigError, StoreError
from sentinel.history.manifest import PART
from sentinel.printable import printable

Answer = TypeVar("Answer")

MOST_WORDS = 300
"""Characters of an error of a store that are told."""
PACKAGES = {
    "s3": "sentinel[object-stores]",
    "s3a": "sentinel[object-stores]",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
}
"""Scheme -> what is installed for it."""
CREDENTIALS = {
    "gcsfs": "GOOGLE_APPLICATION_CREDENTIALS",
    "adlfs": "AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and who az login knows",
}
"""What is installed for a store -> where its client looks for credentials, where that is not as of S3."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")
_USER = re.compile(r"//[^/@\s]*@")
_QUERY = re.compile(r"\?[^\s\"']+")


class FileVanished(StoreError):
    """A file that a manifest names is not there: it was retired, and whoever reads the manifest again is told what is."""


def is_url(text: str) -> bool:
    """Return whether a text names a place in a store and not one on this machine's disks."""
    return _SCHEME.match(text) is not None


def checked_url(text: str) -> str:
    """Return a URL without slashes at its end. ConfigError for one that holds a password or a signature, or is a chain.

    Credentials come from where the store's own client looks for them: what is in a URL is in the shell's history, in logs
    and in `ps`.
    """
    shown = _told(text)
    if "::" in text:
        raise ConfigError(f"{shown}: expected the URL of one store, got a chain of them")
    user = text.partition("://")[2].partition("/")[0].rpartition("@")[0]
    if ":" in user or "?" in text or "#" in text:
        raise ConfigError(
            f"{shown}: expected a URL without credentials, got one that has a password or a query; give them where the "
            "store's client looks for them, as AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    url = text.rstrip("/")
    if url.endswith(":"):
        raise ConfigError(f"{shown}: expected a bucket and a path, as in s3://bucket/runs/NAME")
    return url


class StoreFolder:
    """A folder; its files are named without slashes. What its store refuses is a StoreError that says what was wanted.

    Nothing is asked of the store when one is made. Credentials are looked for by the store's client, and told nowhere.
    """

    def __init__(self, url: str) -> None:
        """url: as `checked_url` returned it. ConfigError where a package is missing, or no store has this scheme."""
        scheme = url.partition("://")[0].lower()
        try:
            import fsspec
        except ImportError as error:
            raise ConfigError(
                f"{url}: stores need the package fsspec ({error}); pip install 'sentinel[object-stores]'"
            ) from error
        try:
            # No listing is kept: another process may have written since. Nothing is shared: a fork would share it too.
            self._fs, self._path = fsspec.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
        except ImportError as error:
            package = PACKAGES.get(scheme, f'the package that fsspec wants for "{scheme}"')
            raise ConfigError(f"{url}: a package is missing ({_told(str(error))}); pip install '{package}'") from error
        except ValueError as error:
            if scheme in PACKAGES:
                raise self._unstarted(url, error) from error
            raise ConfigError(f"{url}: {_told(str(error))}; known are s3, gs, abfs, file and what fsspec lists") from error
        except Exception as error:  # whatever a store's client makes of what it finds in its environment
            raise self._unstarted(url, error) from error
        self.url = url
        """Without credentials."""

    @staticmethod
    def _unstarted(url: str, error: Exception) -> ConfigError:
        return ConfigError(
            f"{url}: the store's client does not start: {_told(str(error))}; it looks for credentials as in {_sought(url)}"
        )

    def read(self, name: str) -> bytes:
        """Return a whole file. FileVanished where there is none."""
        return bytes(self._asked(f"read {name}", lambda: self._fs.cat_file(self._at(name))))

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes of a file from `start` up to and without `end`. FileVanished where there is no such file."""
        return bytes(self._asked(f"read {name}", lambda: self._fs.cat_file(self._at(name), start=start, end=end)))

    def sizes(self) -> dict[str, int]:
        """Return name -> bytes of the files that lie there; none where there is no folder."""

        def listed() -> list[dict[str, Any]]:
            self._fs.invalidate_cache()
            try:
                return list(self._fs.ls(self._path, detail=True))
            except FileNotFoundError:
                return []

        found = self._asked("list what is there", listed)
        return {str(one["name"]).rpartition("/")[2]: int(one["size"] or 0) for one in found if one["type"] == "file"}

    def put(self, path: Path, name: str) -> None:
        """Write a local file there, under a name that no reader knows yet. OSError where the local one cannot be read."""
        # A link that somebody laid in a run's directory would lead to a file of ours.
        if path.is_symlink():
            raise StoreError(f"{path}: expected a file, got a link; a history holds none")
        with path.open("rb"):
            pass

        def write() -> None:
            self._make()
            self._fs.put_file(str(path), self._at(name))

        self._asked(f"write {name}", write)

    def replace(self, name: str, body: bytes) -> None:
        """Write a file, at once: a reader has the former one or this one, and no part of it."""

        def write() -> None:
            self._make()
            if not self._is_disk:
                self._fs.pipe_file(self._at(name), body)
                return
            # A disk shows a file that is half written; a store has it when all of it is there.
            self._fs.pipe_file(self._at(PART + name), body)
            self._fs.mv(self._at(PART + name), self._at(name))

        self._asked(f"write {name}", write)

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""

        def delete() -> None:
            try:
                self._fs.rm_file(self._at(name))
            except FileNotFoundError:
                return

        self._asked(f"delete {name}", delete)

    @property
    def has_bucket(self) -> bool:
        """Whether there is a bucket of this name, as far as the store says."""
        bucket = self._path.partition("/")[0]
        try:
            return self._is_disk or not bucket or bool(self._fs.exists(bucket))
        except Exception:  # whoever may not ask is told by what may not be read
            return True

    @property
    def local_path(self) -> Path | None:
        """Where it lies on this machine's disks; None: it does not."""
        return Path(self._path) if self._is_disk else None

    @property
    def _is_disk(self) -> bool:
        protocols = self._fs.protocol if isinstance(self._fs.protocol, (tuple, list)) else (self._fs.protocol,)
        return "file" in protocols

    def _make(self) -> None:
        if self._is_disk:
            self._fs.makedirs(self._path, exist_ok=True)

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    def _asked(self, what: str, ask: Callable[[], Answer]) -> Answer:
        """Return what the store answers, or raise what it refuses in words: each client has errors of its own."""
        try:
            return ask()
        except FileNotFoundError as error:
            bucket = "" if self.has_bucket else ": there is no such bucket"
            raise FileVanished(f"{self.url}: cannot {what}{bucket or ': it is not there'} ({_told(str(error))})") from error
        except Exception as error:
            # Azure's client has an error of its own for all that its store answers.
            if isinstance(error, PermissionError) or getattr(error, "status_code", None) in (401, 403):
                raise StoreError(
                    f"{self.url}: no right to {what} ({_told(str(error))}); credentials are those that the store's client "
                    f"finds, as in {_sought(self.url)}, and a store that may not be listed says so of a file that is not "
                    "there too"
                ) from error
            raise StoreError(f"{self.url}: cannot {what}: {type(error).__name__}: {_told(str(error))}") from error


def _sought(url: str) -> str:
    """Return where the client of a URL's store looks for credentials."""
    return CREDENTIALS.get(PACKAGES.get(url.partition("://")[0].lower(), ""), "AWS_PROFILE")


def _told(text: str) -> str:
    """Return what may be told of a text: no user, password or query of a URL, and not more of it than one reads."""
    told = printable(_QUERY.sub("?***", _USER.sub("//***@", text)))
    return told if len(told) <= MOST_WORDS else told[: MOST_WORDS - 3] + "..."
