"""Caps come after ordering, and what they leave out keeps no incident open."""

from __future__ import annotations

import numpy as np
import pytest

from sentinel.ingest.merge import ClosedStep
from sentinel.ingest.model_layout import ModelLayout
from sentinel.judge.judge import Judge, truncate
from sentinel.messages import ChunkInfo, Descriptor, EndStep, TensorInfo
from sentinel.moments import EMPTY
from sentinel.place import Place
from sentinel.record import NONE_ID, ROW_DTYPE, Kind
from sentinel.rules.language.loader import load_pack
from sentinel.step_view import RankStep

NUM_TENSORS = 40


@pytest.fixture
def layout():
    tensors = tuple(
        TensorInfo(id=at, name=f"layers.{at}.w", kind="wgrad", shape=(10,), site_pos=at) for at in range(NUM_TENSORS)
    )
    return ModelLayout(
        {
            0: Descriptor(
                version="1", place=Place(), chunks=(ChunkInfo(vpp_stage=0, depth=0),), tensors=tensors, row_fields=(),
                row_bytes=ROW_DTYPE.itemsize,
            )
        }
    )  # fmt: skip


def view(layout, step, num_bad):
    rows = np.zeros(NUM_TENSORS, ROW_DTYPE)
    for name in EMPTY.dtype.names:
        rows[name] = EMPTY[name]
    rows["tensor"] = rows["call_id"] = rows["site_pos"] = np.arange(NUM_TENSORS)
    rows["kind"], rows["micro_step"], rows["num_folded"] = int(Kind.WGRAD), -1, 1
    rows["bad_call_id"], rows["bad_micro_step"] = NONE_ID, -1
    rows["count"], rows["m2"] = 10, 10.0
    rows["num_nan"][:num_bad] = 1
    end = EndStep(step=step, num_rows=NUM_TENSORS, num_calls=NUM_TENSORS)
    part = RankStep(rank=0, descriptor=layout.descriptors[0], rows=rows, end_step=end, time=float(step))
    return ClosedStep(run="r", attempt=0, step=step, layout=layout, parts=[part])


def test_the_cap_comes_after_the_order_and_counts_what_it_left_out(layout):
    everything = Judge(load_pack()).judge(None, view(layout, 0, NUM_TENSORS)).anomalies

    written = Judge(load_pack(), max_anomalies=5).judge(None, view(layout, 0, NUM_TENSORS)).anomalies

    assert len(everything) == NUM_TENSORS
    assert written[:5] == everything[:5]
    assert (written[5].event, written[5].count) == ("truncated", NUM_TENSORS - 5)


def test_an_incident_ends_although_its_ends_were_not_written(layout):
    judge = Judge(load_pack(), max_anomalies=5)
    judge.judge(None, view(layout, 0, NUM_TENSORS))
    states = []
    for step in range(1, 60):
        states += [incident.state for incident in judge.judge(None, view(layout, step, 0)).incidents]

    assert states[-1] == "resolved"
    assert not judge.open_incidents


def test_one_rule_without_ends_does_not_stop_the_waiting_for_others(layout, tmp_path):
    pack = tmp_path / "pack.yaml"
    pack.write_text("rules:\n- {name: brief, detector: AnomalyNan, match: {kind: activation}, episode_quiet_steps: 0}\n")
    judge = Judge(load_pack([pack]))
    judge.judge(None, view(layout, 0, 1))
    states = {}
    for step in range(1, 60):
        for incident in judge.judge(None, view(layout, step, 1 if step < 30 else 0)).incidents:
            states[step] = incident.state

    # The fault goes on for 30 steps without a new onset: it is not quiet.
    assert [step for step, state in states.items() if state == "resolved"] >= [49]


def test_state_goes_on_where_it_was_taken(layout):
    one, other = Judge(load_pack()), Judge(load_pack())
    for step in range(5):
        one.judge(None, view(layout, step, step % 3))
    other.restore(one.snapshot())

    for step in range(5, 40):
        assert one.judge(None, view(layout, step, step % 4)) == other.judge(None, view(layout, step, step % 4))


def test_truncate_keeps_what_is_few(layout):
    few = Judge(load_pack()).judge(None, view(layout, 0, 3)).anomalies

    assert truncate(few, 3) == list(few)
