"""ExportRequest: what an export is to write; ExportFormat: the protocol of formats; Written: what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import msgspec

from sentinel.errors import ConfigError
from sentinel.store.run_paths import RunPaths

if TYPE_CHECKING:
    from sentinel.decision import Decision
    from sentinel.step_view import StepView

Option: TypeAlias = Literal["aggregate", "name", "kind", "statistic", "times", "squash-names", "vectors"]
"""Options that some formats take and others do not; all take steps and attempts."""
Goes: TypeAlias = Literal["text", "file", "directory"]
"""Where a format writes: `text`, to stdout or a file; `file`, to a file alone; `directory`, to many files."""


class UnfitOptions(ConfigError):
    """Options contradict each other, or the format does not take one."""


class ExportRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is written, of which run, and where."""

    run_dir: Path
    state_dir: Path | None = None
    """Directory of the journal; None: the one that the run names."""
    form: str
    """The format's name."""
    output: Path | None = None
    """File or directory; None: stdout."""
    names: tuple[str, ...] = ()
    """Globs of tensors, each its own series; empty: all."""
    aggregates: tuple[str, ...] = ()
    """Groups of tensors, `[NAME=]GLOB[,GLOB]`."""
    kinds: tuple[str, ...] | None = None
    """None: those that the format usually has."""
    statistics: tuple[str, ...] | None = None
    steps: tuple[int, int] = (0, 2**62)
    """First and last, both included."""
    times: tuple[float, float] | None = None
    """Seconds since the epoch between which a step ended; None: whenever."""
    attempt: int | None = None
    """Number of the attempt; None: of each step the newest."""
    is_ranked: bool | None = None
    """Rows as each rank recorded them, or merged; None: as the format usually has them."""
    is_squashed: bool = False
    """Leave out what stands before the last part `layers` of a name."""
    is_vectors: bool = False
    """Write vectors instead of rows: histograms, values for each head, expert or channel."""
    steps_per_file: int = 1
    jobs: int = 1
    """Processes that encode."""

    @property
    def paths(self) -> RunPaths:
        """Where the run's files are. StoreError where that is not known."""
        return RunPaths.of(self.run_dir, self.state_dir)

    def given(self) -> set[Option]:
        """Return which of the options were given that not every format takes."""
        has: dict[Option, bool] = {
            "aggregate": bool(self.aggregates), "name": bool(self.names), "kind": self.kinds is not None,
            "statistic": self.statistics is not None, "times": self.times is not None, "squash-names": self.is_squashed,
            "vectors": self.is_vectors,
        }  # fmt: skip
        return {option for option, is_given in has.items() if is_given}


class Written(msgspec.Struct):
    """What was written."""

    num_rows: int = 0
    num_series: int = 0
    num_steps: int = 0
    num_files: int = 0
    left_out: dict[str, int] = {}
    """Why -> series that were asked for and are not written."""
    files: list[dict[str, Any]] | None = None
    """Contents of each file, of formats that list them in place of the sums above; None: this one does not."""
    is_clean: bool = True
    """Whether nothing that was asked for is missing or damaged."""

    def sums(self, is_directory: bool) -> dict[str, Any]:
        """Return the summary that `--json` prints; of a directory the number of its files too."""
        reported: dict[str, Any] = {"num_rows": self.num_rows, "num_series": self.num_series, "num_steps": self.num_steps}
        if is_directory:
            reported["num_files"] = self.num_files
        return reported | {"num_left_out": sum(self.left_out.values()), "left_out": self.left_out}


class RecordedSteps(Protocol):
    """The steps of a run, read from its spool and journal."""

    @property
    def has_resumed(self) -> bool:
        """Whether a rank was started again, so that a step may have been trained twice."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of spool on disk, as of now."""
        ...

    @property
    def num_bytes_read(self) -> int:
        """Bytes of spool that the newest `views` has read."""
        ...

    @property
    def damage(self) -> str:
        """Words for what the newest `views` found broken in the spool; empty: nothing."""
        ...

    def views(self) -> Iterator[tuple[StepView, Decision]]:
        """Yield the steps in order, each with the decision that made it."""
        ...


class ExportProgress(Protocol):
    """Shows the progress of an export."""

    def show(self, num_steps: int, share: Callable[[], float]) -> None:
        """Show that `num_steps` were written. share: returns how much is done, in [0, 1]; it reads sizes from the disk."""
        ...


class ExportSetting(msgspec.Struct, frozen=True, kw_only=True):
    """What an export gets beside the request: a reader of runs, stdout, stderr, and a progress bar."""

    open_run: Callable[[RunPaths], AbstractContextManager[RecordedSteps]]
    stdout: Callable[[], AbstractContextManager[IO[bytes]]]
    to_stderr: Callable[[str], None]
    """Writes one line to stderr."""
    progress: Callable[[], AbstractContextManager[ExportProgress]]


class ExportFormat(Protocol):
    """One format: its name, where it goes, the options that it takes, and how it is written."""

    @property
    def name(self) -> str:
        """What `--format` calls it."""
        ...

    @property
    def goes_to(self) -> Goes:
        """Where it writes."""
        ...

    @property
    def options(self) -> frozenset[Option]:
        """Options that it takes; with any other it is refused."""
        ...

    @property
    def takes(self) -> str:
        """What it writes and which options select it, in words: `writes anomalies: --name, --steps and times choose
        them`."""
        ...

    def write(self, request: ExportRequest, setting: ExportSetting) -> Written:
        """Write what was asked for, whole or not at all. ConfigError where that cannot be."""
        ...
