"""Locator: decides when the place of this rank is read, and hands it to the parts that describe tensors."""

from __future__ import annotations

from collections.abc import Sequence

from sentinel.collect.attempt import RankAttempt
from sentinel.collect.hooks.chunk import Chunk
from sentinel.collect.hooks.parameters import WatchedParameters
from sentinel.collect.hooks.recorder import Recorder
from sentinel.collect.parallel.pipelining import PipelineWatch
from sentinel.collect.parallel.rank_place import RankPlace


class Locator:
    """Reads the place at attach, and again at the first step, when pipelines, schedules and meshes exist."""

    def __init__(
        self,
        place: RankPlace,
        recorder: Recorder,
        parameters: WatchedParameters,
        pipelines: PipelineWatch,
        chunks: Sequence[Chunk],
        attempt: RankAttempt,
    ) -> None:
        """chunks: of this rank; the list is filled when the monitor is installed, behind this."""
        self.place = place
        self._recorder = recorder
        self._parameters = parameters
        self._pipelines = pipelines
        self._chunks = chunks
        self._attempt = attempt

    def locate(self) -> None:
        """Read the place anew and hand it on; an exception is reported, and the former place stays."""
        try:
            self._report_ranks_apart()
            if self._pipelines.install() and self._pipelines.problem:
                self._recorder.recording.report("unknown_torch", self._pipelines.problem)
            self.place.locate()
            self._recorder.sites.place = self.place.place
            self._parameters.locate(self.place.place)
            if self._chunks and self.place.set_depths(self._chunks):
                self._parameters.forget()  # Their entries carry the number of their chunk.
        except Exception as error:
            self._recorder.guard("topology", error)

    def locate_at_first_step(self) -> None:
        """Read the place again, and log whether the modules given to attach are chunks of a pipeline or models."""
        self.locate()
        self.place.log_reading(self._chunks)

    def _report_ranks_apart(self) -> None:
        """Report once that this rank could not agree with the others on a run, and how it can."""
        place = self.place.place
        if self._attempt.is_alone and place.world_size > 1:
            self._recorder.recording.report(
                "ranks_apart",
                f"rank {place.rank} of {place.world_size} attached before init_process_group, and nothing says "
                f"which run the ranks share: it is a run of its own ({self._attempt.run}), and copies of weights are not "
                "compared; attach after init_process_group, or give all ranks one name (SENTINEL_RUN, or run: in the "
                "config)",
            )
