"""Top 8 of the same records in eight files: msProbe's anomaly_processor and `sentinel topk`, each in a fresh process.

    python benchmarks/topk_vs_msprobe.py [--num 1000000] [--repeat 3] [--write]

Seconds are those of reading and sorting, without imports; peak memory is the process's, its children's with it. In msProbe's
own order both must name the same eight. Needs msProbe (`pip install mindstudio-probe`);
says so and exits where it is absent.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
CONTENDERS = {
    "msprobe": "msProbe, anomaly_processor",
    "theirs msprobe": "sentinel topk, the same files, msProbe's order",
    "theirs causal": "the same, causal order",
    "ours msprobe": "sentinel topk, the same records in its own format, msProbe's order",
    "ours causal": "the same, causal order",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write the table into benchmarks/results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--home", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if importlib.util.find_spec("msprobe") is None:
        print("msProbe is not installed; pip install mindstudio-probe", file=sys.stderr)
    elif options.worker:
        print("@" + json.dumps(top_eight(options.worker, options.home)))
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory(prefix="sentinel-topk-vs-msprobe-") as scratch:
        home = Path(scratch)
        write_records(home, options.num)
        for _ in range(options.repeat):
            for name in CONTENDERS:
                command = [sys.executable, __file__, "--worker", name, "--home", str(home)]
                out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                found[name].append(json.loads(next(line for line in out.splitlines() if line.startswith("@"))[1:]))
    lines = [
        f"{datetime.date.today()}  {platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, "
        f"msProbe {version('mindstudio-probe')}",
        f"python benchmarks/topk_vs_msprobe.py --num {options.num} --repeat {options.repeat}",
        "",
        f"| top 8 of {options.num} records in 8 files | best s | median s | CPU s | peak MB |",
        "|---|---|---|---|---|",
    ]
    for name, words in CONTENDERS.items():
        walls, runs = [one["wall_s"] for one in found[name]], found[name]
        cpu, peak = min(one["cpu_s"] for one in runs), max(one["mb"] for one in runs)
        lines.append(f"| {words} | {min(walls):.2f} | {statistics.median(walls):.2f} | {cpu:.2f} | {peak:.0f} |")
    first = found["msprobe"][0]["first"]
    same = all(run["first"] == first for name in ("theirs msprobe", "ours msprobe") for run in found[name])
    lines += ["", f"In msProbe's order all name the same eight: {'yes' if same else 'NO'}"]
    print("\n".join(lines))
    if options.write:
        (RESULTS / f"{datetime.date.today()}-topk_vs_msprobe.md").write_text("\n".join(lines) + "\n")


def write_records(home: Path, num: int) -> None:
    """Write `num` records as msProbe does, `rank<R>/anomaly.json` of eight ranks, and as Sentinel does.

    No two have the same call id, so that msProbe's order, which has ties, is one order.
    """
    from sentinel.explain.msprobe_records import MsprobeRecord, from_msprobe
    from sentinel.report.files import anomaly_line

    rng = random.Random(7)
    calls = list(range(num))
    rng.shuffle(calls)
    (home / "ours" / "anomalies").mkdir(parents=True)
    for rank in range(8):
        (home / "theirs" / f"rank{rank}").mkdir(parents=True)
        theirs, ours = ["{"], []
        for count, call_id in enumerate(calls[rank::8]):
            step, name = rng.randrange(10_000), f"0:decoder.layers.{rng.randrange(32)}.mlp.linear_fc1"
            tag = rng.choice((f"{name}.output:0/rank{rank}/actv", f"{name}.weight/rank{rank}/post_grad"))
            message = f"Rule AnomalyTurbulence reports anomaly signal in ('{tag}', 'norm') at step {step}, "
            message += f"current value {rng.random()}, history mean {rng.random() / 2}."
            record = MsprobeRecord(
                rank=rank, step=step, pp_stage=rank // 4, call_id=call_id, tag_name=tag, message=message,
                group_mates=[0, 1, 2, 3],
            )  # fmt: skip
            body = json.dumps({name: getattr(record, name) for name in record.__struct_fields__}, indent=1)
            theirs.append(("," if count else "") + f'\n "{tag}_step_{step}_call_{call_id}": {body}')
            ours.append(anomaly_line(from_msprobe(record)).rstrip(b"\n") + b"\n")
        (home / "theirs" / f"rank{rank}" / "anomaly.json").write_text("".join([*theirs, "\n}"]))
        (home / "ours" / "anomalies" / f"{rank}.jsonl").write_bytes(b"".join(ours))


def top_eight(which: str, home: Path) -> dict[str, Any]:
    """Return the call ids of the eight, seconds and peak memory of this process."""
    if which == "msprobe":
        from msprobe.core.monitor.anomaly_processor import AnomalyAnalyse, AnomalyDataLoader

        began, cpu = time.perf_counter(), time.process_time()
        records = AnomalyDataLoader(str(home / "theirs")).get_anomalies_from_jsons()
        first = [one.call_id for one in AnomalyAnalyse().get_range_top_k(8, [], records)]
    else:
        from sentinel.explain.topk import topk

        folder, order = which.split()
        began, cpu = time.perf_counter(), time.process_time()
        first = [one.anomaly.call_id or 0 for one in topk(home / folder, 8, order=order).entries]
    wall = time.perf_counter() - began
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    with Path("/proc/self/status").open() as status:
        own = int(next(line for line in status if line.startswith("VmHWM")).split()[1])
    cpu = time.process_time() - cpu + children.ru_utime + children.ru_stime
    return {"wall_s": wall, "cpu_s": cpu, "mb": (own + children.ru_maxrss) / 1024, "first": first}


if __name__ == "__main__":
    main()
