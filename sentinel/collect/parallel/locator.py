"""Finds out where this rank stands, as far as that exists by now, and hands it to whoever describes tensors."""

from __future__ import annotations

from collections.abc import Sequence

from sentinel.collect.attempt import RankAttempt
from sentinel.collect.hooks.chunk import Chunk
from sentinel.collect.hooks.parameters import WatchedParameters
from sentinel.collect.hooks.recorder import Recorder
from sentinel.collect.parallel.pipelining import PipelineWatch
from sentinel.collect.parallel.rank_place import RankPlace


class Locator:
    """Asked at attach, and once more at the first step: pipelines, schedules and meshes exist by the first forward."""

    def __init__(
        self,
        place: RankPlace,
        recorder: Recorder,
        parameters: WatchedParameters,
        pipelines: PipelineWatch,
        chunks: Sequence[Chunk],
        attempt: RankAttempt,
    ) -> None:
        """chunks: filled while the monitor is installed."""
        self.place = place
        self._recorder = recorder
        self._parameters = parameters
        self._pipelines = pipelines
        self._chunks = chunks
        self._attempt = attempt

    def locate(self) -> None:
        """Look around; what goes wrong leaves the rank where it stood."""
        try:
            self._tell_apart()
            if self._pipelines.install() and self._pipelines.problem:
                self._recorder.recording.tell("unknown_torch", self._pipelines.problem)
            self.place.locate()
            self._recorder.sites.place = self.place.place
            self._parameters.locate(self.place.place)
            if self._chunks and self.place.set_depths(self._chunks):
                self._parameters.forget()  # Their entries carry the number of their chunk.
        except Exception as error:
            self._recorder.guard("topology", error)

    def locate_at_first_step(self) -> None:
        """Look around once more, and say in the log how the modules that attach was given are read."""
        self.locate()
        self.place.tell_reading(self._chunks)

    def _tell_apart(self) -> None:
        """Say once that this rank could not agree with the others on a run, and how it can."""
        place = self.place.place
        if self._attempt.is_alone and place.world_size > 1:
            self._recorder.recording.tell(
                "ranks_apart",
                f"rank {place.rank} of {place.world_size} attached before init_process_group, and nothing says "
                f"which run the ranks share: it is a run of its own ({self._attempt.run}), and copies of weights are not "
                "compared; attach after init_process_group, or give all ranks one name (SENTINEL_RUN, or run: in the "
                "config)",
            )
