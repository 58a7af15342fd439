"""How long a stream stands still for other ranks, on a device in memory; the collectives are torch's, of a fake group."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.testing._internal.distributed.fake_pg import FakeStore

from sentinel.collect.parallel import stream_waiting
from sentinel.collect.parallel.stream_waiting import StreamWaits, held_streams, wait_clock
from sentinel.collect.parallel.waiting import WORKS, HostWaits
from tests.collect.accelerator import Event, Runtime, Stream

WORLD = 4


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of four of which this process is one; its collectives return at once."""
    # The works of real backends are plain ones.
    monkeypatch.setattr(FakeWork, "wait", lambda work, *args: dist.Work.wait(work, *args))
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())  # type: ignore[no-untyped-call]
    yield
    dist.destroy_process_group()


class Peers:
    """The other ranks: inside of a wait the current stream stands still until they have come.

    It is told first that a wait has ended, so what it puts on the stream lies between the clock's two events.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.come_at_s = 0.0
        self.num_waits = 0

    def enter(self) -> None: ...

    def add(self, seconds: float) -> None:
        self.num_waits += 1
        stream, come_at_s = self.runtime.current, self.come_at_s
        stream.enqueue(lambda: stream.hold_until(come_at_s))

    def promised(self, work: Any, future: Any) -> None: ...

    def done(self, work: Any, seconds: float) -> None: ...

    def may_be_held_by_event(self, stream: Any) -> bool:
        return False

    def may_be_held_by_stream(self, other: Any) -> bool:
        return False


class Rank:
    """One rank's clock and device, which its test drives as a trainer and a writer thread would."""

    def __init__(self, runtime: Runtime | None = None) -> None:
        self.runtime = runtime or Runtime()
        self.runtime.trainer = threading.get_ident()
        self.failures: list[tuple[str, str]] = []
        self.clock = StreamWaits(self.runtime, lambda site, error, **_: self.failures.append((site, str(error))))  # type: ignore[arg-type]
        self.clock.install()
        self.peers = Peers(self.runtime)
        self.watched = [WORKS, held_streams(Event, Stream)]
        for calls in self.watched:
            for user in [*calls.users]:
                calls.leave(user)
            calls.join(self.peers)  # type: ignore[arg-type]
            calls.join(self.clock)

    @property
    def stream(self) -> Stream:
        return self.runtime.streams[0]

    def meet(self, in_s: float) -> None:
        """The others come so many seconds after this rank's stream has done its work so far."""
        self.stream.run()
        self.peers.come_at_s = self.stream.now_s + in_s

    def end(self, *, runs: bool = True) -> tuple[float, float] | None:
        """End the step; what the writer thread reads of it, after the device has come so far, or before."""
        seconds, reading = self.clock.take()
        assert seconds == -1.0
        if runs:
            for stream in self.runtime.streams:
                stream.run()
        found: list[tuple[float, float] | None] = []
        if reading is not None:
            writer = threading.Thread(target=lambda: found.append(reading()))
            writer.start()
            writer.join()
        return found[0] if found else None

    def close(self) -> None:
        self.clock.remove()
        for calls in self.watched:
            calls.leave(self.peers)  # type: ignore[arg-type]


@pytest.fixture
def rank(group: None) -> Iterator[Rank]:
    before = vars(dist.ProcessGroup)["allreduce"], vars(dist.Work)["wait"], Event.wait, Stream.synchronize
    one = Rank()
    yield one
    one.close()
    assert (vars(dist.ProcessGroup)["allreduce"], vars(dist.Work)["wait"], Event.wait, Stream.synchronize) == before
    assert not WORKS.names and not held_streams(Event, Stream).names


def all_reduce() -> None:
    dist.all_reduce(torch.ones(2))


def async_wait() -> None:
    dist.all_reduce(torch.ones(2), async_op=True).wait()


def coalesced() -> None:
    with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu")):
        dist.broadcast(torch.ones(2), 0)
        dist.broadcast(torch.ones(3), 0)


def future() -> None:
    dist.all_reduce(torch.ones(2), async_op=True).get_future().wait()


COLLECTIVES = {
    "all_reduce": all_reduce,
    "all_reduce, waited for": async_wait,
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.ones(2 * WORLD), torch.ones(2)),
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(2 * WORLD)),
    "all_gather": lambda: dist.all_gather([torch.ones(2) for _ in range(WORLD)], torch.ones(2)),
    "broadcast": lambda: dist.broadcast(torch.ones(2), 0),
    "reduce": lambda: dist.reduce(torch.ones(2), 0),
    "all_to_all_single": lambda: dist.all_to_all_single(torch.ones(WORLD), torch.ones(WORLD)),
    "barrier": dist.barrier,
    "send": lambda: dist.send(torch.ones(2), 1),
    "recv": lambda: dist.recv(torch.ones(2), 1),
    "coalesced": coalesced,
    "future": future,
}


def test_the_device_decides_which_clock_there_is(group: None) -> None:
    failures: list[str] = []

    def guard(site: str, error: Exception, **_: Any) -> None:
        failures.append(site)

    assert isinstance(wait_clock(torch.device("cpu"), guard), HostWaits)
    blind = wait_clock(torch.device("meta"), guard)
    blind.install()
    blind.begin_step()
    all_reduce()
    assert blind.take() == (-1.0, None) and blind.is_waiting == -1 and not failures
    blind.remove()


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_is_waited_for_once(rank: Rank, name: str) -> None:
    rank.clock.begin_step()
    rank.stream.compute(0.25)
    rank.meet(in_s=0.5)
    COLLECTIVES[name]()
    rank.stream.compute(1.0)

    assert rank.end() == pytest.approx((1.75, 0.5))
    assert rank.peers.num_waits > 0


def test_of_several_ranks_only_the_straggler_does_not_wait(group: None) -> None:
    work_s = {0: [0.5, 0.5, 0.5], 1: [0.5, 0.9, 0.6], 2: [0.5, 0.4, 0.5]}
    came_s = [max(work_s[one][step] for one in work_s) for step in range(3)]
    found = {}
    for number, seconds in work_s.items():
        rank = Rank()
        for step in range(3):
            began_s = rank.stream.now_s
            rank.clock.begin_step()
            rank.stream.compute(seconds[step])
            rank.peers.come_at_s = began_s + came_s[step]
            all_reduce()
            rank.stream.compute(0.1)
            found[number, step] = rank.end()
        rank.close()

    for number, seconds in work_s.items():
        for step in range(3):
            assert found[number, step] == pytest.approx((came_s[step] + 0.1, came_s[step] - seconds[step])), (number, step)


def test_nested_waits_count_once(rank: Rank) -> None:
    rank.clock.begin_step()
    rank.clock.begin_backward_end()
    rank.meet(in_s=0.25)
    async_wait()
    rank.stream.compute(0.5)
    rank.clock.end_backward_end()
    rank.meet(in_s=1.0)
    rank.clock.enter()
    async_wait()
    rank.clock.add(0.0)

    assert rank.end() == pytest.approx((1.75, 1.75))


def test_a_backward_that_raised_before_its_end_leaves_nothing(rank: Rank) -> None:
    rank.clock.begin_step()
    rank.clock.begin_backward_end()
    rank.stream.compute(2.0)
    rank.clock.begin_backward_end()
    rank.stream.compute(0.5)
    rank.clock.end_backward_end()
    assert rank.end() == pytest.approx((2.5, 0.5))

    rank.clock.begin_step()
    rank.clock.begin_backward_end()
    rank.end()
    rank.clock.begin_step()
    rank.clock.end_backward_end()
    rank.meet(in_s=0.5)
    all_reduce()

    assert rank.end() == pytest.approx((0.5, 0.5))


def test_what_is_not_waited_for_costs_nothing(rank: Rank) -> None:
    rank.clock.begin_step()
    recorded = rank.runtime.num_recorded
    rank.meet(in_s=5.0)
    dist.all_reduce(torch.ones(2), async_op=True)
    assert rank.runtime.num_recorded == recorded
    rank.stream.compute(0.5)

    assert rank.end() == pytest.approx((0.5, 0.0))


def test_waits_between_two_steps_belong_to_the_later_one(rank: Rank) -> None:
    rank.clock.begin_step()
    rank.end()
    rank.meet(in_s=0.5)
    all_reduce()
    rank.clock.begin_step()
    rank.stream.compute(0.25)

    assert rank.end() == pytest.approx((0.25, 0.5))


def test_before_the_first_step_nothing_is_recorded(rank: Rank) -> None:
    all_reduce()

    assert rank.runtime.num_recorded == 0


@pytest.mark.parametrize("holds", ["wait_stream", "wait_event", "event.wait", "synchronize"])
def test_a_gather_on_a_stream_of_its_own_holds_the_one_that_trains(rank: Rank, holds: str) -> None:
    """As FSDP does it: called there with async_op=False, and awaited by an event."""
    train, side = rank.runtime.streams
    rank.clock.begin_step()
    train.compute(0.25)
    rank.runtime.current = side
    rank.peers.come_at_s = 1.0
    all_reduce()
    event = side.record_event()
    rank.runtime.current = train
    train.compute(0.5)
    if holds == "wait_stream":
        train.wait_stream(side)
    elif holds == "wait_event":
        train.wait_event(event)
    elif holds == "event.wait":
        event.wait()
    else:
        train.run()
        side.synchronize()
        train.hold_until(side.now_s)  # the host, which comes back from there, has put nothing on it meanwhile
    train.compute(0.5)

    assert rank.end() == pytest.approx((1.5, 0.25)), "0.25 of the 0.75 seconds of the gather lie behind other work"


def test_streams_that_no_collective_uses_hold_nobody_for_others(rank: Rank) -> None:
    train, side = rank.runtime.streams
    rank.clock.begin_step()
    side.compute(3.0)
    train.wait_stream(side)
    side.synchronize()

    assert rank.end() == pytest.approx((3.0, 0.0))


def test_waits_of_another_thread_do_not_count(rank: Rank) -> None:
    rank.clock.begin_step()
    rank.meet(in_s=1.0)
    other = threading.Thread(target=all_reduce)
    other.start()
    other.join()

    step_s, wait_s = rank.end() or (0.0, -1.0)
    assert (step_s, wait_s) == pytest.approx((1.0, 0.0)), "the stream is the same, the wait is that thread's"


def test_the_thread_of_a_backward_counts(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_waiting, "in_backward", lambda: True)
    rank.clock.begin_step()
    rank.meet(in_s=1.0)
    other = threading.Thread(target=all_reduce)
    other.start()
    other.join()

    assert rank.end() == pytest.approx((1.0, 1.0))


def test_what_a_graph_records_is_not_timed(rank: Rank) -> None:
    rank.clock.begin_step()
    rank.runtime.is_recording_graph = True
    all_reduce()
    rank.runtime.is_recording_graph = False
    rank.meet(in_s=0.5)
    all_reduce()
    assert rank.end() == pytest.approx((0.5, 0.5))

    rank.runtime.is_recording_graph = True
    rank.clock.begin_step()
    all_reduce()
    assert rank.end() is None, "a step that begins and ends inside of a graph"

    rank.runtime.is_recording_graph = False
    rank.clock.begin_step()
    rank.runtime.is_recording_graph = True
    assert rank.end() is None
    assert not rank.failures


def test_nothing_is_recorded_while_torch_compile_traces(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.clock.begin_step()
    recorded = rank.runtime.num_recorded
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for collective in COLLECTIVES.values():
        collective()

    assert rank.runtime.num_recorded == recorded


def test_a_step_with_more_waits_than_the_bound_is_not_known(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_waiting, "MAX_PAIRS", 8)
    for num_waits, is_known in ((8, True), (9, False), (100, False), (8, True)):
        rank.clock.begin_step()
        for _ in range(num_waits):
            async_wait()

        assert (rank.end() is not None) == is_known, num_waits
    assert rank.runtime.num_timed_events == 2 * 8 + 2


def test_a_step_that_the_device_has_not_done_is_not_known(rank: Rank) -> None:
    rank.clock.begin_step()
    all_reduce()
    rank.stream.compute(1.0)
    assert rank.end(runs=False) is None

    rank.clock.begin_step()
    rank.meet(in_s=0.5)
    all_reduce()
    assert rank.end() == pytest.approx((0.5, 0.5)), "the events of the one before are used again"
    assert not rank.failures


def test_events_are_used_again(rank: Rank) -> None:
    for step in range(1000):
        rank.clock.begin_step()
        for _ in range(1 + step % 3):
            async_wait()
        rank.end(runs=step % 7 != 0)

    assert rank.runtime.num_timed_events == 2 + 2 * 3
    assert rank.runtime.num_recorded == sum(2 + 2 * (1 + step % 3) for step in range(1000))


@pytest.mark.parametrize("at", ["begin", "wait", "backward end", "end", "writer"])
def test_a_runtime_that_raises_is_reported_once_and_the_trainer_goes_on(rank: Rank, at: str) -> None:
    def step(dies: str) -> tuple[float, float] | None:
        for here in ("begin", "wait", "backward end", "end"):
            rank.runtime.is_dead = rank.runtime.is_dead or dies == here
            if here == "begin":
                rank.clock.begin_step()
            elif here == "wait":
                all_reduce()
            elif here == "backward end":
                rank.clock.begin_backward_end()
                rank.clock.end_backward_end()
        seconds, reading = rank.clock.take()
        assert seconds == -1.0
        rank.runtime.is_dead = rank.runtime.is_dead or dies == "writer"
        return reading() if reading is not None else None

    step("never")
    assert step(at) is None
    rank.runtime.is_dead = False

    assert [step("never") for _ in range(3)] == [None] * 3
    assert rank.failures == [("waits", "CUDA error: device-side assert triggered")]
    recorded = rank.runtime.num_recorded
    step("never")
    assert rank.runtime.num_recorded == recorded, "what has failed is not tried again"


def test_in_a_world_of_one_nothing_is_done() -> None:
    runtime, failures = Runtime(), []
    clock = StreamWaits(runtime, lambda site, error, **_: failures.append(error))  # type: ignore[arg-type]
    clock.install()
    clock.begin_step()
    clock.begin_backward_end()
    clock.end_backward_end()
    assert clock.take() == (-1.0, None)
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())  # type: ignore[no-untyped-call]
    try:
        clock.begin_step()
        all_reduce()
        assert clock.take() == (-1.0, None)
    finally:
        dist.destroy_process_group()

    assert not WORKS.names and not held_streams(Event, Stream).names
    assert runtime.num_calls == 0 and not failures


def test_a_group_that_comes_behind_the_attach_is_seen() -> None:
    runtime = Runtime()
    clock = StreamWaits(runtime, lambda site, error, **_: None)  # type: ignore[arg-type]
    clock.install()
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())  # type: ignore[no-untyped-call]
    try:
        clock.begin_step()
        all_reduce()
        _, reading = clock.take()
        runtime.streams[0].run()
        assert reading is not None and reading() == pytest.approx((0.0, 0.0))
    finally:
        clock.remove()
        dist.destroy_process_group()
