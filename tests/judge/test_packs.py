"""Rules in use: read again when files change, and kept when the new ones are broken."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sentinel.errors import RuleError
from sentinel.judge.packs import RulePacks, decode_pack, encode_pack
from sentinel.rules.language.loader import load_pack

RULE = """\
rules:
  - name: loss-nan
    detector: AnomalyNan
    match: {{kind: scalar, name: loss}}
    severity: {severity}
"""


def write(path: Path, text: str) -> None:
    path.write_text(text)
    # Two writes within one tick of the file system's clock must still look different.
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))


def test_a_change_is_seen_and_used(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(RULE.format(severity="info"))
    packs = RulePacks([file])
    packs.load()
    before = packs.pack_hash

    assert not packs.have_changed()
    write(file, RULE.format(severity="critical"))
    assert packs.have_changed()
    assert packs.reload(5.0) == "ok"
    assert packs.pack_hash != before
    assert packs.pack.rule("loss-nan").severity.value == "critical"
    assert (packs.loaded_at, packs.counts) == (5.0, {"ok": 1, "failed": 0})
    assert not packs.have_changed()


@pytest.mark.parametrize("text", ["rules: [", "rules:\n  - name: x\n    detector: KurtosisSpyke\n", ""])
def test_a_broken_pack_keeps_the_former_rules_and_says_so(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(RULE.format(severity="info"))
    packs = RulePacks([file])
    packs.load()
    before = packs.pack_hash

    write(file, text)

    assert packs.reload(5.0) == "failed"
    assert packs.pack_hash == before
    assert "mine.yaml:" in packs.problem
    assert packs.counts == {"ok": 0, "failed": 1}
    assert not packs.have_changed()
    write(file, RULE.format(severity="warning"))
    assert packs.reload(6.0) == "ok"
    assert packs.problem == ""


def test_files_of_a_directory_come_and_go(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(RULE.format(severity="info"))
    packs = RulePacks([tmp_path])
    packs.load()

    (tmp_path / "b.yaml").write_text("rules: []\n")
    assert packs.have_changed()
    assert packs.reload(1.0) == "ok"
    (tmp_path / "b.yaml").unlink()
    assert packs.have_changed()


def test_the_first_load_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match="no such file"):
        RulePacks([tmp_path / "none.yaml"]).load()


def test_the_journal_gives_back_the_same_rules(tmp_path: Path) -> None:
    packs = RulePacks(["msprobe"])
    packs.load()

    assert decode_pack(encode_pack(packs.pack)).pack_hash == packs.pack_hash
    with pytest.raises(RuleError, match="another version"):
        decode_pack(b"{}")


def test_a_pack_that_was_kept_under_a_detectors_former_name_is_read() -> None:
    kept = encode_pack(load_pack()).replace(b'"DuplicateRanks"', b'"TwinRanks"')

    assert b"TwinRanks" in kept
    assert decode_pack(kept) == load_pack()
