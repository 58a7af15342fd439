"""The demo again and again, on an idle and on a busy machine: was all that was planted found, and nothing false told?

    python benchmarks/demo_truth.py [--idle 10] [--busy 10] [--write]

Each run is `sentinel demo --json` in a process of its own; busy: beside two processes that burn processor time. What counts
is what the demo's own judgement says of every incident and every message at its receiver. Where other work runs on the
machine, ranks are truly slow, and `idle` is not: the load before each run is in the table.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
BURN = "while True: sum(range(10000))"


def run(directory: str) -> tuple[bool, list[str], float, str]:
    """Return whether all claims held, those that did not, the seconds, and the messages (of causes + of slow ranks)."""
    command = [sys.executable, "-m", "sentinel.cli", "demo", "--json", "--dir", directory]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        notified = json.loads(done.stdout)
    except ValueError:
        return False, [f"no report: {done.stderr.strip()[-200:]}"], 0.0, "-"
    missed = [f"{claim['text']}: {claim['found']}" for claim in notified["claims"] if not claim["holds"]]
    alerts = [alert for one in notified["alerts"] if one["to"] == "webhook" for alert in one["body"]["alerts"]]
    of_time = sum(alert["incident"]["detectors"] == ["SlowRank"] for alert in alerts)
    return notified["ok"], missed, notified["seconds"], f"{len(alerts) - of_time} + {of_time}"


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle", type=int, default=10)
    parser.add_argument("--busy", type=int, default=10)
    parser.add_argument("--burning", type=int, default=2, help="processes that burn processor time beside a busy run")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/<date>-demo.md")
    options = parser.parse_args()
    lines = [
        "| machine | run | all true | messages (causes + slow ranks) | seconds | load before | what did not hold |",
        "|---|---|---|---|---|---|---|",
    ]
    good = {"idle": 0, "busy": 0}
    for machine, number in (("idle", options.idle), ("busy", options.busy)):
        beside = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(options.burning if machine == "busy" else 0)]
        try:
            for at in range(number):
                load = os.getloadavg()[0]
                with tempfile.TemporaryDirectory(prefix="sentinel-demo-") as directory:
                    holds, missed, seconds, alerts = run(directory)
                good[machine] += holds
                said = "<br>".join(missed).replace("|", "/")
                lines.append(
                    f"| {machine} | {at} | {'yes' if holds else 'NO'} | {alerts} | {seconds:.0f} | {load:.1f} | {said} |"
                )
                print(lines[-1], flush=True)
        finally:
            for one in beside:
                one.kill()
                one.wait()
    lines.append("")
    lines.append(f"idle: {good['idle']} of {options.idle} with nothing false; busy: {good['busy']} of {options.busy}.")
    print(lines[-1])
    if options.write:
        path = ROOT / "benchmarks" / "results" / f"{datetime.date.today().isoformat()}-demo.md"
        path.write_text(f"# The demo, judged\n\n`python {' '.join(sys.argv)}`\n\n" + "\n".join(lines) + "\n")
    return 0 if good["idle"] + good["busy"] == options.idle + options.busy else 1


if __name__ == "__main__":
    sys.exit(main())
