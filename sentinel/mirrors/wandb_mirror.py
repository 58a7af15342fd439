"""Weights & Biases: a run of its own for each run, offline or online; incidents as alerts, what was found as an artifact."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import msgspec

from sentinel.anomaly import Severity
from sentinel.errors import ConfigError
from sentinel.mirrors.lacking_library import lacking_library
from sentinel.mirrors.mirror import MirrorBatch, MirroredIncident, MirrorParts
from sentinel.mirrors.mirror_select import MirrorSelect
from sentinel.printable import printable
from sentinel.report.sinks.secret import read_secret

log = logging.getLogger("sentinel.mirrors")

Mode = Literal["offline", "online"]
STEP, ATTEMPT = "step", "attempt"
"""Keys of each row of the history beside the values."""
ONSETS, ONSETS_STEP = "anomalies/onsets", "anomalies/step"
KEY_VARIABLE = "WANDB_API_KEY"
AT_ONCE = timedelta(milliseconds=1)
"""Between two alerts of one title; W&B takes 0 for its default, a minute."""
INIT_S = 30.0
"""Seconds that W&B has for the beginning of a run."""
RELEASE_S = 5.0
"""Seconds that W&B's process has to let go of a run that could not begin."""
_LEVELS = {Severity.INFO: "INFO", Severity.WARNING: "WARN", Severity.CRITICAL: "ERROR"}


class WandbConfig(msgspec.Struct, frozen=True, kw_only=True, tag="wandb", forbid_unknown_fields=True):
    """Runs of Weights & Biases."""

    name: str = "wandb"
    """Name in metrics and messages."""

    mode: Mode = "offline"
    """`offline`: files that `wandb sync` uploads whenever you like; `online`: uploaded while the run is judged."""

    project: str = "sentinel"
    """Project of the runs."""

    entity: str = ""
    """Team or user of the project; empty: that of the key."""

    directory: str = ""
    """Where W&B's own `wandb/` lies; empty: in each run's directory."""

    api_key_file: str = ""
    """File with the key, for `online`."""

    api_key_env: str = ""
    """Environment variable with the key; empty, and no file: `WANDB_API_KEY`, or what `wandb login` left."""

    alerts: bool = True
    """Whether an incident that opens is an alert of W&B, which mails it or sends it to Slack as its user has set there."""

    select: MirrorSelect = MirrorSelect()
    """What is mirrored."""

    def problem(self, environ: Mapping[str, str]) -> str:
        """Return that wandb is not installed, or that there is no key; empty: neither."""
        try:
            key = self._key(environ)
        except ConfigError as error:
            return str(error).removeprefix(f"mirrors.{self.name}.")
        netrc = Path(environ.get("NETRC") or Path(environ.get("HOME") or "/") / ".netrc").expanduser()
        if self.mode == "online" and not key and not netrc.exists():
            return f"api_key_env: expected a key in {KEY_VARIABLE}, or one that wandb login left in {netrc}, found none"
        return lacking_library("wandb", "wandb")

    def build(self, parts: MirrorParts) -> WandbMirror:
        """Return the mirror of a run, which begins or goes on in W&B."""
        import wandb

        # It keeps logs of its own beside the run; what matters of them is raised.
        logging.getLogger("wandb").propagate = False
        run_id, _, count = parts.mark.partition(" ")
        run_id = run_id or parts.key[:16]
        # Nothing of the daemon is W&B's to record: neither its output nor its machine, its packages or its code.
        settings = wandb.Settings(
            console="off", silent=True, x_disable_stats=True, x_disable_meta=True, x_save_requirements=False,
            disable_git=True, disable_code=True, host="", program="", init_timeout=INIT_S,
            api_key=self._key(parts.environ) or None,
        )  # fmt: skip
        try:
            run = wandb.init(
                project=self.project, entity=self.entity or None, id=run_id, name=parts.run, mode=self.mode, resume="allow",
                dir=self.directory or str(parts.run_dir), config={"sentinel": {"run": parts.run, **parts.labels}},
                job_type="sentinel", reinit="create_new", settings=settings,
            )  # fmt: skip
        except (wandb.Error, TimeoutError):
            _release(run_id)
            raise
        num_rows = int(count) if count.isdigit() else 0
        if self.mode == "online" and run.starting_step < num_rows:
            log.warning(
                "mirror %s of run %s: W&B has %d of %d rows; wandb sync --include-online has the others, of %s", self.name,
                parts.run, run.starting_step, num_rows, Path(self.directory or parts.run_dir) / "wandb",
            )  # fmt: skip
        return WandbMirror(run, run_id, num_rows, parts, has_alerts=self.alerts)

    def _key(self, environ: Mapping[str, str]) -> str:
        variable = self.api_key_env or (KEY_VARIABLE if not self.api_key_file and environ.get(KEY_VARIABLE) else "")
        return read_secret(f"mirrors.{self.name}.api_key", self.api_key_file, variable, environ)


class WandbMirror:
    """Logs a row for each step. The mark is the run's id and how many rows it has.

    Rows are numbered by us, over restarts: W&B leaves out one whose number it has already.
    """

    def __init__(self, run: Any, run_id: str, num_rows: int, parts: MirrorParts, *, has_alerts: bool) -> None:
        """run: of wandb, begun."""
        self._run, self._id, self._num_rows, self._parts, self._has_alerts = run, run_id, num_rows, parts, has_alerts
        run.define_metric("*", step_metric=STEP)
        run.define_metric(ONSETS, step_metric=ONSETS_STEP)

    def write(self, batch: MirrorBatch) -> str:
        """Hand a batch to W&B, which writes it from a process of its own."""
        for step in batch.steps:
            self._log({**{_key(name): value for name, value in step.values}, STEP: step.step, ATTEMPT: step.attempt})
        for number, count in Counter(one.step for one in batch.anomalies).items():
            self._log({ONSETS: count, ONSETS_STEP: number})
        for one in batch.incidents:
            if self._has_alerts and one.change == "opened":
                self._alert(one)
        return f"{self._id} {self._num_rows}"

    def close(self, *, is_over: bool) -> None:
        """End the run in W&B. is_over: with the files of anomalies and incidents as its artifact `anomalies-ID`."""
        if is_over and (files := self._parts.found_files):
            import wandb

            artifact = wandb.Artifact(f"anomalies-{self._id}", type="anomalies", description="found by Sentinel")
            for path in files:
                artifact.add_file(str(path), name=str(path.relative_to(self._parts.run_dir)))
            self._run.log_artifact(artifact)
        self._run.finish()

    def _log(self, row: Mapping[str, float]) -> None:
        # Without `commit` W&B keeps the newest row to itself until the next one comes.
        self._run.log(row, step=self._num_rows, commit=True)
        self._num_rows += 1

    def _alert(self, mirrored: MirroredIncident) -> None:
        one = mirrored.incident
        lines = [f"steps {one.steps}, suspected: {one.suspected}", *one.reasons]
        lines += [f"to do: {one.to_do}"] if one.to_do else []
        self._run.alert(
            title=printable(f"{self._parts.run}: {one.title}")[:250], text="\n".join(map(printable, lines)),
            level=_LEVELS[one.severity], wait_duration=AT_ONCE,
        )  # fmt: skip


def _key(name: str) -> str:
    """Return a name as a key of the history; what begins with an underscore is W&B's own."""
    return f"logged{name}" if name.startswith("_") or name in (STEP, ATTEMPT) else name


def _release(run_id: str) -> None:
    """Have W&B's process let go of a run that could not begin: it keeps the id, and refuses it as one that is in use.

    It is only let go of behind an end: without one the process waits, and so do all other runs of it.
    """
    import wandb

    with contextlib.suppress(Exception):
        service = wandb.setup().assert_service()
        _, interface = service.inform_attach(attach_id=run_id)
        interface.deliver_exit(1).wait_or(timeout=RELEASE_S)
        service.inform_finish(run_id=run_id)
