"""Judge a recorded run again: from its journal and spool the same judgements, byte for byte; or decide anew."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from sentinel.decision import Tick
from sentinel.errors import StoreError
from sentinel.ingest.follow import RunFollower
from sentinel.judge.config import JudgingConfig
from sentinel.judge.judge import Judge, Judgement
from sentinel.judge.packs import decode_pack
from sentinel.judge.recorded import recorded
from sentinel.judge.snapshot import snapshot_at_cut
from sentinel.report.files import AppendLog, anomaly_line, json_line
from sentinel.rules.language.schema import Pack
from sentinel.step_view import StepView
from sentinel.store.journal import Journal
from sentinel.store.run_paths import RunPaths


class Replayed(msgspec.Struct, kw_only=True):
    """What a replay did."""

    num_steps: int = 0
    num_anomalies: int = 0
    num_revisions: int = 0
    """Revisions of incidents."""
    num_incomplete: int = 0
    """Steps whose frames are no longer all in the spool: their judgements may differ."""
    num_before: int = 0
    """Decisions before the first that was judged again: the journal no longer has them."""
    first_difference: str | None = None
    """The first line that is not what the daemon wrote; None: identical, as far as the journal goes."""


def replay(
    paths: RunPaths,
    out: Path,
    *,
    pack: Pack | None = None,
    recompute: bool = False,
    judging: JudgingConfig | None = None,
) -> Replayed:
    """Judge the run at `paths` again and write `anomalies/` and `incidents.jsonl` under `out`.

    pack: judge by these rules; None: by those that the journal names for each step.
    recompute: decide anew which rows make a step, as if all ranks had been read at leisure; nobody is late or stale then.
    StoreError when there is no journal and `recompute` is off, or `out` holds a replay already.
    """
    if (out / "anomalies").exists() or (out / "incidents.jsonl").exists():
        raise StoreError(f"{out}: expected a new directory, got one with anomalies in it; give another with -o")
    journal = Journal(paths.journal, read_only=True) if paths.journal.exists() or not recompute else None
    result = Replayed(num_before=0 if journal is None or recompute else journal.cut.seq)
    anomalies, incidents = AppendLog(out / "anomalies"), AppendLog(out / "incidents.jsonl")
    try:
        for one, judgement in judged_again(paths, journal, pack=pack, recompute=recompute, judging=judging):
            anomalies.append(anomaly_line(anomaly) for anomaly in judgement.anomalies)
            incidents.append(json_line(incident) for incident in judgement.incidents)
            result.num_anomalies += len(judgement.anomalies)
            result.num_revisions += len(judgement.incidents)
            if not isinstance(one, Tick):
                result.num_steps += 1
                result.num_incomplete += is_incomplete(one)
        for lines, table in ((anomalies, "anomalies"), (incidents, "incidents")):
            lines.close()
            check_written([lines])
            if journal is not None and result.first_difference is None:
                result.first_difference = _difference(journal, table, lines)
    finally:
        anomalies.close()
        incidents.close()
        if journal is not None:
            journal.close()
    return result


def judged_again(
    paths: RunPaths,
    journal: Journal | None,
    *,
    pack: Pack | None = None,
    recompute: bool = False,
    judging: JudgingConfig | None = None,
    follower: RunFollower | None = None,
    failures: list[str] | None = None,
) -> Iterator[tuple[StepView | Tick, Judgement]]:
    """Yield each step and each moment of a recorded run that was decided, with the judgement on it.

    pack, recompute, judging: as of `replay`; follower: as of `recorded`. Without a journal all steps count as decided.
    failures: holds, after each step, which rules are off because the code of others failed.
    """
    most = (judging or JudgingConfig()).max_anomalies_per_step
    judge, judged_by = (None, "") if journal is None or recompute else _judge_at_cut(journal, most)
    until = journal.last_seq if journal is not None else 0
    for one in recorded(paths, journal, recompute=recompute, follower=follower):
        decision = one if isinstance(one, Tick) else one.decision
        assert decision is not None
        if journal is not None and not recompute and decision.seq > until:
            return
        wanted = decision.pack_hash if pack is None else "given"
        if judge is None or wanted != judged_by:
            rules = pack if pack is not None else _pack(journal, wanted)
            if judge is None:
                judge = Judge(rules, max_anomalies=most)
            else:
                judge.reload(rules)
            judged_by = wanted
        judgement = judge.judge_tick(one) if isinstance(one, Tick) else judge.judge(one.decision, one)
        if failures is not None:
            failures[:] = judge.failures
        yield one, judgement


def judged_by_each(
    paths: RunPaths, journal: Journal, packs: Sequence[Pack], *, judging: JudgingConfig | None = None
) -> Iterator[tuple[StepView | Tick, tuple[Judgement, ...]]]:
    """Yield each step and each moment that was decided, with the judgement of each pack on it, in the order of the packs.

    What is read and merged once is judged by all: each pack says what `judged_again` has it say alone.
    """
    most = (judging or JudgingConfig()).max_anomalies_per_step
    judges = []
    for pack in packs:
        judge, _ = _judge_at_cut(journal, most)
        if judge is None:
            judge = Judge(pack, max_anomalies=most)
        else:
            judge.reload(pack)
        judges.append(judge)
    until = journal.last_seq
    for one in recorded(paths, journal):
        decision = one if isinstance(one, Tick) else one.decision
        assert decision is not None
        if decision.seq > until:
            return
        if isinstance(one, Tick):
            yield one, tuple(judge.judge_tick(one) for judge in judges)
        else:
            yield one, tuple(judge.judge(one.decision, one) for judge in judges)


def _judge_at_cut(journal: Journal, most: int) -> tuple[Judge | None, str]:
    """Return the judge in the state where a journal was cut, and the hash of its rules; None: it was not."""
    begin = snapshot_at_cut(journal)
    if begin is None:
        return None, ""
    judge = Judge(_pack(journal, begin.pack_hash), max_anomalies=most)
    judge.restore(begin.judge)
    return judge, begin.pack_hash


def check_written(logs: Iterable[AppendLog]) -> None:
    """Raise StoreError where lines could not be written: a daemon waits for its disk, a command says so and ends."""
    for log in logs:
        if log.problem:
            raise StoreError(f"{log.problem}; give a directory that can be written with -o")


def is_incomplete(view: StepView) -> bool:
    """Whether rows of a step that were there when it was decided are not in the spool any more."""
    ranks = view.decision.ranks if view.decision is not None else ()
    num_rows = {part.rank: len(part.rows) for part in view.parts}
    return any(num_rows.get(one.rank, -1) < one.num_rows for one in ranks)


def _pack(journal: Journal | None, pack_hash: str) -> Pack:
    body = journal.pack(pack_hash) if journal is not None else None
    if body is None:
        raise StoreError(f"the rules {pack_hash or '(none)'} are not in the journal; give --rules PATH")
    return decode_pack(body)


def _difference(journal: Journal, table: str, lines: AppendLog) -> str | None:
    """Return in words where the replay's file first differs from what the daemon wrote."""
    number = 0
    replayed = _lines(lines)
    for number, (_, body) in enumerate(journal.found.bodies(table, behind=journal.cut.seq), 1):
        other = next(replayed, None)
        if other != body:
            return f"{table}, line {number}: expected {body[:200]!r}, got {other[:200] if other else other!r}"
    extra = next(replayed, None)
    # What was decided and not yet committed when the daemon died is judged here and not there.
    if extra is not None and journal.judged == journal.last_seq:
        return f"{table}, line {number + 1}: expected nothing, got {extra[:200]!r}"
    return None


def _lines(lines: AppendLog) -> Iterator[bytes]:
    files = [lines.path] if lines.is_single else sorted(lines.path.glob("*.jsonl"))
    for file in files:
        if file.exists():
            with file.open("rb") as stream:
                for line in stream:
                    yield line.rstrip(b"\n")
