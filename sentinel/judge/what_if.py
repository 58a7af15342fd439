"""What if: what a rule with other numbers would have said of a recorded run, beside what it says with those in force.

Both are judged from the same steps by the daemon's judge, with all rules of the pack beside it: causes are put in order and
incidents formed as they would have been. It is bounded by who asks: a run that is too long is answered as far as it came.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from sentinel.anomaly import Severity
from sentinel.decision import Tick
from sentinel.detect import known_detectors
from sentinel.errors import RuleError
from sentinel.judge.backtest import Alarm, RuleDifference, alarms_of, compare, new_alarms
from sentinel.judge.config import JudgingConfig
from sentinel.judge.references import read_references
from sentinel.judge.replay import is_incomplete, judged_by_each
from sentinel.rules.language.lint import lint_rule
from sentinel.rules.language.loader import PACKS, load_pack
from sentinel.rules.language.schema import Pack, Rule
from sentinel.store.journal import Journal
from sentinel.store.run_paths import RunPaths

FILE = "what-if.yaml"
"""What the pack with the change is called in errors."""
MOST_ALARMS = 20_000
"""Alarms of all rules, with the change or without, past which no further step is judged; a bound on memory: 20 MB."""
MOST_SHOWN = 500
"""Most alarms that are listed: what comes and goes before what stays."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a run."""

    run_dir: str
    state: str
    """Directory of its journal."""
    rule: str
    in_force: Pack
    """The rules that it is judged by."""
    packs: tuple[str, ...]
    """The files, directories or names that those were read from, as `load_pack` takes them."""
    change: str
    """A pack in YAML that is merged over them: the rule with its other numbers."""
    judging: JudgingConfig = JudgingConfig()


class MatchedAlarm(msgspec.Struct, frozen=True, kw_only=True):
    """An alarm of the rule, and whether it is said with the change, without it, or with both."""

    what: str
    """`comes` (with the change alone), `goes` (without it alone) or `stays`."""
    step: int
    attempt: int
    channel: str
    kind: str
    statistic: str
    rank: int | None
    severity: Severity
    value: float | None
    value_text: str
    baseline: float | None
    score: float | None
    message: str
    id: str
    incident: str
    """Id of its incident; of what comes, the one that it would be of."""
    is_recorded: bool
    """The daemon said it while the run trained: incident and anomaly are in the journal."""


class WhatIf(msgspec.Struct, kw_only=True):
    """The answer."""

    rule: str
    difference: RuleDifference
    """(with the change, as in force) of the rule."""
    others: RuleDifference
    """The same of all other rules: their alarms may be told otherwise where an incident or a limit is shared."""
    alarms: tuple[MatchedAlarm, ...] = ()
    num_alarms: int = 0
    """Of the rule, in all; at most `MOST_SHOWN` are listed."""
    first_step: int | None = None
    """None: no step was judged."""
    last_step: int | None = None
    num_steps: int = 0
    """Steps judged."""
    num_decided: int = 0
    """Steps that there are to judge."""
    num_before: int = 0
    """Decisions that the journal no longer has: what lies before them is not asked."""
    num_incomplete: int = 0
    """Steps whose rows are no longer all in the spool."""
    stopped: str = ""
    """Why not all steps were judged: `time`, `memory` or `alarms`; empty: all were."""
    num_recorded: int = 0
    """Alarms of the rule that the daemon said while the run trained, over the same steps."""
    num_recorded_again: int = 0
    """Those of them that the rules in force say too."""
    lint: tuple[str, ...] = ()
    """What is allowed in the change and probably not meant."""


def what_if(question: Question, *, is_over: Callable[[], bool]) -> WhatIf:
    """Return what the change would have made of the run so far.

    is_over: called at each step; true: no further one is judged. RuleError for a change that no pack may have, as the
    reader of packs says it, with the line in `FILE`; SentinelError where the run cannot be read.
    """
    changed = _changed(question)
    packs = (_with_rule(question.in_force, changed), question.in_force)
    sides: tuple[list[Alarm], list[Alarm]] = ([], [])
    answer = WhatIf(rule=changed.name, difference=RuleDifference(rule=changed.name), others=RuleDifference(rule="others"))
    answer.lint = tuple(one.message for one in lint_rule(changed, None, known_detectors()))
    paths = RunPaths(Path(question.run_dir), Path(question.state))
    journal = Journal(paths.journal, read_only=True)
    newest = (-1, -1)
    try:
        answer.num_before, answer.num_decided = journal.cut.seq, journal.num_steps - journal.cut.pruned("step")
        try:
            for one, judgements in judged_by_each(paths, journal, packs, judging=question.judging):
                if not isinstance(one, Tick):
                    answer.num_steps += 1
                    answer.num_incomplete += is_incomplete(one)
                    newest = max(newest, (one.attempt, one.step))
                    answer.first_step = one.step if answer.first_step is None else min(answer.first_step, one.step)
                    answer.last_step = one.step
                for said, judgement in zip(sides, judgements, strict=True):
                    said += alarms_of("", answer.num_steps, judgement)
                if max(map(len, sides)) > MOST_ALARMS:
                    answer.stopped = "alarms"
                elif is_over():
                    answer.stopped = "time"
                if answer.stopped:
                    break
        except MemoryError:
            answer.stopped = "memory"
        if answer.num_steps >= answer.num_decided:
            answer.stopped = ""
        recorded = _recorded(journal, changed.name, newest)
    finally:
        journal.close()
    with_change, in_force = (_of(side, changed.name) for side in sides)
    answer.difference, _ = compare(with_change, in_force, [changed.name])
    rest, rest_in_force = ([one for one in side if one.rule != changed.name] for side in sides)
    answer.others = msgspec.structs.replace(compare(rest, rest_in_force, [])[-1], rule="others")
    matched = _matched(with_change, in_force, recorded)
    answer.alarms, answer.num_alarms = tuple(matched[:MOST_SHOWN]), len(matched)
    answer.num_recorded, answer.num_recorded_again = len(recorded), sum(one.id in recorded for one in in_force)
    return answer


def _changed(question: Question) -> Rule:
    """Return the rule as it would be read with the change merged over the packs in use."""
    with tempfile.TemporaryDirectory(prefix="sentinel-what-if-") as folder:
        file = Path(folder) / FILE
        file.write_text(question.change, "utf-8")
        try:
            pack = load_pack([*question.packs, file], references=read_references)
            return pack.rule(question.rule)
        except RuleError as error:
            raise RuleError(str(error).replace(f"{folder}/", "")) from error
        except KeyError:
            raise RuleError(
                f'rule "{question.rule}": the files of the rules have no such rule that is on; they changed, and the '
                "former ones are in force: mend them first"
            ) from None


def _with_rule(pack: Pack, rule: Rule) -> Pack:
    return Pack(rules=tuple(rule if one.name == rule.name else one for one in pack.rules))


def is_builtin(rule: Rule) -> bool:
    """Whether a rule was read from a pack that comes with Sentinel, and so may be changed by any file of one's own."""
    return Path(rule.source.rpartition(":")[0]).parent == PACKS


def _of(alarms: Sequence[Alarm], rule: str) -> list[Alarm]:
    return [one for one in alarms if one.rule == rule]


class _Onset(msgspec.Struct):
    id: str
    rule: str
    event: str
    attempt: int
    step: int


def _recorded(journal: Journal, rule: str, newest: tuple[int, int]) -> set[str]:
    """Return the ids of a rule's alarms in the journal, up to (attempt, step)."""
    found = set()
    decode = msgspec.json.Decoder(_Onset).decode
    for _, body in journal.found.bodies("anomalies", behind=journal.cut.seq):
        one = decode(body)
        if one.rule == rule and one.event == "onset" and (one.attempt, one.step) <= newest:
            found.add(one.id)
    return found


def _matched(with_change: Sequence[Alarm], in_force: Sequence[Alarm], recorded: set[str]) -> list[MatchedAlarm]:
    """Return the alarms of both sides once: what comes and goes first, then what stays, each in the order of steps."""
    comes, goes = new_alarms(with_change, in_force), new_alarms(in_force, with_change)
    new = {id(one) for one in comes}
    told = [(one, "comes") for one in comes] + [(one, "goes") for one in goes]
    told.sort(key=lambda one: (one[0].attempt, one[0].step))
    told += [(one, "stays") for one in with_change if id(one) not in new]
    return [
        MatchedAlarm(
            what=what, step=one.step, attempt=one.attempt, channel=one.channel, kind=one.kind, statistic=one.statistic,
            rank=one.rank, severity=one.severity, value=one.value, value_text=one.value_text, baseline=one.baseline,
            score=one.score, message=one.message, id=one.id, incident=one.incident, is_recorded=one.id in recorded,
        )
        for one, what in told
    ]  # fmt: skip
