"""What a fuzzer brought down: files that are damaged in ways that a parser reports otherwise than one expects."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from sentinel.daemon.config import DaemonConfig, load_config
from sentinel.daemon.serving import ServedRun
from sentinel.errors import ConfigError, StoreError
from sentinel.explain.topk import topk
from sentinel.store.run_paths import RunPaths
from sentinel.testing import Nan, SyntheticRun

from ..support.serving import judge_run, loaded_packs


def judged_run(directory: Path) -> RunPaths:
    source = SyntheticRun(directory, layers=1, d_model=8, elements=8, micro_steps=1)
    source.plant(Nan(step=2, module="layers.0.mlp", rank=0))
    source.write(4)
    source.end()
    judge_run(directory, is_over=True)
    return RunPaths.of(directory)


@pytest.mark.parametrize(
    "text", [b"judging: \xff", b"notify: " + b"[" * 5000, b"judging: {late_after_s: 2026-05-45}", b"control: \x00"]
)
def test_a_configuration_that_is_no_text_names_its_file(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(text)

    with pytest.raises(ConfigError, match=r"config\.yaml"):
        load_config(tmp_path / "config.yaml")


@pytest.mark.parametrize(("table", "body"), [("incidents", b'{"id": "\xff"}'), ("decisions", b"\x81\xa3why\x01")])
def test_a_record_of_the_journal_that_cannot_be_read_says_what_to_do(table: str, body: bytes, tmp_path: Path) -> None:
    paths, packs = judged_run(tmp_path / "run"), loaded_packs()
    with sqlite3.connect(paths.journal) as db:
        db.execute(f"UPDATE {table} SET body = ?", (body,))

    with pytest.raises(StoreError, match=r"a record cannot be read: .* sentinel repair .* rebuilds it"):
        ServedRun(paths, DaemonConfig(), packs)
    # The lock was let go of: what is mended is served.
    paths.journal.unlink()
    for one in (paths.anomalies, paths.incidents):
        one.rename(one.with_name(one.name + ".old"))
    ServedRun(paths, DaemonConfig(), packs).close()


@pytest.mark.parametrize("field", [b'"x": "\xdf"', b'"x": ' + b"[" * 3000 + b"]" * 3000])
def test_an_anomaly_with_a_field_that_cannot_be_read_hides_no_other(field: bytes, tmp_path: Path) -> None:
    paths = judged_run(tmp_path / "run")
    [file] = sorted(paths.anomalies.iterdir())
    first, *rest = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([first[:-1] + b", " + field + b"}", *rest, b""]))

    found = topk(tmp_path / "run", 100, processes=1)

    assert len(found.entries) + found.num_malformed >= len([line for line in rest if b'"event":"end"' not in line])
    assert len(found.entries) >= 3
