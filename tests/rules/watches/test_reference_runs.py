"""Scalars beside reference runs: what the batch did to all is told apart from what this run has for itself."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from sentinel.anomaly import Severity
from sentinel.errors import RuleError
from sentinel.judge.judge import Judge
from sentinel.judge.references import read_references, with_reference
from sentinel.logs.log_file import read_log
from sentinel.logs.views import log_views
from sentinel.reference import combine
from sentinel.rules.language.loader import load_pack, read_pack
from sentinel.rules.language.schema import Pack

POINTS = 400
BATCH, OWN = 260, 340


def make_runs(rng, num, noise=0.0015):
    """Return [num, POINTS]: runs that share their batches (2.7 %), one of which (BATCH) more than doubles all of them."""
    shared = 2.0 * (1.0 + 2.0 * np.exp(-np.arange(POINTS) / 80.0)) * np.exp(0.027 * rng.standard_normal(POINTS))
    shared[BATCH] *= 2.2
    return shared * np.exp(noise * rng.standard_normal((num, POINTS)))


def write_log(path, loss, steps=None):
    steps = np.arange(len(loss)) if steps is None else steps
    path.write_text("step,loss\n" + "".join(f"{s},{x}\n" for s, x in zip(steps, loss, strict=True)))
    return path


def loss_rule(reference=None) -> Pack:
    pack = Pack(rules=(load_pack().rule("loss-spike"),))
    return pack if reference is None else with_reference(pack, reference)


def judge(pack, path):
    """Return the onsets and the number of rows judged."""
    judge, found, rows = Judge(pack), [], 0
    for view in log_views(read_log(path), run="own"):
        found += [a for a in judge.judge(None, view).anomalies if a.event == "onset"]
        rows += 1
    return found, rows


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 2, 5])
def test_two_percent_shows_beside_reference_runs_and_a_bad_batch_is_no_fault(num, rng, tmp_path):
    loss = make_runs(rng, num + 1)
    loss[0, OWN] *= 1.025
    references = [write_log(tmp_path / f"{i}.csv", one) for i, one in enumerate(loss[1:])]
    own = write_log(tmp_path / "own.csv", loss[0])

    alone, rows = judge(loss_rule(), own)
    found, rows_beside = judge(loss_rule(read_references(references)), own)

    assert rows == rows_beside == POINTS
    assert [(a.step, a.severity) for a in alone if a.step == BATCH] == [(BATCH, Severity.CRITICAL)]
    assert OWN not in [a.step for a in alone]
    by_step = {a.step: a for a in found}
    assert sorted(by_step) == [BATCH, OWN]
    assert by_step[BATCH].severity is Severity.INFO and by_step[BATCH].reference_score >= 1.0
    assert by_step[OWN].severity is not Severity.INFO and by_step[OWN].reference_score < 1.0
    assert by_step[OWN].baseline == pytest.approx(loss[0, OWN] / 1.025, rel=0.01)


@pytest.mark.slow
def test_reference_runs_that_lack_steps_log_seldom_or_hold_nan_do_no_harm(rng, tmp_path, caplog):
    loss = make_runs(rng, 5)
    loss[0, OWN] *= 1.03
    loss[2, 200:210] = np.nan
    loss[4, OWN - 20] *= 0.2
    logs = [
        write_log(tmp_path / "seldom.csv", loss[1, ::10], np.arange(0, POINTS, 10)),
        write_log(tmp_path / "nan.csv", loss[2]),
        write_log(tmp_path / "short.csv", loss[3, :240]),
        write_log(tmp_path / "dropped.csv", loss[4]),
    ]
    own = write_log(tmp_path / "own.csv", loss[0])

    found, rows = judge(loss_rule(read_references(logs)), own)

    assert rows == POINTS
    assert [a.step for a in found] == [BATCH, OWN]
    assert said(caplog) == []


@pytest.mark.slow
def test_reference_runs_on_other_data_say_nothing(rng, tmp_path):
    own = write_log(tmp_path / "own.csv", make_runs(rng, 1)[0])
    strangers = [write_log(tmp_path / f"{i}.csv", make_runs(np.random.default_rng(i), 1)[0]) for i in range(3)]

    alone, _ = judge(loss_rule(), own)
    found, rows = judge(loss_rule(read_references(strangers)), own)

    assert rows == POINTS and len(alone) == 1
    assert [a.step for a in found] == [a.step for a in alone]


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "sentinel.rules"]


@pytest.mark.slow
def test_reference_runs_that_do_not_follow_are_said_once_and_while_it_lasts(rng, tmp_path, caplog):
    own = write_log(tmp_path / "own.csv", make_runs(rng, 1)[0])
    others = [write_log(tmp_path / f"{i}.csv", make_runs(rng, 1)[0]) for i in range(2)]
    judge = Judge(loss_rule(read_references(others)))

    for view in log_views(read_log(own), run="own"):
        judge.judge(None, view)

    (text,) = said(caplog)
    assert 'rule "loss-spike": the 2 runs under reference have a loss that this run does not follow' in text
    assert [text] == [f"rules: {one}" for one in judge.blindness]


@pytest.mark.slow
def test_reference_runs_without_a_step_or_a_scalar_of_the_run_are_said(rng, tmp_path, caplog):
    loss = make_runs(rng, 2)
    own = write_log(tmp_path / "own.csv", loss[0])
    later = write_log(tmp_path / "later.csv", loss[1], np.arange(POINTS) + 10 * POINTS)
    norms = tmp_path / "norms.csv"
    norms.write_text("step,grad_norm\n" + "".join(f"{step},{1.0 + 0.01 * step}\n" for step in range(POINTS)))

    judge(loss_rule(read_references([later])), own)
    judge(loss_rule(read_references([norms])), own)

    apart, lacking = said(caplog)
    assert "the run under reference has no loss at any step of this run" in apart
    assert "the runs under reference log no loss, but grad_norm" in lacking


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 5])
def test_nothing_is_said_of_reference_runs_that_follow(num, rng, tmp_path, caplog):
    loss = make_runs(rng, num + 1)
    references = [write_log(tmp_path / f"{i}.csv", one) for i, one in enumerate(loss[1:])]

    judge(loss_rule(read_references(references)), write_log(tmp_path / "own.csv", loss[0]))

    assert said(caplog) == []


def test_a_rule_names_its_reference_runs_and_the_pack_holds_them(rng, tmp_path):
    loss = make_runs(rng, 3)
    write_log(tmp_path / "a.csv", loss[1])
    write_log(tmp_path / "b.csv", loss[2])
    rules = tmp_path / "mine.yaml"
    rules.write_text("rules:\n  - name: loss-spike\n    reference: [a.csv, b.csv]\n")

    pack = load_pack([rules], references=read_references)
    checked = load_pack([rules])
    again = msgspec.json.decode(msgspec.json.encode(pack), type=Pack)
    write_log(tmp_path / "b.csv", loss[0])
    changed = load_pack([rules], references=read_references)

    series = pack.rule("loss-spike").reference.series["loss"]
    steps, values = series.arrays()
    assert (steps == np.arange(POINTS)).all() and series.num_runs == 2
    assert values == pytest.approx(loss[1:].T)
    assert checked.rule("loss-spike").reference is None
    assert again.pack_hash == pack.pack_hash != changed.pack_hash


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("  - name: loss-spike\n    reference: gone.csv\n", 3, 'there is no log or run "gone.csv"'),
        ("  - name: loss-spike\n    reference: 5\n", 3, "expected a path"),
        ("  - name: loss-drift\n    reference: []\n", 3, "LossSpike and GradNormSpike do"),
    ],
)
def test_what_is_wrong_with_a_reference_is_said_with_its_line(text, line, says, tmp_path):
    rules = tmp_path / "mine.yaml"
    rules.write_text("rules:\n" + text)

    _, problems = read_pack([rules], references=read_references)

    assert [(one.line, says in one.message) for one in problems] == [(line, True)]
    with pytest.raises(RuleError):
        load_pack([rules])


@pytest.mark.slow
def test_a_snapshot_goes_on_beside_the_reference_runs(rng, tmp_path):
    loss = make_runs(rng, 4)
    loss[0, OWN] *= 1.03
    reference = combine([{"loss": (np.arange(POINTS), one)} for one in loss[1:]])
    views = list(log_views(read_log(write_log(tmp_path / "own.csv", loss[0])), run="own"))
    whole, first, second = (Judge(loss_rule(reference)) for _ in range(3))

    straight = [a for view in views for a in whole.judge(None, view).anomalies]
    before = [a for view in views[:300] for a in first.judge(None, view).anomalies]
    second.restore(first.snapshot())
    after = [a for view in views[300:] for a in second.judge(None, view).anomalies]

    assert [a.step for a in straight if a.event == "onset"] == [BATCH, OWN]
    assert [(a.id, a.score) for a in before + after if a.event == "onset"] == [
        (a.id, a.score) for a in straight if a.event == "onset"
    ]


@pytest.mark.slow
def test_the_run_itself_as_its_reference_run_is_told_once(rng, tmp_path, caplog):
    own = write_log(tmp_path / "own.csv", make_runs(rng, 1)[0])

    found, rows = judge(loss_rule(read_references([own])), own)

    said = [one.getMessage() for one in caplog.records if "the run itself" in one.getMessage()]
    assert rows == POINTS and len(said) == 1
    assert 'rule "loss-spike": reference run 1 of 1' in said[0]
    # Were it a reference run, the batch would be acquitted by the run's own spike.
    assert [(a.step, a.severity, a.reference_score) for a in found] == [(BATCH, Severity.CRITICAL, None)]


@pytest.mark.slow
def test_one_step_below_the_reference_runs_is_shown_and_pages_nobody(rng, tmp_path):
    loss = make_runs(rng, 6)
    loss[0, OWN] *= 0.95
    reference = combine([{"loss": (np.arange(POINTS), one)} for one in loss[1:]])

    found, rows = judge(loss_rule(reference), write_log(tmp_path / "own.csv", loss[0]))

    assert rows == POINTS
    by_step = {a.step: a for a in found}
    assert by_step[OWN].severity is Severity.WARNING and by_step[OWN].score >= 2.0
    assert "of its baseline" in by_step[OWN].message and "do not show it" in by_step[OWN].message
