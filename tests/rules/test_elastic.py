"""Elastic changes: what is merged over ranks keeps its baseline, what is a rank's own begins anew."""

from __future__ import annotations

import numpy as np
import pytest

from sentinel.rules.engine import Engine
from sentinel.rules.language.loader import load_pack

TENSORS = [("a", "activation"), ("b", "activation"), ("c", "activation")]


def judge(engine, run, steps, norm):
    return [one for step in steps for one in engine.judge(run.view(step, norm * np.ones(3))) if one.rule == "turbulent-norm"]


@pytest.mark.parametrize(("word", "is_local"), [("unknown", True), ("replicate", False)])
@pytest.mark.parametrize(("size", "is_seen"), [(4, True), (3, False)])
def test_elastic_changes_reset_local_series_only(paper_run, word, is_local, size, is_seen):
    engine = Engine(load_pack())
    before = paper_run(TENSORS, num_ranks=4, placements={"dp": word})
    after = paper_run(TENSORS, num_ranks=size, placements={"dp": word})
    assert any("@dp" in tensor.key for tensor in before.layout.tensors) == is_local
    assert judge(engine, before, range(60), 1.0) == []

    found = judge(engine, after, range(60, 64), 90.0)

    assert bool(found) == (is_seen or not is_local)
