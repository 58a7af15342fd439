"""The steps of a run as a daemon closes them, without the rest of a daemon."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from sentinel.decision import Decision, Tick
from sentinel.ingest.follow import RunFollower
from sentinel.ingest.merge import ClosedStep
from sentinel.ingest.steps import StepAssembler

STATISTICS = ("mean", "std", "norm", "min", "max", "skew", "kurtosis")


class FollowedRun:
    """Polls a run until nothing is new, and keeps the problems, the decisions and the closed steps in order."""

    def __init__(self, run_dir: Path, *, late_after_steps: int = 2, late_after_s: float = 30.0, **more: int) -> None:
        self.problems: list[str] = []
        self.decisions: list[Decision] = []
        self.views: list[ClosedStep] = []
        self._num_replayed = 0
        self.follower = RunFollower(run_dir, on_problem=self.problems.append)
        self.assembler = StepAssembler(
            run_dir.name,
            late_after_steps=late_after_steps,
            late_after_s=late_after_s,
            **more,
        )

    def replay(self, decisions: list[Decision]) -> None:
        """Make decisions of a former daemon again, from the first on."""
        self.assembler.replay_decisions(decisions)
        self._num_replayed = len(decisions)

    def listen(self, now: float = 0.0, *, final: bool = False) -> list[ClosedStep]:
        """Read what there is; return the steps that closed."""
        closed: list[ClosedStep] = []
        while True:
            records = self.follower.poll(final=final)
            self.assembler.take(records, now)
            closed += self._decided(self.assembler.close(now, self.follower.behind))
            if not records:
                break
        self.views += closed
        return closed

    def finish(self, now: float = 0.0) -> list[ClosedStep]:
        """The run is over: close what is left."""
        closed = self.listen(now, final=True)
        left = list(self._decided(self.assembler.finish(now)))
        self.views += left
        return closed + left

    def _decided(self, closed: Iterable[ClosedStep | Tick]) -> Iterator[ClosedStep]:
        """Keep the new decisions, as a daemon journals them, and hand the steps on."""
        for view in closed:
            assert isinstance(view, ClosedStep) and view.decision is not None
            if view.decision.seq > self._num_replayed:
                self.decisions.append(view.decision)
            yield view


def seen(view: ClosedStep) -> tuple[object, ...]:
    """All that a judge can see of a step, to compare."""
    return (
        view.run,
        view.attempt,
        view.step,
        view.time,
        view.rows.tobytes(),
        view.row_rank.tolist(),
        view.row_logical.tolist(),
        view.tensors,
        view.stats.tobytes(),
        view.present.tolist(),
        repr(view.scalars),
        view.health,
        view.is_skipped,
        view.num_expected,
    )


def closed_steps(run_dir: Path, **late: float) -> list[ClosedStep]:
    """Return the steps of a run that is over; fails where there is none, or where reading them found a problem.

    late: `late_after_steps` and `late_after_s`, as a daemon takes them.
    """
    followed = FollowedRun(run_dir, **late)
    followed.finish()
    assert followed.views and not followed.problems, followed.problems
    return followed.views


def statistics(view: ClosedStep, kind: str, names: Sequence[str] = STATISTICS) -> dict[str, dict[str, float]]:
    """Return key -> statistics (and `count`, the number of elements) of every logical tensor of a kind that the step has."""
    moments = view.moments
    found = {}
    for at, tensor in enumerate(view.tensors):
        if tensor.kind == kind and view.present[at]:
            found[tensor.key] = {name: float(getattr(moments, name)()[at]) for name in names}
            found[tensor.key]["count"] = float(view.stats["count"][at])
    return found
