"""What a pack would have said: plain logs and recorded runs, through the judge of the daemon, step by step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from sentinel.anomaly import Anomaly, Severity
from sentinel.decision import Tick
from sentinel.errors import StoreError
from sentinel.incident import Incident
from sentinel.ingest.follow import RunFollower
from sentinel.judge.config import JudgingConfig
from sentinel.judge.judge import Judge, Judgement
from sentinel.judge.references import Scalars, references_at, with_reference
from sentinel.judge.replay import check_written, is_incomplete, judged_again
from sentinel.logs.log_file import read_log
from sentinel.logs.views import log_views
from sentinel.reference import combine
from sentinel.report.files import AppendLog, anomaly_line, json_line
from sentinel.rules.language.schema import Pack
from sentinel.store.journal import Journal
from sentinel.store.run_paths import RunPaths

PROGRESS_STEPS = 64
"""Steps between two lines of progress."""


class BacktestSubject(msgspec.Struct, frozen=True, kw_only=True):
    """What is judged: a plain log, or a recorded run."""

    name: str
    """What alarms call it: the last part of its path where that tells it apart from the others, else the path as given."""
    path: str
    is_run: bool = False
    state_dir: str = ""
    """Of a run: where its journal is, if the run does not say so itself."""
    run: str = ""
    """The run that its anomalies are of: of a log, its name."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How subjects are judged; the same for all of them."""

    pack: Pack
    judging: JudgingConfig = JudgingConfig()
    columns: dict[str, str] = {}
    """Channel -> what the logs call it."""
    header: tuple[str, ...] = ()
    recompute: bool = False
    """Decide anew which rows make a step of a recorded run."""
    reference: tuple[str, ...] = ()
    """Logs and runs on the same data, each by itself; a subject is never its own reference run."""
    output: str = ""
    """Directory for each subject's `anomalies/` and `incidents.jsonl`; empty: nowhere."""


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """An anomaly's onset, as a back-test prints it: one object of `--json`."""

    file: str
    channel: str
    """The scalar, or the tensor."""
    i: int
    """0-based row of the log; of a recorded run the 0-based number of the step in it."""
    step: int
    rule: str
    severity: Severity
    suspected: str = msgspec.field(name="verdict")
    """Its incident's, as known at that row."""
    incident: str
    """Id of the incident."""
    detector: str
    kind: str
    statistic: str
    attempt: int
    rank: int | None
    micro_step: int | None
    value: float | None
    value_text: str
    baseline: float | None
    score: float | None
    message: str
    id: str
    evidence: tuple[str, ...] = ()
    """Why the diagnosis is what it is, as known at that row."""


class BacktestOutcome(msgspec.Struct, kw_only=True):
    """What judging one subject brought."""

    name: str
    path: str
    form: str = ""
    """`run`, or the kind of log."""
    num_rows: int = 0
    """Rows of a log, steps of a run: all of them were judged."""
    channels: dict[str, str] = {}
    """Channel -> what the log calls it."""
    alarms: list[Alarm] = []
    """All onsets, `info` among them, in order."""
    incidents: dict[str, Incident] = {}
    """Id -> its last revision; without its members."""
    notes: list[str] = []
    failures: list[str] = []
    """Rules that are off, because the code of others failed: they said nothing from there on."""

    def last_suspected(self, alarm: Alarm) -> str:
        """Return the diagnosis of an alarm's incident when all rows had been judged; of a merged one its heir's."""
        incident = self.incidents.get(alarm.incident)
        for _ in range(len(self.incidents)):
            if incident is None or incident.merged_into is None:
                break
            incident = self.incidents.get(incident.merged_into, incident)
        return incident.suspected if incident is not None else alarm.suspected


def judge_subject(
    subject: BacktestSubject, settings: Settings, progress: Callable[[float], None] | None = None
) -> BacktestOutcome:
    """Judge one log or run from its beginning, with nothing known of any other.

    progress: called now and then with the share that is done. SentinelError when it cannot be read.
    """
    outcome = BacktestOutcome(name=subject.name, path=subject.path)
    progress = progress or (lambda share: None)
    read = _of_run if subject.is_run else _of_log
    steps = read(subject, settings, outcome, progress)
    writers: list[AppendLog] = []
    if settings.output:
        out = Path(settings.output) / subject.name.replace("/", "_")
        if (out / "anomalies").exists() or (out / "incidents.jsonl").exists():
            raise StoreError(f"{out}: expected a new directory, got one with anomalies in it; give another with -o")
        writers = [AppendLog(out / "anomalies"), AppendLog(out / "incidents.jsonl")]
    try:
        for row, judgement in steps:
            if not judgement.anomalies and not judgement.incidents:
                continue
            for incident in judgement.incidents:
                outcome.incidents[incident.id] = msgspec.structs.replace(incident, members=())
            outcome.alarms += alarms_of(subject.name, row, judgement)
            if writers:
                writers[0].append(anomaly_line(anomaly) for anomaly in judgement.anomalies)
                writers[1].append(json_line(incident) for incident in judgement.incidents)
    finally:
        for writer in writers:
            writer.close()
    check_written(writers)
    return outcome


def _of_log(
    subject: BacktestSubject, settings: Settings, outcome: BacktestOutcome, progress: Callable[[float], None]
) -> Iterator[tuple[int, Judgement]]:
    log = read_log(subject.path, columns=settings.columns, header=settings.header)
    outcome.form, outcome.num_rows, outcome.channels = log.form, log.num_rows, dict(log.sources)
    outcome.notes.extend(log.notes)
    if (blind := _blindness(log.columns, settings.pack)) is not None:
        outcome.notes.append(blind)
    judge = Judge(_beside_references(subject, settings, outcome), max_anomalies=settings.judging.max_anomalies_per_step)
    for row, view in enumerate(log_views(log, subject.run or subject.name)):
        yield row, judge.judge(None, view)
        if row % PROGRESS_STEPS == 0:
            progress(row / log.num_rows)
    outcome.failures = judge.failures


def _blindness(names: Collection[str], pack: Pack) -> str | None:
    """Return words where no rule about logged values takes any of `names`; None where one does."""
    watching = [rule for rule in pack.rules if rule.match.kind == ("scalar",)]
    if any(rule.match.takes_name(name) for rule in watching for name in names):
        return None
    listed = ", ".join(list(names)[:8]) + (", ..." if len(names) > 8 else "")
    return f"no rule watches its columns ({listed}) but for NaN and infinity; say --column loss=NAME"


def _of_run(
    subject: BacktestSubject, settings: Settings, outcome: BacktestOutcome, progress: Callable[[float], None]
) -> Iterator[tuple[int, Judgement]]:
    outcome.form = "run"
    paths = RunPaths.of(Path(subject.path), Path(subject.state_dir) if subject.state_dir else None)
    journal = Journal(paths.journal, read_only=True) if paths.journal.exists() else None
    follower = RunFollower(paths.run_dir)
    num_incomplete = num_empty = 0
    num_bytes = max(1, sum(path.stat().st_size for path in (paths.run_dir / "spool").glob("r*/*.spool")))
    try:
        if journal is None:
            outcome.notes.append("no daemon judged this run: which ranks were late or stale is not known")
        pack = _beside_references(subject, settings, outcome)
        judged = judged_again(
            paths,
            journal,
            pack=pack,
            recompute=settings.recompute,
            judging=settings.judging,
            follower=follower,
            failures=outcome.failures,
        )
        for one, judgement in judged:
            if not isinstance(one, Tick):
                outcome.num_rows += 1
                num_incomplete += is_incomplete(one)
                num_empty += not one.parts
                if outcome.num_rows % PROGRESS_STEPS == 0:
                    progress(min(1.0, follower.num_bytes / num_bytes))
            yield max(outcome.num_rows - 1, 0), judgement
        if outcome.num_rows and num_empty == outcome.num_rows:
            raise StoreError(f"{paths.run_dir}: expected the rows of {num_empty} steps, found none; is the spool gone?")
        if num_incomplete:
            outcome.notes.append(f"{num_incomplete} steps are no longer whole in the spool: what is gone was not judged")
        if not outcome.num_rows:
            outcome.notes.append("no step of this run is whole: nothing was judged")
    finally:
        if journal is not None:
            journal.close()


def read_reference_run(path: str) -> tuple[Scalars, ...]:
    """Return what a log or run logged, read once: processes that are forked later have it too."""
    if path not in _references:
        _references[path] = tuple(references_at([path]))
    return _references[path]


_references: dict[str, tuple[Scalars, ...]] = {}


def _beside_references(subject: BacktestSubject, settings: Settings, outcome: BacktestOutcome) -> Pack:
    own = Path(subject.path).resolve()
    others = [path for path in settings.reference if Path(path).resolve() != own]
    if not settings.reference:
        return settings.pack
    if not others:
        outcome.notes.append("no reference run but itself: judged by its own past alone")
        return settings.pack
    return with_reference(settings.pack, combine((run for path in others for run in read_reference_run(path)), others))


def alarms_of(file: str, row: int, judgement: Judgement) -> list[Alarm]:
    """Return the onsets of one step or moment, `info` among them. file, row: as of `Alarm`."""
    owner = {member: incident for incident in judgement.incidents for member in incident.members}
    onsets = (anomaly for anomaly in judgement.anomalies if anomaly.event == "onset")
    return [_alarm(file, row, anomaly, owner.get(anomaly.id)) for anomaly in onsets]


def _alarm(file: str, row: int, anomaly: Anomaly, incident: Incident | None) -> Alarm:
    return Alarm(
        file=file,
        channel=anomaly.tag_name,
        i=row,
        step=anomaly.step,
        rule=anomaly.rule,
        severity=anomaly.severity,
        suspected=incident.suspected if incident is not None else "unknown",
        incident=incident.id if incident is not None else "",
        detector=anomaly.detector,
        kind=anomaly.kind,
        statistic=anomaly.statistic,
        attempt=anomaly.attempt,
        rank=anomaly.rank,
        micro_step=anomaly.micro_step,
        value=anomaly.value,
        value_text=anomaly.value_text,
        baseline=anomaly.baseline,
        score=anomaly.score,
        message=anomaly.message,
        id=anomaly.id,
        evidence=incident.evidence if incident is not None else (),
    )


# -- two packs ---------------------------------------------------------------------------------------------------------


class RuleDifference(msgspec.Struct, kw_only=True):
    """One rule, or all of them, under two packs: (of the pack at hand, of the one it is held against)."""

    rule: str
    onsets: tuple[int, int] = (0, 0)
    pages: tuple[int, int] = (0, 0)
    """Onsets that are critical: each of them pages, or joins an incident that does."""
    incidents: tuple[int, int] = (0, 0)
    first: tuple[int | None, int | None] = (None, None)
    """Row of the first onset, of a single subject; of several the median over those where both packs have one."""
    num_new: int = 0
    """Onsets that only the pack at hand has."""
    num_lost: int = 0


def compare(new: Sequence[Alarm], old: Sequence[Alarm], rules: Sequence[str]) -> list[RuleDifference]:
    """Return a line a rule, those without any onset too, and one of all rules behind them. Of one subject, or of several."""
    found = [_difference(rule, [a for a in new if a.rule == rule], [a for a in old if a.rule == rule]) for rule in rules]
    return [*found, _difference("all", new, old)]


def _difference(rule: str, new: Sequence[Alarm], old: Sequence[Alarm]) -> RuleDifference:
    keys = [{_key(alarm) for alarm in alarms} for alarms in (new, old)]
    pages = [sum(alarm.severity is Severity.CRITICAL for alarm in alarms) for alarms in (new, old)]
    incidents = [len({(alarm.file, alarm.incident) for alarm in alarms}) for alarms in (new, old)]
    first_of: list[dict[str, int]] = [{}, {}]
    for alarms, first in zip((new, old), first_of, strict=True):
        for alarm in alarms:
            first[alarm.file] = min(alarm.i, first.get(alarm.file, alarm.i))
    both = sorted(first_of[0].keys() & first_of[1].keys())
    firsts = [_middle([first[file] for file in both] or list(first.values())) for first in first_of]
    return RuleDifference(
        rule=rule,
        onsets=(len(new), len(old)),
        pages=(pages[0], pages[1]),
        incidents=(incidents[0], incidents[1]),
        first=(firsts[0], firsts[1]),
        num_new=len(keys[0] - keys[1]),
        num_lost=len(keys[1] - keys[0]),
    )


def new_alarms(alarms: Sequence[Alarm], others: Sequence[Alarm]) -> list[Alarm]:
    """Return the alarms that the others do not have: same file, rule, place and step."""
    known = {_key(alarm) for alarm in others}
    return [alarm for alarm in alarms if _key(alarm) not in known]


def _key(alarm: Alarm) -> tuple[object, ...]:
    place = (alarm.kind, alarm.channel, alarm.statistic, alarm.rank, alarm.micro_step)
    return alarm.file, alarm.rule, alarm.attempt, alarm.step, *place


def _middle(values: Sequence[int]) -> int | None:
    return sorted(values)[len(values) // 2] if values else None


def by_rule(alarms: Sequence[Alarm]) -> Mapping[str, int]:
    """Return rule -> onsets, most first."""
    counts: dict[str, int] = {}
    for alarm in alarms:
        counts[alarm.rule] = counts.get(alarm.rule, 0) + 1
    return dict(sorted(counts.items(), key=lambda one: (-one[1], one[0])))
