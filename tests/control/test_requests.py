"""A request and what becomes of it, by what the ranks answer."""

import pytest

from sentinel.control.commands import RunCommands
from sentinel.messages import Ack


class Desk:
    def __init__(self, tmp_path):
        self.entries = []
        self.commands = RunCommands(tmp_path, audit=lambda *entry: self.entries.append(entry))
        self.command = self.commands.request("checkpoint", at_step=12, now=1000.0)

    def answered(self, step, **answers):
        """The state after ranks said what they say; `r0="armed"`."""
        for rank, state in answers.items():
            self.commands.acknowledge(int(rank[1:]), Ack(command=self.command.id, state=state, step=step), 1001.0)
        self.commands.tick({0: step, 1: step}, 1001.0)
        return self.commands.known.get(self.command.id).state


def test_a_request_is_armed_then_taken_up_then_done(tmp_path):
    desk = Desk(tmp_path)

    assert desk.answered(9, r0="armed") == "issued"
    assert desk.answered(9, r1="armed") == "armed"
    # Its step is over, and nobody asked yet: that is no answer.
    assert desk.answered(13) == "armed"
    assert desk.answered(14, r0="applied") == "armed"
    assert desk.answered(14, r1="applied") == "applied"
    assert desk.answered(20, r0="ended") == "applied"
    assert desk.answered(20, r1="ended") == "ended"


def test_what_one_rank_cannot_hold_ready_none_is_handed(tmp_path):
    desk = Desk(tmp_path)

    assert desk.answered(9, r0="armed", r1="refused") == "withdrawn"


def test_what_every_rank_refuses_is_refused(tmp_path):
    assert Desk(tmp_path).answered(9, r0="refused", r1="refused") == "refused"


@pytest.mark.parametrize(
    ("last", "state", "why"),
    [
        ({"r0": "refused", "r1": "refused"}, "refused", "refused by the trainer"),
        ({"r0": "missed", "r1": "missed"}, "refused", "the trainer did not ask for requests"),
        ({"r0": "applied", "r1": "missed"}, "partial", "not taken up by rank 1"),
        ({"r0": "ended", "r1": "missed"}, "ended", ""),
    ],
)
def test_the_trainers_last_word_is_its_state(tmp_path, last, state, why):
    desk = Desk(tmp_path)
    desk.answered(9, r0="armed", r1="armed")

    assert desk.answered(14, **last) == state
    assert desk.commands.known.get(desk.command.id).reason == why


def test_the_same_key_is_asked_once(tmp_path):
    commands = RunCommands(tmp_path)
    first = commands.request("pause", at_step=5, now=1.0, for_s=60.0, key="k")

    assert commands.request("pause", at_step=9, now=2.0, for_s=60.0, key="k") == first
