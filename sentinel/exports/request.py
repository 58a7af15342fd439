"""ExportRequest: what is asked of an export; ExportFormat: what each format owes; and what became of it."""

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
"""What some formats take and others do not; steps and attempts all of them take."""


class UnfitOptions(ConfigError):
    """What was asked for does not go together, or not with the format."""


class ExportRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is written, of which run, and where."""

    run_dir: Path
    state_dir: Path | None = None
    """Where the journal is; None: where the run says."""
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
    """None: of each step the newest."""
    is_ranked: bool | None = None
    """Rows as each rank recorded them, or merged; None: as the format usually has them."""
    is_squashed: bool = False
    """Leave out what stands before the last part `layers` of a name."""
    is_vectors: bool = False
    """What is no row instead: histograms, values for each head, expert or channel."""
    steps_per_file: int = 1
    jobs: int = 1
    """Processes that encode."""

    @property
    def paths(self) -> RunPaths:
        """Where the run's files are. StoreError where that cannot be told."""
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
    """What each file holds, of a format that says so in place of the sums above; None: it does not."""
    is_clean: bool = True
    """Nothing that was asked for is missing or broken."""

    def sums(self, is_directory: bool) -> dict[str, Any]:
        """Return what is told of it all, for people's programs; of a directory the number of its files too."""
        reported: dict[str, Any] = {"num_rows": self.num_rows, "num_series": self.num_series, "num_steps": self.num_steps}
        if is_directory:
            reported["num_files"] = self.num_files
        return reported | {"num_left_out": sum(self.left_out.values()), "left_out": self.left_out}


class RecordedSteps(Protocol):
    """A run's steps as they are on disk."""

    @property
    def has_resumed(self) -> bool:
        """Whether a rank began anew: then a step may be there twice."""
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
    """Shows how far an export is."""

    def show(self, num_steps: int, share: Callable[[], float]) -> None:
        """Move on. share: returns how much is done, in [0, 1]; asking looks at the disk."""
        ...


class ExportSetting(msgspec.Struct, frozen=True, kw_only=True):
    """What an export is handed beside the request: the run's steps, stdout and people's ears."""

    open_run: Callable[[RunPaths], AbstractContextManager[RecordedSteps]]
    stdout: Callable[[], AbstractContextManager[IO[bytes]]]
    say: Callable[[str], None]
    """Writes one line of talk."""
    progress: Callable[[], AbstractContextManager[ExportProgress]]


class ExportFormat(Protocol):
    """One format: its name, where it goes, the options that it takes, and how it is written."""

    @property
    def name(self) -> str:
        """What `--format` calls it."""
        ...

    @property
    def goes_to(self) -> Literal["text", "file", "directory"]:
        """`text`: stdout or a file; `file`: a file alone; `directory`: many files."""
        ...

    @property
    def options(self) -> frozenset[Option]:
        """Options that it takes; with any other it is refused."""
        ...

    @property
    def takes(self) -> str:
        """The same in words: `writes anomalies: --name, --steps and times choose them`."""
        ...

    def write(self, request: ExportRequest, setting: ExportSetting) -> Written:
        """Write what was asked for, whole or not at all. ConfigError where that cannot be."""
        ...
