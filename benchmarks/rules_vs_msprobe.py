"""Sentinel's rules beside msProbe's, on msProbe's own ground and on the same statistics.

    python benchmarks/rules_vs_msprobe.py [--steps 240] [--layers 12] [--write]

A small GPT is trained for `--steps` healthy steps of two micro-batches, weight gradients, activations and their gradients
measured; then a NaN is planted in the output of one module in one micro-batch, and training goes on. All contenders judge
the same recorded statistics in turns, each in a process of its own. Said of each: values judged a processor second (msProbe
gets its four statistics as plain numbers, for nothing; Sentinel forms them from the rows while the clock runs), records on
healthy steps, and the place of the planted origin in its own order: of all steps, and of the step when that is known.
`live`: the same training under msProbe's TrainerMon: its own statistics, its own records.

Beside it: msprobe_formula.py (`compat: msprobe` to the last bit) and topk_vs_msprobe.py. Needs msProbe (`pip install
mindstudio-probe`) and torch beside Sentinel; says so and exits where it is absent.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
OPS = ["min", "max", "mean", "norm"]
KINDS = ["wgrad", "activation_in", "activation", "dgrad_in", "dgrad"]
MICRO_STEPS = 2
DOCUMENTED = 0.5
"""Threshold of AnomalyTurbulence in msProbe's manual."""
OURS = 1.0
"""The default threshold of Sentinel's AnomalyTurbulence."""
WARM, TURN = 60, 20
"""Steps before timing begins; steps of a contender in a turn."""
ROBUST = """
builtin: false
rules:
  - name: turbulence
    detector: AnomalyTurbulence
    match: {{kind: [{kinds}], statistic: [norm, mean]}}
    args: {{threshold: {threshold}}}
"""
COMPAT = "rules:\n  - {{name: msprobe-turbulence, args: {{threshold: {threshold}}}}}\n"
CONTENDERS = {
    "msprobe 0.5": "msProbe, AnomalyTurbulence 0.5 and AnomalyNan",
    "msprobe silent 0.5": "the same, its log line a record left out",
    "msprobe silent 1.0": "the same at 1.0",
    "compat 0.5": "Sentinel, pack msprobe (its formulas), 0.5",
    "robust 0.5": "Sentinel, AnomalyTurbulence of norm and mean, 0.5",
    "robust 1.0": "the same at 1.0, the default threshold",
    "default": "Sentinel, default pack",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240, help="healthy steps; the NaN comes in the next one")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--live-layers", type=int, default=4, help="of msProbe's own run, which it slows down; 0: none")
    parser.add_argument("--write", action="store_true", help="write the results into benchmarks/results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--home", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < WARM + TURN:
        parser.error(f"--steps: expected {WARM + TURN} at least, {WARM} of which are not timed, got {options.steps}")
    if importlib.util.find_spec("msprobe") is None:
        print("msProbe is not installed; pip install mindstudio-probe", file=sys.stderr)
    elif options.worker:
        work(options)
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    reported: dict[str, Any] = {"machine": machine(), "settings": settings(options)}
    with tempfile.TemporaryDirectory(prefix="sentinel-rules-vs-msprobe-") as scratch:
        home = Path(scratch)
        one_shot("record", options, home / "recording")
        reported["rules"] = rules(options, home / "recording")
        small = argparse.Namespace(**vars(options) | {"layers": options.live_layers})
        reported["live"] = one_shot("live", small, home / "live") if options.live_layers else None
    lines = table(reported)
    print("\n".join(lines))
    if options.write:
        path = RESULTS / f"{datetime.date.today()}-rules_vs_msprobe"
        path.with_suffix(".json").write_text(json.dumps(reported, indent=1) + "\n")
        path.with_suffix(".md").write_text("\n".join(lines) + "\n")


def machine() -> dict[str, Any]:
    from importlib.metadata import version

    names = {"msprobe": "mindstudio-probe", "torch": "torch", "numpy": "numpy"}
    found = {name: version(package) for name, package in names.items()}
    return {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), **found}


def settings(options: argparse.Namespace) -> dict[str, Any]:
    return {key: getattr(options, key) for key in ("steps", "layers", "live_layers", "width")}


# -- the run ---------------------------------------------------------------------------------------------------------


def origin_of(layers: int) -> str:
    return f"blocks.{layers // 2}.mlp.fc1"


def train(options: argparse.Namespace, attach: Any) -> None:
    """Train with `attach`ed monitor: `steps` healthy steps, a NaN in the second micro-batch of the next, two more."""
    import torch

    sys.path.insert(0, str(ROOT / "examples" / "gpt"))
    from data import StandardLibrary
    from model import GPT, GPTConfig, next_token_loss

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=options.width, layers=options.layers, sequence=32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data, is_planted = StandardLibrary(32, 4), False

    def poison(module: Any, inputs: Any, output: Any) -> Any:
        if is_planted:
            output = output.clone()
            output[0, 3, 5] = math.nan
        return output

    # Before the monitor's own hooks: it sees what the module hands on.
    model.get_submodule(origin_of(options.layers)).register_forward_hook(poison)
    monitor = attach(model, optimizer)
    for step in range(options.steps + 3):
        total = 0.0
        for micro_step in range(MICRO_STEPS):
            is_planted = step == options.steps and micro_step == 1
            batch = data.micro_step(step, 0, micro_step)
            loss = next_token_loss(model(batch[:, :-1]), batch[:, 1:]) / MICRO_STEPS
            loss.backward()
            total += loss.item()
        getattr(monitor, "log", lambda **values: None)(loss=total)
        optimizer.step()
        optimizer.zero_grad()
    getattr(monitor, "detach", lambda: None)()


def record(options: argparse.Namespace) -> dict[str, Any]:
    """Train with Sentinel attached; its spool is what everybody judges."""
    import sentinel

    os.environ["SENTINEL_DIR"] = str(options.home)
    config = {"run": "recording", "kinds": KINDS, "per_micro_step": True, "black_box": False}
    train(options, lambda model, optimizer: sentinel.attach(model, optimizer, config, grad_acc_steps=MICRO_STEPS))
    return {}


def live(options: argparse.Namespace) -> dict[str, Any]:
    """Train under msProbe's own monitor and count what it recorded."""
    from msprobe.core.monitor.anomaly_processor import AnomalyDataLoader
    from msprobe.pytorch import TrainerMon

    os.chdir(options.home)
    os.environ["MONITOR_OUTPUT_DIR"] = str(options.home / "out")
    alert = {"rules": [{"rule_name": "AnomalyTurbulence", "args": {"threshold": DOCUMENTED}}, {"rule_name": "AnomalyNan"}],
             "dump": True}  # fmt: skip
    config = {"targets": {}, "format": "csv", "ops": OPS, "wg_distribution": True, "xy_distribution": True, "all_xy": True,
              "alert": alert, "step_count_per_record": 1000}  # fmt: skip
    Path("config.json").write_text(json.dumps(config))

    def attach(model: Any, optimizer: Any) -> Any:
        monitor = TrainerMon("config.json", params_have_main_grad=False)
        monitor.set_monitor(model, optimizer=optimizer, grad_acc_steps=MICRO_STEPS)
        return monitor

    train(options, attach)
    records = AnomalyDataLoader(str(options.home / "out" / "anomaly_detected")).get_anomalies_from_jsons()
    return judged_by_msprobe(records, options)


def judged_by_msprobe(records: list[Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return records a healthy step, and where msProbe's own analysis puts the origin."""
    from msprobe.core.monitor.anomaly_processor import AnomalyAnalyse

    analyse = AnomalyAnalyse()
    mark = f"{origin_of(options.layers)}.output:1/"
    places: dict[str, Any] = {}
    for which, chosen in (("all_steps", []), ("its_step", [options.steps])):
        ordered = analyse.get_range_top_k(len(records) + 1, chosen, records)
        at = next((n for n, one in enumerate(ordered, 1) if mark in one.tag_name and one.step == options.steps), None)
        places[which] = [at, len(ordered)]
    healthy = sum(one.step < options.steps for one in records)
    return {"records_a_healthy_step": healthy / options.steps, "origin": places}


# -- rules -----------------------------------------------------------------------------------------------------------


class Steps:
    """The recorded steps as each side takes them, formed before anybody's clock starts."""

    def __init__(self, home: Path) -> None:
        from sentinel.judge.recorded import RecordedRun
        from sentinel.store.run_paths import RunPaths

        self.views = []
        with RecordedRun(RunPaths.of(home / "recording")) as recorded:
            for view, _ in recorded.views():
                _ = view.stats, view.present, view.moments, view.scalars, view.bad_rows
                self.views.append(view)

    def metrics(self, at: int) -> tuple[list[tuple[tuple[str, str], float]], dict[str, int]]:
        """Return msProbe's view of a step: ((tag, op), value) and the call id of each tag."""
        from sentinel.exports.msprobe_format import tag_of
        from sentinel.moments import raw_statistic

        view = self.views[at]
        tags, calls = [], {}
        for row, logical in zip(view.rows, view.row_logical, strict=True):
            tensor = view.tensors[int(logical)]
            micro_step = int(row["micro_step"]) if tensor.kind != "wgrad" else None
            tag = tag_of(0, tensor.name, tensor.kind, 0, micro_step)
            tags.append(tag)
            calls[tag] = int(row["call_id"])
        columns = [raw_statistic(view.rows, op).tolist() for op in OPS]
        return [((tag, op), column[i]) for i, tag in enumerate(tags) for op, column in zip(OPS, columns, strict=True)], calls


def judge_as_msprobe(options: argparse.Namespace, out: IO[str], silent: bool, threshold: float) -> None:
    from msprobe.core.monitor import anomaly_processor
    from msprobe.pytorch.monitor import data_writers

    if silent:
        data_writers.logger.info = lambda *args, **kwargs: None
    specs = [{"rule_name": "AnomalyTurbulence", "args": {"threshold": threshold}}, {"rule_name": "AnomalyNan"}]
    factory = anomaly_processor.AnomalyDataFactory(0, 0, [0])
    writer = data_writers.BaseWriterWithAD(
        data_writers.WriterInput("", anomaly_processor.AnomalyScanner.load_rules(specs), "", anomaly_factory=factory)
    )
    steps = Steps(options.home)
    metrics = [steps.metrics(at) for at in range(len(steps.views))]

    def judge(at: int) -> int:
        values, calls = metrics[at]
        factory.set_call_id(calls)
        for tag, value in values:
            writer.add_scalar(tag, value, at)
        return len(values)

    def end() -> dict[str, Any]:
        keys = anomaly_processor.AnomalyDataWriter.get_anomaly_dict(writer.anomalies)
        records = anomaly_processor.AnomalyDataLoader.create_instances_from_dict(keys)
        said = sorted(_said(one.step, one.tag_name, one.message) for one in writer.anomalies)
        healthy = sum(one.step < options.steps for one in writer.anomalies)
        return {
            **judged_by_msprobe(records, options), "alarms_a_healthy_step": healthy / options.steps, "said": said,
        }  # fmt: skip

    serve(out, judge, end, len(steps.views))


_MESSAGE = re.compile(r"Rule (?P<rule>\w+) reports anomaly signal in \(.*, '(?P<op>\w+)'\)")


def _said(step: int, tag: str, message: str) -> list[Any]:
    found = _MESSAGE.match(message)
    assert found is not None, message
    return [step, tag, found["op"], found["rule"]]


def judge_as_sentinel(options: argparse.Namespace, out: IO[str], which: str, threshold: float) -> None:
    from sentinel.anomaly import Severity
    from sentinel.exports.msprobe_format import tag_of
    from sentinel.judge.judge import Judge
    from sentinel.report.files import anomaly_line
    from sentinel.rules.language.loader import load_pack

    folder = options.home / which.replace(" ", "-")
    (folder / "anomalies").mkdir(parents=True)
    packs: list[str | Path] = []
    if which != "default":
        file = folder / "pack.yaml"
        if which.startswith("compat"):
            packs.append("msprobe")
        text = COMPAT if which.startswith("compat") else ROBUST
        file.write_text(text.format(kinds=", ".join(KINDS), threshold=threshold))
        packs.append(file)
    steps = Steps(options.home)
    judge_ = Judge(load_pack(packs), max_anomalies=10**9)
    engine = judge_._engine
    found: list[Any] = []

    def judge(at: int) -> int:
        before = sum(engine.num_points_judged.values())
        found.extend(judge_.judge(None, steps.views[at]).anomalies)
        return sum(engine.num_points_judged.values()) - before

    def end() -> dict[str, Any]:
        from sentinel.explain.topk import topk

        assert engine.num_rows_judged == sum(view.num_expected for view in steps.views)
        path = folder / "anomalies" / "000001.jsonl"
        path.write_bytes(b"".join(anomaly_line(one) + b"\n" for one in found))
        onsets = [one for one in found if one.event == "onset"]
        healthy = [one for one in onsets if one.step < options.steps]
        shown = [one for one in healthy if one.severity is not Severity.INFO]
        pages = [one for one in healthy if one.severity is Severity.CRITICAL]
        said = []
        if which.startswith("compat"):
            said = sorted(
                [one.step, tag_of(0, one.tag_name, one.kind, 0, one.micro_step if one.kind != "wgrad" else None),
                 one.statistic, one.detector]
                for one in onsets
            )  # fmt: skip
        places = {}
        for name, chosen in (("all_steps", None), ("its_step", [options.steps])):
            ordered = topk(folder, len(onsets) + 1, chosen).entries
            at = next((n for n, one in enumerate(ordered, 1) if _is_origin(one.anomaly, options)), None)
            places[name] = [at, len(ordered)]
        return {
            "records_a_healthy_step": len(healthy) / options.steps, "shown_a_healthy_step": len(shown) / options.steps,
            "pages": len(pages), "origin": places, "said": said, "rows": engine.num_rows_judged,
            "state_bytes_a_tensor": engine.state_bytes_per_tensor,
        }  # fmt: skip

    serve(out, judge, end, len(steps.views))


def _is_origin(anomaly: Any, options: argparse.Namespace) -> bool:
    return bool(
        anomaly.step == options.steps and anomaly.kind == "activation" and anomaly.micro_step == 1
        and origin_of(options.layers) in (anomaly.tag_name, *anomaly.also)
    )  # fmt: skip


def serve(out: IO[str], judge: Any, end: Any, num_steps: int) -> None:
    """Judge steps as they are asked for; answer wall and processor seconds and the number of values."""
    say(out, num_steps)
    at = 0
    for command in sys.stdin:
        verb, _, number = command.strip().partition(" ")
        if verb == "end":
            say(out, end())
            return
        began, began_cpu, values = time.perf_counter(), time.process_time(), 0
        for _ in range(int(number)):
            values += judge(at)
            at += 1
        say(out, [time.perf_counter() - began, time.process_time() - began_cpu, values])


def rules(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    workers = {name: start(name, options, home) for name in CONTENDERS}
    num_steps = {name: hear(worker) for name, worker in workers.items()}
    assert set(num_steps.values()) == {options.steps + 3}, num_steps
    found: dict[str, dict[str, Any]] = {name: {"speeds": []} for name in CONTENDERS}
    plan = [WARM, *[TURN] * ((options.steps - WARM) // TURN)]
    plan.append(options.steps + 3 - sum(plan))
    names = list(CONTENDERS)
    for turn, number in enumerate(plan):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            _, cpu, values = ask(workers[name], f"run {number}")
            if 0 < turn < len(plan) - 1:
                found[name]["speeds"].append((values / cpu, values / number, number / cpu))
    for name, worker in workers.items():
        speeds = found[name].pop("speeds")
        found[name].update(ask(worker, "end"))
        if speeds:
            rates = sorted(one for one, _, _ in speeds)
            found[name]["values_a_cpu_second"] = statistics.median(rates)
            found[name]["values_a_cpu_second_range"] = [rates[0], rates[-1]]
            found[name]["values_a_step"] = speeds[0][1]
            found[name]["steps_a_cpu_second"] = statistics.median(one for _, _, one in speeds)
        worker.wait()
    theirs, ours = ({_by_tensor(one) for one in found[name]["said"]} for name in ("msprobe 0.5", "compat 0.5"))
    same = {"msprobe": len(theirs), "sentinel": len(ours)}
    same |= {"only_msprobe": len(theirs - ours), "only_sentinel": len(ours - theirs)}
    rows_a_step = found["default"]["rows"] / (options.steps + 3)
    for one in found.values():
        one.pop("said", None)
        one["rows_a_cpu_second"] = rows_a_step * one.get("steps_a_cpu_second", 0.0)
    return {"contenders": found, "same_records": same, "rows_a_step": rows_a_step}


def _by_tensor(said: list[Any]) -> tuple[Any, ...]:
    # A row's NaN is one fact, whichever of the four statistics shows it.
    step, tag, op, rule = said
    return (step, tag, "" if rule == "AnomalyNan" else op, rule)


# -- processes -------------------------------------------------------------------------------------------------------


def start(worker: str, options: argparse.Namespace, home: Path) -> subprocess.Popen[str]:
    home.mkdir(parents=True, exist_ok=True)
    arguments = [f"--{key.replace('_', '-')}={value}" for key, value in settings(options).items()]
    with (home / "stderr.txt").open("a") as errors:
        return subprocess.Popen(
            [sys.executable, __file__, "--worker", worker, "--home", str(home), *arguments], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip


def one_shot(worker: str, options: argparse.Namespace, home: Path) -> Any:
    process = start(worker, options, home)
    reported = hear(process)
    process.wait()
    return reported


def ask(worker: subprocess.Popen[str], word: str) -> Any:
    assert worker.stdin is not None
    worker.stdin.write(word + "\n")
    worker.stdin.flush()
    return hear(worker)


def hear(worker: subprocess.Popen[str]) -> Any:
    assert worker.stdout is not None
    for line in worker.stdout:  # A library may print too.
        if line.startswith("@"):
            return json.loads(line[1:])
    home = Path(worker.args[worker.args.index("--home") + 1])  # type: ignore[union-attr, arg-type]
    raise SystemExit(f"a contender died: {worker.args}\n{(home / 'stderr.txt').read_text()[-2000:]}")


def work(options: argparse.Namespace) -> None:
    """One contender in its own process; what libraries print goes where nobody reads it."""
    out = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    verb, _, rest = options.worker.partition(" ")
    if verb == "record":
        say(out, record(options))
    elif verb == "live":
        say(out, live(options))
    elif verb == "msprobe":
        judge_as_msprobe(options, out, rest.startswith("silent"), float(rest.split()[-1]))
    else:
        judge_as_sentinel(options, out, options.worker, float(rest) if rest else OURS)


def say(out: IO[str], what: Any) -> None:
    out.write("@" + json.dumps(what) + "\n")
    out.flush()


# -- table -----------------------------------------------------------------------------------------------------------

HEAD = (
    "contender", "M values/s", "k rows/s", "values a step", "records a healthy step", "warning or worse", "pages",
    "place of the origin", "the step known",
)  # fmt: skip


def table(reported: dict[str, Any]) -> list[str]:
    lines = [f"{datetime.date.today()}  " + ", ".join(f"{key} {value}" for key, value in reported["machine"].items())]
    given = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in reported["settings"].items())
    lines += [f"python benchmarks/rules_vs_msprobe.py {given}; {reported['rules']['rows_a_step']:.0f} rows a step"]
    lines += ["", f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
    for name, one in reported["rules"]["contenders"].items():
        low, high = one.get("values_a_cpu_second_range", (0.0, 0.0))
        speed = f"{one.get('values_a_cpu_second', 0) / 1e6:.2f} ({low / 1e6:.2f} to {high / 1e6:.2f})"
        records = one.get("alarms_a_healthy_step", one["records_a_healthy_step"])
        shown, pages = one.get("shown_a_healthy_step", ""), one.get("pages", "")
        cells = (
            CONTENDERS[name], speed, f"{one.get('rows_a_cpu_second', 0) / 1e3:.0f}", f"{one.get('values_a_step', 0):.0f}",
            f"{records:.3f}",
            f"{shown:.3f}" if shown != "" else "no severities", str(pages), place(one["origin"]["all_steps"]),
            place(one["origin"]["its_step"]),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    same = reported["rules"]["same_records"]
    lines += ["", "msProbe's records and those of the pack msprobe, by step, tensor, micro-step and rule: "
              f"{same['msprobe']} and {same['sentinel']}; {same['only_msprobe']} only msProbe's, "
              f"{same['only_sentinel']} only Sentinel's"]  # fmt: skip
    if reported["live"]:
        one = reported["live"]
        lines.append(
            f"msProbe live, the same training of {reported['settings']['live_layers']} layers: "
            f"{one['records_a_healthy_step']:.2f} records a healthy step; the origin is "
            f"{place(one['origin']['all_steps'])}, {place(one['origin']['its_step'])} with the step known"
        )
    return lines


def place(found: list[Any]) -> str:
    at, number = found
    return f"{'none' if at is None else at} of {number}"


if __name__ == "__main__":
    main()
