"""A daemon's ears alone: follows, closes, keeps decisions and views."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from sentinel.decision import Decision, Tick
from sentinel.ingest.follow import RunFollower
from sentinel.ingest.merge import ClosedStep
from sentinel.ingest.steps import StepAssembler


class Ears:
    """Polls until nothing is new; what was decided and what was seen is kept in order."""

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
        """Hear what there is; return the steps that closed."""
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
        closed += self._decided(self.assembler.finish(now))
        self.views += closed[len(closed) :]
        return closed

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
