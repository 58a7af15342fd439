"""Verdicts on real logs whose causes are known by recurrence: runs that share their data order excurse at the same steps.

    python benchmarks/attribution_logs.py LOGS... [--write]

LOGS: plain logs of reference runs. Each is judged alone, one row after the other, without a reference. An incident whose
first step is that of an incident of another log (a step off at most) recurs: it is the data. What `batch` verdicts are
worth is the share of them that recur; a `model` verdict on one that recurs is wrong, or the data hurt the model for long.
"""

from __future__ import annotations

import argparse
import datetime
from collections import Counter
from pathlib import Path

from sentinel.anomaly import Severity
from sentinel.incident import Incident
from sentinel.judge.judge import Judge
from sentinel.logs.log_file import read_log
from sentinel.logs.views import log_views
from sentinel.rules.language.loader import load_pack

ROOT = Path(__file__).parents[1]


def incidents_of(path: str) -> tuple[list[Incident], int]:
    """Return the last revision of each incident of a log that is a warning or worse, and the rows judged."""
    judge = Judge(load_pack())
    newest: dict[str, Incident] = {}
    num_rows = 0
    for view in log_views(read_log(path), Path(path).stem):
        num_rows += 1
        newest.update((one.id, one) for one in judge.judge(None, view).incidents)
    kept = [one for one in newest.values() if one.severity is not Severity.INFO and one.state != "merged"]
    return kept, num_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    found = {path: incidents_of(path) for path in options.logs}
    table: Counter[tuple[str, bool]] = Counter()
    for path, (own, _) in found.items():
        others = {one.opened_step for other, (theirs, _) in found.items() if other != path for one in theirs}
        for one in own:
            recurs = any(one.opened_step + off in others for off in (-1, 0, 1))
            table[one.suspected, recurs] += 1
    lines = [f"{len(found)} logs, {sum(rows for _, rows in found.values())} rows, incidents that are a warning or worse", ""]
    lines.append(f"{'verdict':12}{'recur':>8}{'alone':>8}{'share that recurs':>20}")
    for suspected in ("batch", "model", "precision", "hardware", "unknown"):
        yes, no = table[suspected, True], table[suspected, False]
        lines.append(f"{suspected:12}{yes:8}{no:8}{(f'{yes / (yes + no):.0%}' if yes + no else '-'):>20}")
    print("\n".join(lines))
    if options.write:
        name = f"{datetime.date.today()}-attribution-logs.txt"
        (ROOT / "benchmarks" / "results" / name).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
