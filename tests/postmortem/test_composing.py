"""The post-mortem of a run and of an incident: what it says is so, and what it does not know it says."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from sentinel.anomaly import Severity
from sentinel.daemon.config import DaemonConfig
from sentinel.daemon.recorded_alert import recorded_alert, recorded_orders
from sentinel.errors import ConfigError
from sentinel.history.config import HistoryConfig
from sentinel.postmortem import composing
from sentinel.postmortem.composing import MOST_TOLD, postmortem
from sentinel.postmortem.happenings import MOST_ROWS
from sentinel.postmortem.html_form import as_html
from sentinel.postmortem.markdown_form import as_markdown
from sentinel.postmortem.report_document import MISSING, Block, Curve, Grid, NamedTexts, Prose, ReportDocument, ReportPart
from sentinel.postmortem.run_material import Standing
from sentinel.postmortem.run_part import MOST_INCIDENTS
from sentinel.report.message import message_of
from sentinel.testing import Nan

from ..support.anomalies import a_nan, an_incident
from ..support.results import incidents
from ..support.serving import judge_run, small_run
from .conftest import BAD, MODULE, RANK

NOW = 1.8e9
ORDER = [
    "What happened", "When", "Where", "Diagnosis", "Before and after", "First causes", "Blast radius", "Timeline",
    "What was done", "What to do next", "Replay plan", "Environment and configuration in force", "Rules that spoke",
    "Skip list of samples",
]  # fmt: skip


def told(run_dir: Path, incident: str | None = None, **standing: object) -> ReportDocument:
    return postmortem(run_dir, incident, NOW, Standing(**standing))


def blocks_of(parts: tuple[ReportPart, ...], title: str) -> list[Block]:
    """All blocks of the parts with a title, those of parts of parts too."""
    found = []
    for part in parts:
        if part.title == title:
            found += list(part.blocks)
        found += blocks_of(part.parts, title)
    return found


def lacking(document: ReportDocument) -> list[str]:
    """What is said to be missing."""

    def walk(parts: tuple[ReportPart, ...]) -> Iterator[str]:
        for part in parts:
            yield from (one.text for one in part.blocks if isinstance(one, Prose) and one.tone == MISSING)
            yield from walk(part.parts)

    return list(walk(document.parts))


def copied(run_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run_dir, tmp_path / run_dir.name))


@pytest.fixture(scope="module")
def incident_report(judged: Path) -> ReportDocument:
    return told(judged, "worst", is_over=True)


def test_parts_come_in_the_order_in_which_a_person_who_was_paged_asks(incident_report: ReportDocument) -> None:
    assert [part.title for part in incident_report.parts] == ORDER


def test_it_says_of_an_incident_what_every_message_says_of_it(judged: Path, incident_report: ReportDocument) -> None:
    alert = recorded_alert(judged, "worst", NOW)
    message = message_of(alert, recorded_orders(judged, alert))
    said = {
        name: text
        for title in ("What happened", "When", "Where")
        for one in blocks_of(incident_report.parts, title)
        if isinstance(one, NamedTexts)
        for name, text in one.pairs
    }

    assert blocks_of(incident_report.parts, "What happened")[0] == Prose(message.headline(), "critical")
    for name in ("began with", "ranks", "machines", "since", "steps", "how bad", "cause"):
        assert said[name] == dict(message.fields)[name], name


def test_the_curves_show_the_bad_step_and_no_other(incident_report: ReportDocument) -> None:
    loss, tensor = (one for one in blocks_of(incident_report.parts, "Before and after") if isinstance(one, Curve))

    assert (loss.title, tensor.title) == ("loss", f"std of {MODULE} (activation)")
    assert loss.bad_steps == tensor.bad_steps == (BAD,)
    assert loss.marked == tensor.marked == (BAD, BAD)
    assert loss.steps == tensor.steps == tuple(range(60))
    assert loss.least[BAD] is None and all(one is not None for at, one in enumerate(loss.least) if at != BAD)


def test_the_first_cause_is_named_with_rule_rank_and_reach(incident_report: ReportDocument) -> None:
    (grid,) = (one for one in blocks_of(incident_report.parts, "First causes") if isinstance(one, Grid))
    (row,) = (dict(zip(grid.heads, row, strict=True)) for row in grid.rows)

    assert (row["Step"], row["Rank"], row["Tensor or value"], row["Rule"]) == (str(BAD), str(RANK), MODULE, "non-finite")
    radius = dict(blocks_of(incident_report.parts, "Blast radius")[0].pairs)
    assert row["Reaches"] == radius["anomalies"] and radius["steps"] == str(BAD)


def test_the_timeline_has_start_checkpoint_incident_and_end_in_order(incident_report: ReportDocument) -> None:
    (grid,) = (one for one in blocks_of(incident_report.parts, "Timeline") if isinstance(one, Grid))
    words = [row[2] for row in grid.rows]
    order = [
        next(at for at, text in enumerate(words) if re.search(wanted, text))
        for wanted in (
            r"attempt 0 began",
            r"^checkpoint",
            r"came first",
            r"incident \w+ (ended|resolved)",
            r"attempt 0 ended",
        )
    ]

    assert order == sorted(order), words
    assert [row[0] for row in grid.rows] == sorted(row[0] for row in grid.rows)


def test_the_run_is_told_with_its_incident_and_the_rules_that_spoke(judged: Path) -> None:
    document = told(judged, is_over=True, lines=("good: 60 steps watched",))
    (rules,) = (one for one in blocks_of(document.parts, "Rules that spoke") if isinstance(one, Grid))

    assert Prose("good: 60 steps watched") in blocks_of(document.parts, "What happened")
    assert any(part.title.startswith("CRITICAL i") for part in document.parts)
    assert rules.rows[0][0] == "non-finite" and "NaN" in rules.rows[0][-1]
    assert document.notices == ()


def test_what_was_not_recorded_is_said_and_what_was_is_not_called_missing(judged: Path, tmp_path: Path) -> None:
    known, bare = lacking(told(judged, "worst")), copied(judged, tmp_path)
    for name in (".daemon", "spool", "anomalies"):
        shutil.rmtree(bare / name)
    unknown = " ".join(lacking(told(bare, "worst")))

    assert not [line for line in known if re.search("samples|layout|values of|first cause|text of the rules", line)], known
    for words in (
        "ids of the samples",
        "layout",
        "a checkpoint before",
        "first cause",
        "seeds",
        "command line",
        "environment",
    ):
        assert words in unknown, words
    assert "No journal of the run could be read" in told(bare, "worst").notices[0]


@pytest.mark.parametrize("incident", [None, "worst"])
def test_without_history_journal_or_spool_there_is_a_report_in_every_form(
    judged: Path, tmp_path: Path, incident: str | None
) -> None:
    run_dir = copied(judged, tmp_path)
    for name in (".daemon", "spool", "control", "anomalies"):
        shutil.rmtree(run_dir / name, ignore_errors=True)
        document = told(run_dir, incident)

        assert f"step {BAD}" in as_markdown(document) and f"step {BAD}" in as_html(document)


def test_a_directory_in_which_nothing_was_written_has_a_report_too(tmp_path: Path) -> None:
    document = told(tmp_path)

    assert "No incident is on record." in as_markdown(document)
    with pytest.raises(ConfigError, match="none is recorded here"):
        told(tmp_path, "worst")


def test_torn_files_are_said_and_the_rest_is_told(judged: Path, tmp_path: Path) -> None:
    run_dir = copied(judged, tmp_path)
    lines = (run_dir / "incidents.jsonl").read_bytes()
    (run_dir / "incidents.jsonl").write_bytes(lines + b'{"id":"half')
    (run_dir / "anomalies" / "000001.jsonl").write_bytes(
        (run_dir / "anomalies" / "000001.jsonl").read_bytes() + b"\x00\xff{"
    )
    (run_dir / ".daemon" / "journal.sqlite").write_bytes(b"no database at all" * 100)
    next((run_dir / "spool").glob("r*/*.spool")).write_bytes(b"SNTL nonsense")
    document = told(run_dir, "worst")

    assert [one for one in document.notices if "1 lines of incidents.jsonl" in one]
    assert [one for one in document.notices if "the journal could not be read" in one]
    assert MODULE in as_markdown(document)
    assert isinstance(blocks_of(document.parts, "First causes")[0], Grid)


def test_a_live_run_is_said_to_be_live_and_one_that_is_over_is_not(judged: Path) -> None:
    assert "LIVE" in told(judged, judged_by="4711 on node7").notices[0]
    assert "4711 on node7" in told(judged, judged_by="4711 on node7").notices[0]
    assert told(judged, judged_by="4711 on node7", is_over=True).notices == ()
    assert told(judged).notices == ()


def test_values_of_a_later_attempt_are_not_shown_as_what_came_after(tmp_path: Path) -> None:
    run = small_run(tmp_path / "again").plant(Nan(step=12, module=MODULE, rank=RANK))
    run.write(16)
    run.restart(8, attempt=1)
    run.write(20)
    judge_run(run.directory, DaemonConfig(history=HistoryConfig(enabled=True)))
    (first,) = (one.id for one in incidents(run.directory) if one.attempt == 0)
    document = told(run.directory, first)
    curves = [one for one in blocks_of(document.parts, "Before and after") if isinstance(one, Curve)]

    assert "attempt 1 began: ranks 0-3, from a saved state" in as_markdown(told(run.directory))
    assert len(curves) == 2
    for one in curves:
        assert one.steps == tuple(range(16)) and one.bad_steps == (12,)


def test_curves_come_out_of_the_history_where_the_spool_is_gone(tmp_path: Path) -> None:
    run = small_run(tmp_path / "old").plant(Nan(step=12, module=MODULE, rank=RANK))
    run.write(20)
    judge_run(run.directory, DaemonConfig(history=HistoryConfig(enabled=True)), is_over=True)
    spooled = [one for one in blocks_of(told(run.directory, "worst").parts, "Before and after") if isinstance(one, Curve)]
    shutil.rmtree(run.directory / "spool")
    loss, tensor = (
        one for one in blocks_of(told(run.directory, "worst").parts, "Before and after") if isinstance(one, Curve)
    )

    assert loss.bad_steps == tensor.bad_steps == (12,) and loss.steps == tuple(range(20))
    assert (loss.title, tensor.title) == tuple(one.title for one in spooled)
    assert loss.caption == spooled[0].caption


def many_incidents(run_dir: Path, num: int, num_members: int) -> None:
    """Write a run's incidents and anomalies, as a judge leaves them, by the hundred."""
    (run_dir / "anomalies").mkdir(parents=True)
    anomalies, revisions = [], []
    for at in range(num):
        step = 100 + 7 * at
        members = [
            a_nan(name=f"layers.{one % 24}.mlp.{one}", step=step, rank=one % 8, time=1.7e9 + step)
            for one in range(num_members)
        ]
        anomalies += members
        severity = (Severity.CRITICAL, Severity.WARNING, Severity.INFO)[at % 3]
        revisions.append(
            an_incident(
                at, id=f"i{at:012x}", opened_step=step, last_step=step, severity=severity, title=f"NaN in layers.{at % 24}",
                root=members[0].id, first_causes=(members[0].id,), members=tuple(one.id for one in members),
                num_members=num_members, detectors=("AnomalyNan",), time=1.7e9 + step,
            )
        )  # fmt: skip
    (run_dir / "anomalies" / "000001.jsonl").write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in anomalies))
    (run_dir / "incidents.jsonl").write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in revisions))


def test_five_hundred_incidents_make_a_bounded_file_that_counts_what_it_leaves_out(tmp_path: Path) -> None:
    many_incidents(tmp_path / "many", 500, 20)
    document = told(tmp_path / "many")
    body = as_html(document)

    assert len(body.encode()) < 500_000
    (table,) = (one for one in blocks_of(document.parts, "Incidents") if isinstance(one, Grid))
    (timeline,) = (one for one in blocks_of(document.parts, "Timeline") if isinstance(one, Grid))
    assert len(table.rows) == MOST_INCIDENTS and len(timeline.rows) == MOST_ROWS
    assert sum(part.title.startswith("CRITICAL i") for part in document.parts) == MOST_TOLD
    assert f"{500 - MOST_INCIDENTS} more incidents" in body
    # Each opened once; of those that are told whole, the anomaly that came first.
    assert f"{500 + MOST_TOLD - MOST_ROWS} more less weighty entries" in body
    assert {row[1] for row in table.rows} == {"critical"}, "the gravest are shown"


def test_of_more_anomalies_than_are_looked_at_the_later_ones_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many_incidents(tmp_path / "many", 1, 50)
    whole = as_markdown(told(tmp_path / "many", "worst"))
    monkeypatch.setattr(composing, "MOST_MEMBERS", 10)
    bounded = as_markdown(told(tmp_path / "many", "worst"))

    assert "Counted among the 10 of its anomalies that came first; 40 came later." in bounded
    assert "came later" not in whole and "no longer in the files" not in whole + bounded
    assert "layers.0.mlp.0" in bounded, "what came first is among them"


def test_an_incident_of_many_anomalies_and_long_names_stays_small(tmp_path: Path) -> None:
    run_dir = tmp_path / "long"
    (run_dir / "anomalies").mkdir(parents=True)
    members = [a_nan(name="x" * 50_000 + str(at), step=5, rank=at) for at in range(60)]
    incident = an_incident(
        title="y" * 300_000, root_name="z" * 300_000, members=tuple(one.id for one in members), root=members[0].id,
        first_causes=tuple(one.id for one in members), evidence=tuple("e" * 100_000 for _ in range(100)),
        ranks=tuple(range(5000)), opened_step=5, last_step=5, num_members=60, detectors=("d" * 100_000,),
    )  # fmt: skip
    (run_dir / "anomalies" / "000001.jsonl").write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in members))
    (run_dir / "incidents.jsonl").write_bytes(msgspec.json.encode(incident) + b"\n")

    for incident_id in (None, "worst"):
        assert len(as_html(told(run_dir, incident_id)).encode()) < 300_000
        assert len(as_markdown(told(run_dir, incident_id)).encode()) < 300_000
