"""Anomalies in words: what a person reads first, in a page or a log line."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sentinel.anomaly import Anomaly
from sentinel.anomaly_words import told_apart
from sentinel.detect import Declaration
from sentinel.run_end import ALL_TOGETHER, CRASHES, EXCEPTION, OUT_OF_MEMORY, SILENCE, RankEnd, RunEnd, end_words

if TYPE_CHECKING:
    from sentinel.decision import RankFacts
    from sentinel.step_view import Differing

_MUCH = 1000.0
_KILLED_WORKER = re.compile(r"DataLoader worker \(pid\D*\d+[^)]*\) (is killed by signal: (Killed|Bus)|exited unexpectedly)")
"""What torch raises in a rank whose loader lost a process."""


def number(value: float | None) -> str:
    """Return a number with the digits a person needs: `3.42`, `1.2e-07`, `nan`."""
    if value is None:
        return "unknown"
    return str(value) if not math.isfinite(value) else f"{value:.4g}"


def count(n: int, noun: str) -> str:
    """Return `1 value`, `2 values`."""
    many = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{n} {noun}" if n == 1 else f"{n} {many}"


def subject(kind: str, name: str, statistic: str) -> str:
    """Return what the value is: `loss`, or `norm of wgrad layers.3.mlp.weight`."""
    if kind == "scalar":
        return name
    label = {"kurtosis": "kurtosis", "absmax": "largest absolute value", "zeros": "share of zeros"}.get(statistic, statistic)
    return f"{label} of {kind} {name}"


def excursion(
    kind: str,
    name: str,
    statistic: str,
    value: float,
    baseline: float,
    score: float,
    direction: int,
    why: str,
    declared: Declaration | None = None,
) -> str:
    """Return the message of a finite onset: value, baseline and score in words, how long, and what it usually means.

    declared: what the detector says of itself: what its anomalies mean, and whether its baseline is a limit.
    """
    said, usual = told_apart(value, baseline)
    text = f"{subject(kind, name, statistic)} is {said}"
    if math.isfinite(baseline):
        ratio = value / baseline if baseline and value / baseline > 0 else math.nan
        if declared is not None and declared.is_limit:
            text += f", past the limit {usual}"
        elif value == baseline and not direction:
            text += ", exactly what it was before"
        elif number(ratio) == "1":
            text += ", exactly its baseline" if value == baseline else f", its baseline {usual}"
        elif math.isfinite(ratio) and ratio >= 1.0 and direction >= 0:
            how = f"{number(ratio)} times" if ratio < _MUCH else f"{ratio:.1e} times"
            text += f", {how} its baseline {usual}"
        elif math.isfinite(ratio) and 0 < ratio < 1.0 and direction <= 0:
            text += f", 1/{number(1.0 / ratio)} of its baseline {usual}"
        else:
            text += f", its baseline {usual}"
    text += f" (score {number(score)}, 1 is anomalous)"
    meaning = declared.meaning(direction) if declared is not None else ""
    return "; ".join(part for part in (text, why, meaning) if part)


GAIN = "gain"
"""Statistic of an anomaly: a module's output over its input."""


def skewed(
    kind: str, name: str, statistic: str, rank: int, value: float, middle: float, peers: Sequence[int], is_sure: bool
) -> str:
    """Return the message of a rank that is away from its peers: by how much, from whom, and what it usually means."""
    what = f"gain of {name} (its output's rms over its input's)" if statistic == GAIN else subject(kind, name, statistic)
    said, usual = told_apart(value, middle)
    text = f"{what} of rank {rank} is {said}"
    ratio = value / middle if middle and math.isfinite(middle) else math.nan
    if number(ratio) == "1":
        text += f", that of {ranks(peers)} {usual}"
    elif ratio >= 1.0:
        text += f", {number(ratio) if ratio < _MUCH else f'{ratio:.1e}'} times the {usual} of {ranks(peers)}"
    elif 0 < ratio < 1.0:
        text += f", 1/{number(1.0 / ratio)} of the {usual} of {ranks(peers)}"
    else:
        text += f", that of {ranks(peers)} {usual}"
    if not is_sure:
        return f"{text}; nothing tells which of the two is wrong"
    if statistic == GAIN:
        return f"{text}, whatever their data; its copy of the weights or its arithmetic is not theirs"
    return f"{text}, which do the same work; its data, its copy of the model or its hardware is not theirs"


def duplicates(kind: str, name: str, statistic: str, members: Sequence[int], value: float) -> str:
    """Return the message of ranks that tell the same number to the last bit, and what it usually means."""
    text = f"{subject(kind, name, statistic)} is {number(value)} on each of {ranks(members)}, to the last bit"
    return f"{text}: they read the same data (does the sampler know its rank?), or are copies that nobody told Sentinel of"


def beside_references(score: float, is_alone: bool) -> str:
    """Return what reference runs on the same data did at the same step; score: how far they moved, 1 is anomalous."""
    if is_alone:
        return (
            "reference runs on the same data do not show it"
            if score < 1.0
            else "more than in reference runs on the same data"
        )
    return "reference runs on the same data moved too: the batch" if score >= 1.0 else "reference runs stood still"


def nonfinite(
    kind: str, name: str, num_nan: int, num_inf: int, num_elements: int, rank: int, micro_step: int | None, skipped: bool
) -> str:
    """Return the message of a tensor with values that are no numbers."""
    what = " and ".join(
        part for part in (f"{num_nan} NaN" if num_nan else "", f"{num_inf} infinite" if num_inf else "") if part
    )
    text = f"{kind} {name} holds {what} of {count(num_elements, 'value')} on rank {rank}"
    if micro_step is not None:
        text += f", micro-step {micro_step}"
    return text + ("; the optimizer skipped this step" if skipped else "")


def bad_scalar(name: str, text: str, ranks: tuple[int, ...], num_ranks: int) -> str:
    """Return the message of a scalar that is no number."""
    where = f"on rank {ranks[0]}" if len(ranks) == 1 else f"on {len(ranks)} of {num_ranks} ranks"
    return f"{name} is {text} {where}"


def ranks(numbers: Sequence[int], most: int = 16) -> str:
    """Return `rank 3`, or `ranks 0, 1, 2`; of many the first ones and how many more."""
    shown = ", ".join(map(str, numbers[:most]))
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}{more}"


def diverged(kind: str, name: str, one: Differing, who: Sequence[tuple[int, ...]], is_sure: bool) -> str:
    """Return the message of copies that differ: which ranks are wrong, or which may be, and what was compared."""
    piece = f" (part {one.shard})" if one.shard else ""
    accused = sorted({rank for members in who for rank in members})
    total = len(one.members)
    said = dict(zip(one.members, one.checksums, strict=True))
    others = [members for members in one.members if members not in who]
    words = ", ".join(_word(word) for word in list(dict.fromkeys(one.checksums))[:4])
    if is_sure and not others:
        # A rank that holds several copies holds one that agrees with most, too.
        return f"{kind} {name}{piece} on {ranks(accused)} differs between copies that the same rank holds: {words}"
    if is_sure:
        agree = sorted({rank for members in others for rank in members})
        shared = "" if len(who[0]) == 1 else ", which hold a copy together: one of them is wrong,"
        text = f"{kind} {name}{piece} on {ranks(accused)}{shared} differs from its {count(total - len(who), 'copy')}"
        text += f" on {ranks(agree)}" if total - len(who) == 1 else f" that agree, on {ranks(agree)}"
        return f"{text}: {_word(said[who[0]])} against {_word(said[others[0]])}"
    if total == 2:
        text = f"{kind} {name}{piece} differs between its two copies: one of these is wrong, {ranks(one.members[0])} or "
        text += ranks(one.members[1])
    else:
        text = f"{kind} {name}{piece} differs between its {total} copies, and no value has most of them: some are wrong of "
        text += ranks(accused)
    return f"{text}: {words}"


def stale(
    reason: str, facts: Sequence[RankFacts], seconds: float, limit: float, waiting: Sequence[int], is_sure: bool
) -> str:
    """Return the message of ranks that are stale: who, for how long, what each last did, and who waits."""
    who, many = ranks([one.rank for one in facts]), len(facts) > 1
    if reason == "silent":
        text = f"{who} {'are' if many else 'is'} silent: nothing was heard for {seconds:.0f} s"
        here = [one for one in facts if one.process_state]
        if here:
            text += f"; {_processes(here)} there (state {', '.join(dict.fromkeys(one.process_state for one in here))})"
            text += " but writes nothing: its disk is full or does not answer, or native code holds Python's lock"
        elif nodes := list(dict.fromkeys(one.unheard_node for one in facts if one.unheard_node)):
            names = ", ".join(nodes[:4]) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")
            text += f", nor of node{'s' if len(nodes) > 1 else ''} {names}, by which their records come: that process, "
            text += "its machine or its network is stopped or gone, and the ranks may train on"
        else:
            text += "; gone, stopped, or its records cannot be written"
    elif reason == "stopped":
        states = ", ".join(dict.fromkeys(one.process_state for one in facts if one.process_state))
        text = f"{who} {'are' if many else 'is'} stopped: nothing was heard for {seconds:.0f} s; {_processes(facts)} stopped"
        text += f" (state {states})" if states else ""
        pids = " ".join(str(one.pid) for one in facts[:4] if one.pid)
        what = "a debugger or profiler that holds it" if states == "t" else "Ctrl-Z, a scheduler that suspends, a person"
        text += f"; see who stopped it ({what}), then: kill -CONT {pids}".rstrip()
    elif reason == "left":
        why = ", ".join(dict.fromkeys(one.left for one in facts))
        text = f"{who} left ({why}) and the others have waited {seconds:.0f} s"
    elif is_sure:
        text = f"{who} hangs: no progress for {seconds:.0f} s (limit {limit:.0f} s)"
    elif not waiting and all(one.is_waiting > 0 for one in facts):
        text = f"{who} wait for each other: no progress for {seconds:.0f} s (limit {limit:.0f} s); perhaps not all call "
        text += "the same collectives in one order, or a connection is lost: see each rank's stack (py-spy dump --pid PID)"
    else:
        text = f"one of {who} hangs, nothing tells which: no progress for {seconds:.0f} s (limit {limit:.0f} s)"
    text += "; last seen " + _places(facts)
    if waiting:
        text += f"; {ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'}"
    return text


def _places(facts: Sequence[RankFacts]) -> str:
    """Return where ranks stand, those of one place together, and the places of the fewest ranks first."""
    if len(facts) == 1:
        return where_stands(facts[0])
    at: dict[str, list[int]] = {}
    for one in facts:
        at.setdefault(where_stands(one), []).append(one.rank)
    places = sorted(at.items(), key=lambda item: len(item[1]))
    more = sum(len(who) for _, who in places[4:])
    return ", ".join(f"{ranks(who)} {where}" for where, who in places[:4]) + (f" and {more} more" if more else "")


def _processes(facts: Sequence[RankFacts]) -> str:
    """Return `process 4711 on n3 is`, or `processes 4711, 4712 on n3 are`."""
    hosts = ", ".join(list(dict.fromkeys(one.host for one in facts if one.host))[:4])
    pids = ", ".join(str(one.pid) for one in facts[:8] if one.pid)
    text = f"process {pids}" if len(facts) == 1 else f"processes {pids}" + (" and more" if len(facts) > 8 else "")
    return text + (f" on {hosts}" if hosts else "") + (" is" if len(facts) == 1 else " are")


def slow(
    rank: int, busy_s: float, usual_s: float, ratio: float, waits_s: float, peers: Sequence[int], *, is_alone: bool = False
) -> str:
    """Return the message of a rank that arrives last: its excess, and who waits; is_alone: in one step, so far."""
    text = f"rank {rank} arrives last: it works {number(busy_s)} s of {'this' if is_alone else 'each'} step"
    if not peers:
        text += f", {number(ratio)} times the {number(usual_s)} s that are usual beside the other stages"
        return f"{text}, which wait {number(waits_s)} s for it"
    text += f", {number(ratio)} times the {number(usual_s)} s of its {count(len(peers), 'peer')}"
    return f"{text}; {ranks(peers)} {'waits' if len(peers) == 1 else 'wait'} {number(waits_s)} s for it"


def ended(rank: int | None, end: RunEnd | RankEnd, all_ranks: Sequence[RankFacts]) -> str:
    """Return the message of an end: who went first and how, what became of the others, and what to do."""
    at = f", {'after' if end.is_between else 'in'} step {end.step}," if end.step >= 0 else ""
    others = [one for one in all_ranks if one.rank != rank]
    if rank is not None:
        text = f"rank {rank}{at} {end_words(end)}" + ("; it was the first to go" if others else "")
        after = [one.rank for one in others if one.end is not None]
        here = [one.rank for one in others if one.end is None]
        if after:
            text += f"; {ranks(after)} went after it"
        if here:
            text += f"; {ranks(here)} {'was' if len(here) == 1 else 'were'} still there then"
    else:
        gone = [one.rank for one in others if one.end is not None]
        so = [one.rank for one in others if one.end is not None and (one.end.how, one.end.detail) == (end.how, end.detail)]
        after = [] if end.is_asked or not so else [one for one in gone if one not in so]
        gone = [one for one in gone if one not in after]
        words = end_words(end)
        if len(gone) > 1:
            words = words.replace("was ", "were ", 1) if words.startswith("was ") else words.replace("is ", "are ", 1)
        text = f"{ranks(gone)}{at} {words}"
        if len(gone) > 1 and not end.is_asked and end.detail != "SIGTERM":
            text += f"; nothing tells which of them went first; last signs of life: {_last_signs(others, gone)}"
        if after:
            text += f"; {ranks(after)} went with {'them' if len(gone) > 1 else 'it'}"
    if isinstance(end, RunEnd) and end.found_late_s >= 60.0:
        text += f"; found {seconds_words(end.found_late_s)} later"
    is_restarted = isinstance(end, RunEnd) and end.is_restarted
    return f"{text}; a newer attempt has begun since" if is_restarted else f"{text}; {_what_to_do(end)}"


_MOST_SIGNS = 8


def _last_signs(facts: Sequence[RankFacts], gone: Sequence[int]) -> str:
    """Return when and in which step each of these ranks was there last, by the clock of its machine, oldest first."""
    ends = sorted((one.end.time, one.rank, one.end.step) for one in facts if one.end is not None and one.rank in gone)
    signs = []
    for time, rank, step in ends[:_MOST_SIGNS]:
        clock = datetime.datetime.fromtimestamp(time, datetime.UTC).strftime("%H:%M:%S.%f")[:-3]
        at = clock if time > 0 else "an unknown time"
        signs.append(f"rank {rank} at {at}" + (f" in step {step}" if step >= 0 else ""))
    more = f" and {len(ends) - _MOST_SIGNS} more" if len(ends) > _MOST_SIGNS else ""
    return ", ".join(signs) + more + " (UTC)"


def run_ended_briefly(end: RunEnd | RankEnd) -> str:
    """Return how it ended and who went first: `rank 1 was killed: SIGKILL`."""
    rank = end.rank if isinstance(end, RunEnd) else None
    return end_words(end) if rank is None else f"rank {rank} {end_words(end)}"


def seconds_words(seconds: float) -> str:
    """Return a duration as people say it: `40 s`, `5 min`, `3 h`, `2 d`."""
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"


def _what_to_do(end: RunEnd | RankEnd) -> str:
    if isinstance(end, RankEnd) and end.is_at_prompt:
        return "it stands at its prompt: read the traceback below the cell; what was trained so far is still in memory"
    if end.how == OUT_OF_MEMORY and end.detail.startswith("the kernel"):
        return "give the host more memory, or hold less in it (loader workers, pinned buffers, copies of checkpoints)"
    if end.how == OUT_OF_MEMORY:
        return "lower the micro-batch or the sequence length, recompute or shard more, then go on from the last checkpoint"
    if end.how == EXCEPTION and _KILLED_WORKER.search(end.detail):
        return (
            "one of its loader's workers was killed, often for want of memory: see dmesg, the size of /dev/shm and how much "
            "the workers hold, then go on from the last checkpoint"
        )
    if end.how == EXCEPTION:
        return "read the traceback in the trainer's log, then go on from the last checkpoint"
    if end.how == SILENCE:
        return "look whether its host is up and writes to the run's directory"
    if end.detail.startswith("SIGHUP"):
        return "its terminal was closed: start it in tmux, with nohup or by a scheduler, and go on from the last checkpoint"
    if end.is_asked or end.detail == "SIGTERM":
        return "see who sent it (scheduler, launcher, a person), then go on from the last checkpoint"
    if end.detail in CRASHES:
        return "it crashed in native code: look at the last lines of its log and its core dump"
    if end.detail.startswith(ALL_TOGETHER):
        return (
            "either somebody ended all at once (SIGTERM or SIGKILL of a scheduler or a person, a machine that went down), "
            "or one was killed and its launcher ended the others at once: see the logs of both, and dmesg for the "
            "out-of-memory killer, then go on from the last checkpoint"
        )
    if end.has_memory and end.ignored_sigterm:
        return (
            "it was not for want of memory, the kernel counts no such kill; SIGTERM was ignored there, so that a launcher, "
            "a scheduler or a person who asked in vain had to kill: see who did, then go on from the last checkpoint"
        )
    if end.has_memory:
        return (
            "it was not for want of memory, the kernel counts no such kill: see who sent it (a scheduler, a launcher, a "
            "person), then go on from the last checkpoint"
        )
    return (
        "look for the out-of-memory killer (dmesg), the scheduler's limits and the last lines of its log, "
        "then go on from the last checkpoint"
    )


def where_stands(one: RankFacts) -> str:
    """Return `in step 41, micro-step 1, forward of layers.3.mlp, call 17, at train.py:88 (main)`."""
    words = [f"in step {one.step}"]
    if one.micro_step >= 0:
        words.append(f"micro-step {one.micro_step}")
    if one.module or one.phase:
        words.append(f"{one.phase or 'at'} of {one.module}" if one.phase and one.module else one.phase or one.module)
    words.append(f"call {one.call_id}" if one.call_id else "before its first call")
    if one.activity != "train":
        words.append(f"activity {one.activity}")
    if one.site:
        words.append(f"at {one.site}")
    return ", ".join(words)


def _word(checksum: int) -> str:
    return "NaN" if checksum == 2**64 - 1 else f"{checksum:016x}"


def ending(onset: Anomaly, lasted: int, settled: bool, goes_on_as: str = "") -> str:
    """Return the message of an episode's end."""
    named = onset.tag_name if onset.kind == "scalar" else f"{onset.kind} {onset.tag_name}"
    what = onset.message.split(" is ", 1)[0] if onset.baseline is not None and onset.statistic != "checksum" else named
    if onset.statistic == "busy_s":
        return f"{ranks(onset.ranks)} no longer arrives last; it did in {count(lasted, 'step')}"
    if onset.statistic == "checksum":
        reported = f"; goes on as {goes_on_as}" if goes_on_as else ""
        state = "is told anew" if goes_on_as else "is the same again on all that were compared"
        return f"{what} {state}; its copies differed in {count(lasted, 'step')}{reported}"
    if settled:
        return f"{what} settled at a new level, which is the new normal, after {count(lasted, 'step')}"
    if goes_on_as:
        how = "lasts, grew worse or is no more alone"
        return f"{what} was anomalous in {count(lasted, 'step')} and {how}; goes on as {goes_on_as}"
    return f"{what} is back to normal; it was anomalous in {count(lasted, 'step')}"
