"""What a message says was ordered because of an incident: only what was, and what became of it."""

from __future__ import annotations

import pytest

from sentinel.command import DisableMonitoring, DumpTensors, EnableMonitoring
from sentinel.control.command_status import CommandStatus
from sentinel.control.command_words import orders_in_words

from ..support.anomalies import an_incident

INCIDENT = an_incident(run="a:b", attempt=1, opened_step=70, last_step=72)


def monitoring(state="applied", key="a:b:1:71:x", source="policy", **fields):
    usual = {"id": "c", "seq": 1, "at_step": 75, "kinds": ("activation",), "for_steps": 20, "attempt": 1}
    return CommandStatus(command=EnableMonitoring(**(usual | fields)), state=state, key=key, source=source)


DUMP = CommandStatus(
    command=DumpTensors(id="d", seq=2, at_step=75, attempt=1), state="ended", key="a:b:1:71:x:dump", source="policy"
)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (monitoring(), "monitoring of activation is on, steps 75 to 94, all ranks"),
        (monitoring("issued", ranks=(2, 3)), "monitoring of activation asked of the trainer, steps 75 to 94, ranks 2, 3"),
        (monitoring("ended"), "monitoring of activation was on, steps 75 to 94, all ranks"),
        (monitoring("refused"), "monitoring of activation refused by the trainer, steps 75 to 94, all ranks"),
        (monitoring(for_steps=None), "monitoring of activation is on, from step 75 on, all ranks"),
        (DUMP, "raw tensors of wgrad dumped, step 75, all ranks"),
        (monitoring(key="", source="cli", at_step=60), "monitoring of activation is on, steps 60 to 79, all ranks"),
    ],
)
def test_an_order_is_told_with_what_became_of_it(status, words):
    assert orders_in_words([status], INCIDENT) == (words,)


@pytest.mark.parametrize(
    "status",
    [
        monitoring("withdrawn"),
        monitoring(key="a:b:1:69:x"),
        monitoring(key="a:b:1:73:x"),
        monitoring(key="a:b:0:71:x", attempt=0),
        monitoring(key="", source="cli"),
        monitoring(key="nonsense"),
        monitoring(key="", source="cli", at_step=40),
        CommandStatus(command=DisableMonitoring(id="e", seq=3, at_step=71), key="a:b:1:71:x", source="policy"),
    ],
)
def test_an_order_that_is_not_of_it_is_not_told(status):
    assert orders_in_words([status], INCIDENT) == ()


def test_many_orders_are_counted():
    assert orders_in_words([monitoring()] * 9, INCIDENT)[-1] == "and 6 more orders"
