"""MirrorWorker: writes one run to one mirror, in a thread of its own: bounded, counted, tried again, never waited for.

Steps wait in memory, and the oldest go where the mirror is slower for long; anomalies and incidents are read from the
journal, where they wait on disk. What was written is remembered behind each batch (`MirrorPosition`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import msgspec

from sentinel.anomaly import Anomaly
from sentinel.errors import SentinelError
from sentinel.exception_words import described
from sentinel.exports.series import MergedStep
from sentinel.incident import CLOSED_STATES, Incident
from sentinel.mirrors.chosen_values import ChosenValues
from sentinel.mirrors.mirror import Mirror, MirrorBatch, MirroredIncident, MirrorParts, MirrorSettings
from sentinel.mirrors.mirror_position import MirrorPosition, begun_position, write_position
from sentinel.report.metrics import MirrorCounts
from sentinel.store.journal import Journal

log = logging.getLogger("sentinel.mirrors")

MOST_WAITING = 4096
"""Steps that wait for a mirror; past it the oldest go, counted. Too small: a pause of a network loses steps; too large: they
hold memory."""
WAITING_BYTES = 32 * 2**20
"""Bytes of steps that wait for a mirror that shows tensors; a bound on memory, as `MOST_WAITING`."""
STEPS_AT_ONCE = 256
FOUND_AT_ONCE = 1000
"""Anomalies, and incidents, of one batch; a bound on memory and on the size of a request."""
RETRY_S, MOST_RETRY_S = 1.0, 60.0
"""Wait before the second try, doubled at each further failure, and the longest one."""
CLOSE_S = 5.0
"""Seconds that the end of the daemon waits for a mirror (chosen). Smaller: a usual network does not take what waits;
larger: one that hangs holds up the end."""
STUCK_S = 60.0
"""Seconds of one write after which it is said that the mirror does not answer."""
_WITHOUT_TENSORS = slice(0, 0)
_ANOMALY = msgspec.json.Decoder(Anomaly)
_INCIDENT = msgspec.json.Decoder(Incident)


class MirrorWorker:
    """Of one run. `take`, `pass_by`, `end`, `hurry` and `close` are called by one thread, what else there is by any."""

    def __init__(
        self,
        config: MirrorSettings,
        parts: MirrorParts,
        journal: Journal,
        position: Path,
        *,
        after: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """parts: its mark and key are read from `position`. journal: of the run; read by a connection of the worker's own.
        after: the last decision that will not be given again.
        """
        self.name = config.name
        self._config, self._parts, self._clock = config, parts, clock
        self._journal_path, self._position_path = journal.path, position
        self._chosen = ChosenValues(config.select)
        self._has_tensors = bool(config.select.tensors)
        self._position = begun_position(position, journal, after)
        self._taken = max(self._position.decision, after)
        self._after = after
        self._journal: Journal | None = None
        self._mirror: Mirror | None = None
        self._waiting: deque[tuple[MergedStep, float]] = deque()
        self._num_bytes = 0
        self._at_hand: list[tuple[MergedStep, float]] = []
        """Steps that are being written, until they are."""
        self._states: dict[str, str] = {}
        """Incident -> `opened`, as the mirror was told last, of those that this process told of and that are not over."""
        self._owes_end = False
        """Something was written behind which the end of the run was not."""
        self._num_steps = self._num_dropped = self._num_failures = 0
        self._problem = ""
        self._writing_since: float | None = None
        self._is_asked = self._is_over = self._is_closing = False
        self._close_by = 0.0
        self._moved = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"mirror {config.name} {parts.run}", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str:
        """Why the newest steps are not mirrored, in words; empty: they are, or will be."""
        since = self._writing_since
        if since is not None and (waited := self._clock() - since) > STUCK_S:
            return f"mirror {self.name} has not answered for {waited:.0f} s"
        return f"mirror {self.name}: {self._problem}" if self._problem else ""

    @property
    def counts(self) -> MirrorCounts:
        """What became of what it was given."""
        return MirrorCounts(
            num_steps=self._num_steps, num_dropped=self._num_dropped, num_failures=self._num_failures,
            num_waiting=len(self._waiting) + len(self._at_hand), num_series_left_out=self._chosen.num_left_out,
        )  # fmt: skip

    def take(self, step: MergedStep, step_time_s: float) -> None:
        """Have a judged step mirrored, once. Returns at once, whatever the mirror does. step_time_s: 0: not known."""
        with self._moved:
            if step.seq <= self._taken:
                return
            self._taken, self._is_over = step.seq, False
            if step.step % self._config.select.step_interval:
                return
            if not self._has_tensors:
                step = replace(step, index=step.index[_WITHOUT_TENSORS], stats=step.stats[_WITHOUT_TENSORS].copy())
            self._waiting.append((step, step_time_s))
            self._num_bytes += step.num_bytes
            while len(self._waiting) > 1 and (len(self._waiting) > MOST_WAITING or self._num_bytes > WAITING_BYTES):
                self._num_bytes -= self._waiting.popleft()[0].num_bytes
                self._num_dropped += 1
            if len(self._waiting) >= STEPS_AT_ONCE:
                self._moved.notify_all()

    def pass_by(self, seq: int) -> None:
        """Take note of a decision that closed no step."""
        with self._moved:
            self._taken = max(self._taken, seq)

    def end(self) -> None:
        """Have what waits written soon, and what sums the run up: it is over, as far as anybody knows."""
        with self._moved:
            if not self._is_over:
                self._is_asked = self._is_over = True
                self._moved.notify_all()

    def hurry(self) -> None:
        """Begin to end: write what waits, in `CLOSE_S` from now at most."""
        with self._moved:
            if not self._is_closing:
                self._is_closing, self._close_by = True, self._clock() + CLOSE_S
                self._moved.notify_all()

    def close(self) -> None:
        """Write what waits, and end; what is left behind the time that `hurry` gives is logged."""
        self.hurry()
        self._thread.join(max(self._close_by - self._clock(), 0.0))
        if num_waiting := self.counts.num_waiting:
            log.warning("mirror %s of run %s: %d steps were not written by the end", self.name, self._parts.run, num_waiting)

    # The thread.

    def _run(self) -> None:
        pause_s = retry_s = 0.0
        while True:
            is_last, is_over = self._wait(pause_s)
            try:
                has_more = self._turn()
                if not has_more and (is_last or is_over):
                    self._let_go(is_over=is_over)
                if self._problem:
                    log.info("mirror %s of run %s is written again", self.name, self._parts.run)
                self._problem, retry_s = "", 0.0
                pause_s = 0.0 if has_more else self._config.select.flush_s
            except (Exception, SystemExit) as error:  # whatever the library of a mirror raises
                self._fail(error)
                has_more = False
                pause_s = retry_s = min(max(2.0 * retry_s, RETRY_S), MOST_RETRY_S)
            if is_last and not has_more:
                break
        if self._journal is not None:
            self._journal.close()

    def _wait(self, pause_s: float) -> tuple[bool, bool]:
        """Wait until there is something to do, so long at most; return whether it is the last time, and the run is over."""
        until = self._clock() + pause_s
        with self._moved:
            while not self._is_closing and (left := until - self._clock()) > 0:
                if not self._problem and (self._is_asked or len(self._waiting) >= STEPS_AT_ONCE):
                    break
                self._moved.wait(left)
            self._is_asked = False
            return self._is_closing, self._is_over

    def _fail(self, error: BaseException) -> None:
        self._num_failures += 1
        is_ours = isinstance(error, SentinelError)
        why = str(error) if is_ours else described(error)
        if why != self._problem:
            log.warning("mirror %s of run %s: %s; tried again", self.name, self._parts.run, why)
        self._problem = why
        mirror, self._mirror = self._mirror, None
        if mirror is not None:
            with contextlib.suppress(Exception, SystemExit), self._measured():
                mirror.close(is_over=False)

    def _turn(self) -> bool:
        """Write one batch; return whether more waits."""
        if self._journal is None:
            self._open()
        with self._moved:
            while self._waiting and len(self._at_hand) < STEPS_AT_ONCE:
                self._at_hand.append(self._waiting.popleft())
                self._num_bytes -= self._at_hand[-1][0].num_bytes
            newest = self._at_hand[-1][0].seq if self._waiting else self._taken
        states = dict(self._states)
        batch, position, is_all_found = self._batch(newest, states)
        if batch:
            with self._measured():
                position = msgspec.structs.replace(position, mark=self._built().write(batch))
            self._states = {incident: state for incident, state in states.items() if state != "closed"}
            self._owes_end = True
        if position != self._position:
            write_position(self._position_path, position)
            self._position = position
        with self._moved:
            self._num_steps += len(self._at_hand)
            self._at_hand = []
            return bool(self._waiting) or not is_all_found

    def _built(self) -> Mirror:
        if self._mirror is None:
            parts = replace(self._parts, mark=self._position.mark, key=self._position.journal)
            self._mirror = self._config.build(parts)
        return self._mirror

    @contextlib.contextmanager
    def _measured(self) -> Iterator[None]:
        self._writing_since = self._clock()
        try:
            yield
        finally:
            self._writing_since = None

    def _open(self) -> None:
        journal = Journal(self._journal_path, read_only=True)
        lacking = journal.decisions(self._position.decision, self._after)
        self._num_dropped += sum(kind == "step" for _, kind, _ in lacking)
        self._journal = journal

    def _batch(self, newest: int, states: dict[str, str]) -> tuple[MirrorBatch, MirrorPosition, bool]:
        """Return what is to be written, the position behind it, and whether it has all that was found so far.

        newest: the last decision whose step is at hand, or that closed none. states: of `_states`, changed to what they are
        behind the batch.
        """
        assert self._journal is not None
        found, was, least = self._journal.found, self._position, self._config.select.severity.level
        anomalies = list(islice(found.bodies("anomalies", was.anomalies), FOUND_AT_ONCE))
        incidents = list(islice(found.bodies("incidents", was.incidents), FOUND_AT_ONCE))
        onsets = [one for one in map(_ANOMALY.decode, (body for _, body in anomalies)) if one.event == "onset"]
        revisions = [self._told(_INCIDENT.decode(body), states) for _, body in incidents]
        batch = MirrorBatch(
            steps=[self._chosen.of(step, step_time_s) for step, step_time_s in self._at_hand],
            anomalies=[one for one in onsets if one.severity.level >= least],
            incidents=[one for one in revisions if one is not None],
        )
        position = msgspec.structs.replace(
            was,
            decision=max(was.decision, newest),
            anomalies=anomalies[-1][0] if anomalies else was.anomalies,
            incidents=incidents[-1][0] if incidents else was.incidents,
        )
        return batch, position, max(len(anomalies), len(incidents)) < FOUND_AT_ONCE

    def _told(self, incident: Incident, states: dict[str, str]) -> MirroredIncident | None:
        """Return a revision with what is new in it; None: it is not grave enough to be mirrored."""
        if incident.severity.level < self._config.select.severity.level:
            return None
        was = states.get(incident.id) or self._state_before(incident)
        is_over = incident.state in CLOSED_STATES
        states[incident.id] = "closed" if is_over else "opened"
        change = "closed" if is_over and was != "closed" else "changed" if was else "opened"
        return MirroredIncident(change=change, incident=incident)

    def _state_before(self, incident: Incident) -> str:
        """Return what a mirror was told of an incident by another process; empty: nothing."""
        assert self._journal is not None
        least = self._config.select.severity.level
        former = [
            one
            for one in map(_INCIDENT.decode, self._journal.found.incident_bodies(incident.id))
            if one.revision < incident.revision and one.severity.level >= least
        ]
        return "" if not former else "closed" if former[-1].state in CLOSED_STATES else "opened"

    def _let_go(self, *, is_over: bool) -> None:
        if self._mirror is None and not (is_over and self._owes_end):
            return
        with self._measured():
            self._built().close(is_over=is_over)
        self._mirror, self._owes_end = None, self._owes_end and not is_over
