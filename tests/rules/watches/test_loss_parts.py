"""Several losses of one run: terms and sides of a game may trade; a total and an evaluation may not."""

from __future__ import annotations

import numpy as np
import pytest

from sentinel.anomaly import Severity
from sentinel.rules.engine import Engine
from sentinel.rules.language.loader import load_pack
from sentinel.rules.language.schema import Pack
from sentinel.rules.watches.loss_parts import parts, sides


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["loss"], [False]),
        (["G/loss", "D/loss"], [True, True]),
        (["loss", "kl/loss"], [False, True]),
        (["train/loss", "train/kl_loss", "val/loss"], [False, True, False]),
        (["loss", "eval_loss"], [False, False]),
        (["policy/loss", "value/loss", "total_loss"], [True, True, False]),
    ],
)
def test_a_total_and_an_evaluation_are_no_parts(names, expected):
    assert parts(names) == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["loss"], [False]),
        (["G/loss", "D/loss"], [True, True]),
        (["loss", "kl/loss"], [False, False]),
        (["lm_loss", "aux_loss"], [False, False]),
        (["G/loss", "D/loss", "D/gp_loss", "val/loss"], [True, True, False, False]),
    ],
)
def test_the_losses_of_several_players_are_sides(names, expected):
    assert sides(names) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("climb", "other", "is_reported"), [(1.3, 1.0, False), (1.3, 1.3, True), (4.0, 1.0, True)])
def test_a_side_that_sways_alone_is_a_note_until_it_is_far(paper_run, rng, climb, other, is_reported):
    run = paper_run([("layers.0", "param")])
    engine, found = Engine(Pack(rules=(load_pack().rule("loss-drift"),))), []
    for step in range(900):
        share = min(max(step - 300, 0) / 300, 1.0)
        noise = np.exp(0.02 * rng.standard_normal(2))
        scalars = {"G/loss": climb**share * noise[0], "D/loss": other**share * noise[1]}
        found += [a for a in engine.judge(run.view(step, scalars=scalars)) if a.event == "onset"]

    assert found
    assert any(a.severity is not Severity.INFO for a in found) == is_reported


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rises", "falls", "severity"),
    [
        ("kl/loss", "loss", Severity.INFO),
        ("G/loss", "D/loss", Severity.INFO),
        ("loss", "kl/loss", Severity.WARNING),
        ("val/loss", "train/loss", Severity.WARNING),
        ("G/loss", "", Severity.WARNING),
    ],
)
def test_a_part_that_rises_while_another_loss_improves_is_a_note(paper_run, rng, rises, falls, severity):
    run = paper_run([("layers.0", "param")])
    engine, found = Engine(Pack(rules=(load_pack().rule("loss-drift"),))), []
    for step in range(600):
        climb = max(step - 300, 0) / 300
        scalars = {rises: (1.0 + 0.6 * climb) * np.exp(0.02 * rng.standard_normal())}
        if falls:
            scalars[falls] = 3.0 * np.exp(-step / 400 + 0.02 * rng.standard_normal())
        found += [a for a in engine.judge(run.view(step, scalars=scalars)) if a.event == "onset"]

    assert {a.tag_name for a in found} == {rises}
    assert max(a.severity.level for a in found) == severity.level


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stalls", "diverges", "severity"),
    [(True, False, Severity.INFO), (False, True, Severity.WARNING)],
    ids=["the total stalls for a while", "the total never fell beside it"],
)
def test_a_term_that_is_brought_in_is_a_note_while_the_total_has_gained_by_it(paper_run, rng, stalls, diverges, severity):
    """A divergence whose weight is raised from nothing, beside a total that falls with pauses longer than two memories."""
    run = paper_run([("layers.0", "param")])
    engine, found = Engine(Pack(rules=(load_pack().rule("loss-drift"),))), []
    for step in range(900):
        paused = min(step, 450) if stalls else 0
        noise = np.exp(0.04 * rng.standard_normal(2))
        scalars = {
            "loss": (100.0 if diverges else 100.0 - 0.1 * paused) * noise[0],
            "kl/loss": (1.0 + 10.0 * min(step / 500, 1.0) ** 0.5) * noise[1],
        }
        found += [a for a in engine.judge(run.view(step, scalars=scalars)) if a.event == "onset"]

    assert {a.tag_name for a in found} == {"kl/loss"}
    assert max(a.severity.level for a in found) == severity.level
