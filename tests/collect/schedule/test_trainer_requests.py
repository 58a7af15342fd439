"""What the trainer is asked for: ready on every rank at one step, handed out once, answered, over when it says so."""

import pytest

from sentinel.collect.schedule.command_inbox import CommandInbox
from sentinel.collect.schedule.plan import Plan
from sentinel.command import RequestAction, WithdrawCommand
from sentinel.errors import ConfigError
from sentinel.monitor_config import DEFAULT_COMMANDS, MonitorConfig


class Rank:
    def __init__(self, allowed=DEFAULT_COMMANDS, *, asks=True):
        self.step, self.answers = 10, []
        self.inbox = CommandInbox(
            allowed, Plan(MonitorConfig()), step=lambda: self.step, rank=lambda: 0, acknowledge=self.answers.append
        )
        if asks:
            assert self.inbox.requests.take() == []

    def begin(self, step):
        self.step = step
        self.inbox.apply(step)

    def states(self):
        return [answer.state for answer in self.answers]


def asked(action="checkpoint", at_step=12, number=1, **fields):
    return RequestAction(id=f"c{number}", seq=number, at_step=at_step, action=action, **fields)


def test_a_request_is_handed_out_once_from_its_step_on_and_answered():
    rank = Rank()
    request = asked()

    assert rank.inbox.receive(request).state == "armed"
    rank.begin(11)
    assert rank.inbox.requests.take() == []
    rank.begin(12)
    assert rank.inbox.requests.take() == [request]
    assert rank.inbox.requests.take() == []
    assert rank.inbox.requests.is_open(request)
    rank.inbox.requests.answer(request, is_done=True, why="")

    assert rank.states() == ["applied", "ended"]
    assert not rank.inbox.requests.is_open(request)


def test_a_trainer_that_never_asks_refuses_and_says_why():
    answer = Rank(asks=False).inbox.receive(asked())

    assert (answer.state, answer.reason) == ("refused", "this trainer does not call monitor.requests()")


def test_a_trainer_whose_config_does_not_allow_it_refuses():
    answer = Rank(("EnableMonitoring",)).inbox.receive(asked())

    assert (answer.state, answer.reason) == ("refused", "RequestAction is not in allow_commands")


def test_a_trainer_that_stops_asking_misses_it():
    rank = Rank()
    rank.inbox.receive(asked(for_steps=5))
    for step in range(11, 17):
        rank.begin(step)
    assert rank.states() == []
    rank.begin(17)

    assert rank.states() == ["missed"]
    assert "did not ask for requests from step 12 to 16" in rank.answers[0].reason
    assert rank.inbox.requests.take() == []


def test_several_are_handed_out_in_the_order_of_their_steps():
    rank = Rank()
    late, early = asked("pause", 13, 1, for_s=60.0), asked("skip_batches", 12, 2, num_batches=3)
    rank.inbox.receive(late)
    rank.inbox.receive(early)
    rank.begin(12)
    rank.begin(13)

    assert rank.inbox.requests.take() == [early, late]


def test_a_pause_is_over_when_it_is_withdrawn_also_between_two_steps():
    rank = Rank()
    pause = asked("pause", for_s=3600.0)
    rank.inbox.receive(pause)
    rank.begin(12)
    [taken] = rank.inbox.requests.take()
    assert rank.inbox.requests.is_open(taken)

    rank.inbox.receive(WithdrawCommand(id="c2", seq=2, withdraws=pause.id))

    assert not rank.inbox.requests.is_open(taken)


def test_a_pause_is_over_by_itself():
    rank = Rank()
    rank.inbox.receive(asked("pause", for_s=1e-9))
    rank.begin(12)
    [taken] = rank.inbox.requests.take()

    assert not rank.inbox.requests.is_open(taken)


def test_a_refusal_carries_the_trainers_reason():
    rank = Rank()
    rank.inbox.receive(asked())
    rank.begin(12)
    [taken] = rank.inbox.requests.take()
    rank.inbox.requests.answer(taken, is_done=False, why="saved a minute ago")

    assert (rank.answers[-1].state, rank.answers[-1].reason) == ("refused", "saved a minute ago")


def test_a_rank_that_was_handed_the_list_of_another_may_answer_too():
    rank = Rank()
    rank.inbox.requests.answer(asked(), is_done=True, why="")

    assert rank.states() == ["ended"]


def test_what_is_no_request_is_refused_in_words():
    with pytest.raises(ConfigError, match=r"expected a request that monitor.requests\(\) returned, got str"):
        Rank().inbox.requests.answer("c1", is_done=True, why="")
