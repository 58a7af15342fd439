"""The rules in use: read from files, read again when those change, and kept as they were when the new ones are broken."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sentinel.errors import MALFORMED, RuleError
from sentinel.judge.references import read_references
from sentinel.rules.language.loader import PACKS, builtin_packs, load_pack
from sentinel.rules.language.schema import Pack

log = logging.getLogger("sentinel.rules")

FORMER_NAMES = {"TwinRanks": "DuplicateRanks"}
"""Detectors whose name in rules was another when a journal kept them."""

_Signature = tuple[tuple[str, int, int, int], ...]


class RulePacks:
    """paths: files, directories or names of built-in packs, merged in order over the built-in default pack."""

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self.problem = ""
        """Why the newest files are not in use; empty when they are."""
        self.counts: dict[str, int] = {"ok": 0, "failed": 0}
        """Outcome -> reloads."""
        self.loaded_at: float | None = None
        """Seconds since the epoch of the last load that worked; None before the first reload."""
        self._paths = list(paths)
        self._pack: Pack | None = None
        self._hash = ""
        self._signature: _Signature = ()

    @property
    def paths(self) -> tuple[str | Path, ...]:
        """What they are read from, as `load_pack` takes it."""
        return tuple(self._paths)

    @property
    def pack(self) -> Pack:
        """The rules in use."""
        assert self._pack is not None, "load comes first"
        return self._pack

    @property
    def pack_hash(self) -> str:
        """16 hex digits of the rules in use."""
        return self._hash

    def load(self) -> Pack:
        """Read the files for the first time; RuleError names everything that is wrong."""
        self._signature = self._look()
        self._use(load_pack(self._paths, references=read_references))
        return self.pack

    def have_changed(self) -> bool:
        """Return whether a file appeared, went or changed since it was last read. A few stat calls."""
        return self._look() != self._signature

    def reload(self, now: float) -> str:
        """Read the files again and return `ok` or `failed`; a broken pack changes nothing but `problem`.

        now: seconds since the epoch.
        """
        self._signature = self._look()
        try:
            pack = load_pack(self._paths, references=read_references)
        except RuleError as error:
            self.problem = str(error)
            self.counts = {**self.counts, "failed": self.counts["failed"] + 1}
            fields = {"event": "rules.reload", "outcome": "failed", "problem": self.problem}
            words = "rules: the former ones stay in use, because the new ones are broken:\n%s"
            log.error(words, error, extra={"fields": fields})
            return "failed"
        former = self._hash
        self._use(pack)
        self.problem = ""
        self.loaded_at = now
        self.counts = {**self.counts, "ok": self.counts["ok"] + 1}
        fields = {"event": "rules.reload", "outcome": "ok", "pack_hash": self._hash}
        what = self._hash if self._hash != former else "unchanged"
        log.info("rules: %d in use (%s)", len(pack.rules), what, extra={"fields": fields})
        return "ok"

    def _use(self, pack: Pack) -> None:
        self._pack, self._hash = pack, pack.pack_hash

    def _look(self) -> _Signature:
        files: list[Path] = [PACKS / "default.yaml"]
        for given in self._paths:
            path = Path(given)
            if path.is_dir():
                files += sorted([*path.glob("*.yaml"), *path.glob("*.yml")])
            else:
                files.append(builtin_packs().get(str(given), path) if not path.exists() else path)
        seen = []
        for file in files:
            try:
                status = file.stat()
            except OSError:
                seen.append((str(file), 0, 0, 0))
            else:
                seen.append((str(file), status.st_mtime_ns, status.st_size, status.st_ino))
        return tuple(seen)


def encode_pack(pack: Pack) -> bytes:
    """Return the rules as the journal keeps them."""
    return msgspec.json.encode(pack)


def decode_pack(body: bytes) -> Pack:
    """Return the rules that the journal kept; RuleError when a newer or older version wrote them."""
    try:
        pack = msgspec.json.decode(body, type=Pack)
    except MALFORMED as error:
        raise RuleError(f"a rule pack in the journal cannot be read: {error}; it is of another version") from error
    rules = tuple(
        msgspec.structs.replace(rule, detector=FORMER_NAMES.get(rule.detector, rule.detector)) for rule in pack.rules
    )
    return msgspec.structs.replace(pack, rules=rules)
