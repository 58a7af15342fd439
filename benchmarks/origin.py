"""Is the true origin what `sentinel topk` names first? Random plants, judged and read back as a user would.

Synthetic runs (`sentinel.testing`) write real spools: module x phase x rank x micro-batch x schedule x layout, NaN and
finite blow-ups, global clipping, ranks that come late, sites numbered in no order, module monitoring on and off. The real
assembler and Judge with the default pack make anomaly files of them, and `topk -s STEP` reads those.

    python benchmarks/origin.py [--num 500] [--seed 0] [--write]     prints a table, and every plant that is not found
    python benchmarks/origin.py --num 20                             the small mode that a test runs
    python benchmarks/origin.py --real 40                            plants in examples/gpt over gloo, as origin_sweep.py
    python benchmarks/origin.py --real-finite 24             blow-ups there

What counts. NaN: the first line of topk names module, rank and micro-batch; where monitoring is off the segment instead of
the module (that is the black box's promise); a fault of a parameter's gradient alone the parameter, without rank where it
was reduced; where tensor-parallel ranks sum their parts before anything can be seen, the planted rank among those named.
Finite: the module (off: the segment) is among the first three lines, whose ranks are merged. A blow-up is a factor of 10
to 1000 in the norm of the first tensor that is measured; what of it is left behind that, in the gradients and in the loss,
is drawn too.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sentinel.decision import Tick
from sentinel.explain.topk import topk
from sentinel.ingest.follow import RunFollower
from sentinel.ingest.incarnation import SpoolRecord
from sentinel.ingest.merge import ClosedStep
from sentinel.ingest.steps import StepAssembler
from sentinel.judge.judge import Judge
from sentinel.order.causes import leading_causes
from sentinel.order.origin import Origin, origin
from sentinel.report.files import AppendLog, anomaly_line, json_line
from sentinel.rules.language.loader import load_pack
from sentinel.testing import BlowUp, Nan, SyntheticRun

ROOT = Path(__file__).parents[1]
WARM_UP, APART = 40, 6
"""Healthy steps before the first plant of a run, and steps from one to the next."""
FINITE_KINDS = ("activation", "activation", "dgrad_in", "wgrad", "param")


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a run's ranks are laid out."""

    name: str
    pp: int = 1
    dp: int = 1
    tp: int = 1
    schedule: str = ""
    vpp: int = 1


LAYOUTS = (
    Layout("one rank"),
    Layout("dp4", dp=4),
    Layout("tp2 dp2", tp=2, dp=2),
    Layout("1f1b pp2 dp2", 2, 2, 1, "1f1b"),
    Layout("1f1b pp4 tp2", 4, 1, 2, "1f1b"),
    Layout("gpipe pp2 dp2 tp2", 2, 2, 2, "gpipe"),
    Layout("interleaved pp2 dp2", 2, 2, 1, "interleaved1f1b", 2),
    Layout("interleaved pp2 tp2", 2, 1, 2, "interleaved1f1b", 2),
    Layout("loopedbfs pp2 dp2", 2, 2, 1, "loopedbfs", 2),
    Layout("zero bubble pp2 dp2", 2, 2, 1, "interleavedzerobubble", 2),
    Layout("zbv pp2 dp2", 2, 2, 1, "zbv", 2),
    Layout("dualpipev pp2 dp2 tp2", 2, 2, 2, "dualpipev", 2),
)


@dataclasses.dataclass(frozen=True)
class Plant:
    """One planted fault, and what was done to its step."""

    layout: str
    is_monitored: bool
    step: int
    fault: Nan | BlowUp
    rank: int
    late: tuple[int, ...] = ()
    """Ranks whose rows came when the next step was written already."""
    absent: tuple[int, ...] = ()
    """Ranks whose rows came only when the step was closed without them."""

    @property
    def is_nan(self) -> bool:
        """Whether it is non-finite."""
        return isinstance(self.fault, Nan)

    def describe(self) -> dict[str, object]:
        """Return it for the list of those not found."""
        notified = {"layout": self.layout, "monitoring": "on" if self.is_monitored else "off", "late": self.late}
        return {**notified, "absent": self.absent, **dataclasses.asdict(self.fault), "rank": self.rank}


class World:
    """One synthetic run and the plants in it."""

    def __init__(self, directory: Path, layout: Layout, *, is_monitored: bool, rng: random.Random) -> None:
        self.layout, self.is_monitored, self.rng = layout, is_monitored, rng
        kinds = ("param", "wgrad", "exp_avg", "update", *(("activation", "dgrad") if is_monitored else ()))
        self.run = SyntheticRun(
            directory, pp=layout.pp, dp=layout.dp, tp=layout.tp, schedule=layout.schedule, vpp=layout.vpp,
            layers=4 if layout.pp * layout.vpp <= 4 else layout.pp * layout.vpp, micro_steps=4, kinds=kinds, elements=32,
            per_micro_step=rng.random() < 0.3, shuffle=rng.random() < 0.7, seed=rng.randrange(1 << 30),
        )  # fmt: skip
        self.plants: list[Plant] = []
        self._follower = RunFollower(directory)
        self._assembler = StepAssembler(self.run.run)
        pack = load_pack([])
        # Each plant is an episode of its own, however soon it follows another.
        rules = tuple(msgspec.structs.replace(rule, episode_quiet_steps=0) for rule in pack.rules)
        self._judge = Judge(msgspec.structs.replace(pack, rules=rules))
        self._anomalies, self._incidents = AppendLog(directory / "anomalies"), AppendLog(directory / "incidents.jsonl")
        self._held: dict[int, int] = {}
        self.num_steps = self.num_rows = 0

    def fault(self, is_nan: bool, *, is_skipped: bool = True) -> tuple[Nan | BlowUp, int]:
        """Return a random fault of the next step, and the rank it is born on."""
        rng, run = self.rng, self.run
        module = rng.choice(run.modules())
        holders = [rank for rank in range(run.num_ranks) if module in self._modules(rank)]
        rank, micro_step = rng.choice(holders), rng.randrange(run.micro_steps)
        # Blocks have no weight of their own, what is input has none either.
        phases = ["forward", "backward", "wgrad"] if not module.rpartition(".")[2].isdigit() else ["forward", "backward"]
        if is_nan:
            value = rng.choice(("nan", "inf", "-inf"))
            nan = Nan(
                step=run.step, module=module, rank=rank, micro_step=micro_step, phase=rng.choice(phases), value=value,
                is_skipped=is_skipped,
            )  # fmt: skip
            return nan, rank
        kind = rng.choice(FINITE_KINDS if len(phases) == 3 else FINITE_KINDS[:3])
        if kind == "dgrad_in" and module == "embed":
            kind = "wgrad"  # Nothing lies before it but its own weight.
        one_rank, one_micro_step = rng.random() < 0.5, rng.random() < 0.5
        part = (1 / self.layout.dp if one_rank else 1.0) * (1 / run.micro_steps if one_micro_step else 1.0)
        spread, in_gradients = rng.choice((0.0, 0.3, 1.0)), rng.choice((0.0, 0.3, 1.0))
        if not self.is_monitored:
            # Borders see what the module's neighbours hand on: a blow-up that leaves nothing there is nobody's to find.
            spread = max(spread, 0.5)
            in_gradients = min(in_gradients, spread)
        # Of the norm of all replicas and micro-steps, where it is first measured.
        seen = 10.0 ** rng.uniform(1.0, 3.0)
        factor = (seen / part**0.5) ** (1.0 if self.is_monitored else 1.0 / spread)
        blow_up = BlowUp(
            step=run.step, module=module, kind=kind, factor=factor, rank=rank if one_rank else None,
            micro_step=micro_step if one_micro_step else None, spread=spread, in_gradients=in_gradients,
            in_loss=rng.choice((0.0, 0.1)),
        )  # fmt: skip
        return blow_up, rank

    def _modules(self, rank: int) -> set[str]:
        return self.run.modules_of(rank)

    def plant(self, is_nan: bool, *, is_skipped: bool = True) -> None:
        """Have a random fault happen in the next step, write it and what follows."""
        run, rng = self.run, self.rng
        fault, rank = self.fault(is_nan, is_skipped=is_skipped)
        run.plant(fault)
        if isinstance(fault, BlowUp) and fault.kind == "param":
            # What a weight makes of its input grows with it.
            run.plant(dataclasses.replace(fault, kind="activation"))
        late: tuple[int, ...] = ()
        absent: tuple[int, ...] = ()
        others = [one for one in range(run.num_ranks) if run.place(one).dp_rank != run.place(rank).dp_rank]
        if rng.random() < 0.4:
            late = tuple(sorted(rng.sample(range(run.num_ranks), rng.randint(1, run.num_ranks))))
        elif others and rng.random() < 0.2:
            absent = (rng.choice(others),)
        self.plants.append(Plant(self.layout.name, self.is_monitored, run.step, fault, rank, late, absent))
        for one in (*late, *absent):
            run.hold(one)
        self.write(1)
        for one in late:
            run.release(one)
        self.write(4 if absent else 1)
        for one in absent:
            run.release(one)
        self.write(max(1, APART - (5 if absent else 2)))

    def write(self, num_steps: int) -> None:
        """Write steps, and judge what can be closed after each."""
        for _ in range(num_steps):
            self.run.write(1)
            self._take(self._follower.poll())

    def _take(self, records: list[SpoolRecord]) -> None:
        now = self.run.clock.monotonic()
        self._assembler.take(records, now)
        self._judge_all(self._assembler.close(now, self._follower.behind))

    def _judge_all(self, views: Iterator[ClosedStep | Tick]) -> None:
        for view in views:
            if isinstance(view, Tick):
                continue
            judgement = self._judge.judge(view.decision, view)
            self.num_steps += 1
            self.num_rows += view.num_rows
            self._anomalies.append(anomaly_line(one) for one in judgement.anomalies)
            self._incidents.append(json_line(one) for one in judgement.incidents)

    def finish(self) -> None:
        """End the run and judge what is left."""
        self.run.end()
        while records := self._follower.poll(final=True):
            self._take(records)
        self._judge_all(self._assembler.finish(self.run.clock.monotonic()))
        self._anomalies.close()
        self._incidents.close()


@dataclasses.dataclass(frozen=True)
class Found:
    """What topk said of one plant."""

    place: int
    """1-based place of the origin among the lines; 0: it is not among them."""
    num_lines: int
    first: str
    """What the first line names."""


def segment_of(module: str, num_depths: int) -> str:
    """Return the segment of the black box that holds a module."""
    if module == "embed":
        return "stage0.stem" if num_depths > 1 else "stem"
    if module in ("norm", "head"):
        return f"stage{num_depths - 1}.head" if num_depths > 1 else "head"
    return ".".join(module.split(".")[:2])


def look(plant: Plant, directory: Path, layout: Layout) -> Found:
    """Ask topk for the plant's step, and see where its origin comes."""
    entries = [entry.anomaly for entry in topk(directory, 8, steps={plant.step}).entries]
    segment = segment_of(plant.fault.module, layout.pp * layout.vpp)
    place = 0
    for number, anomaly in enumerate(entries, 1):
        born = origin(anomaly, entries)
        module = born.module or born.name
        if plant.is_nan:
            is_named = _names_nan(plant, layout, born, segment)
        else:
            named = {module, *born.candidates, anomaly.tag_name.removesuffix(".weight")}
            is_named = plant.fault.module in named or (not plant.is_monitored and segment == born.segment)
        if is_named:
            place = number
            break
    first = ""
    if entries:
        born = origin(entries[0], entries)
        first = f"{born.kind} of {born.name} (segment {born.segment or '?'}), rank {born.ranks or born.rank}, "
        first += f"micro-step {born.micro_step}; {entries[0].severity.value} {entries[0].rule}"
    return Found(place, len(entries), first)


def _names_nan(plant: Plant, layout: Layout, born: Origin, segment: str) -> bool:
    fault = plant.fault
    assert isinstance(fault, Nan)
    is_of_weight = fault.phase == "wgrad" or (fault.phase == "backward" and fault.module == "embed")
    module = born.module or born.name
    if is_of_weight:
        is_rank = born.rank is None if layout.dp > 1 else plant.rank in (born.rank, *born.ranks)
        return module == fault.module and born.kind == "wgrad" and is_rank
    if plant.rank not in (born.ranks or (born.rank,)):
        return False
    if born.micro_step != fault.micro_step or born.phase != fault.phase:
        return False
    return module == fault.module if plant.is_monitored else born.segment == segment


def worlds(num: int, seed: int, home: Path) -> Iterator[World]:
    """Make and write the runs of `num` plants, half of them NaN; a third of the NaN reach the weights."""
    rng = random.Random(seed)
    num_nan = num // 2
    num_unskipped = num_nan // 3
    kinds = [(layout, monitored) for layout in LAYOUTS for monitored in (True, False)]
    rng.shuffle(kinds)
    number = 0
    for at in range(num_unskipped):
        layout, is_monitored = kinds[at % len(kinds)]
        world = World(home / f"w{number:04d}", layout, is_monitored=is_monitored, rng=rng)
        world.write(2)
        world.plant(True, is_skipped=False)
        number += 1
        world.finish()
        yield world
    plants = [True] * (num_nan - num_unskipped) + [False] * (num - num_nan)
    rng.shuffle(plants)
    each = max(1, -(-len(plants) // len(kinds)))
    for at in range(0, len(plants), each):
        layout, is_monitored = kinds[(at // each) % len(kinds)]
        world = World(home / f"w{number:04d}", layout, is_monitored=is_monitored, rng=rng)
        world.write(WARM_UP)
        for is_nan in plants[at : at + each]:
            world.plant(is_nan)
        number += 1
        world.finish()
        yield world


def measure(num: int, seed: int, home: Path) -> dict[str, object]:
    """Plant `num` faults and return the figures."""
    began = time.perf_counter()
    counts: Counter[tuple[str, ...]] = Counter()
    wrong, strays, num_steps, num_rows = [], 0, 0, 0
    for world in worlds(num, seed, home):
        layout = world.layout
        num_steps, num_rows = num_steps + world.num_steps, num_rows + world.num_rows
        assert world.num_steps == world.run.step, f"{layout.name}: judged {world.num_steps} steps of {world.run.step}"
        for plant in world.plants:
            found = look(plant, world.run.directory, layout)
            nature = "nan" if plant.is_nan else "finite"
            most = 1 if plant.is_nan else 3
            is_right = 0 < found.place <= most
            for key in (("all",), ("layout", layout.name), ("monitoring", "on" if plant.is_monitored else "off")):
                counts[nature, "right" if is_right else "wrong", *key] += 1
            counts[nature, "first", str(found.place)] += 1
            if not is_right:
                wrong.append({"nature": nature, **plant.describe(), "place": found.place, "first": found.first})
        planted = {plant.step for plant in world.plants}
        last = max(planted) if any(isinstance(p.fault, Nan) and not p.fault.is_skipped for p in world.plants) else 1 << 40
        lines = topk(world.run.directory, 1 << 16).entries
        strays += sum(1 for entry in lines if entry.anomaly.step not in planted and entry.anomaly.step < last)

    def share(nature: str, *key: str) -> dict[str, object]:
        right, other = counts[nature, "right", *key], counts[nature, "wrong", *key]
        return {"right": right, "of": right + other, "share": round(right / (right + other), 4) if right + other else None}

    return {
        "num": num,
        "seed": seed,
        "nan_first": share("nan", "all"),
        "finite_in_three": share("finite", "all"),
        "by_layout": {one.name: {n: share(n, "layout", one.name) for n in ("nan", "finite")} for one in LAYOUTS},
        "by_monitoring": {on: {n: share(n, "monitoring", on) for n in ("nan", "finite")} for on in ("on", "off")},
        "places": {n: {str(p): counts[n, "first", str(p)] for p in range(9)} for n in ("nan", "finite")},
        "anomalies_in_steps_without_a_plant": strays,
        "num_steps": num_steps,
        "num_rows": num_rows,
        "wrong": wrong,
        "seconds": round(time.perf_counter() - began, 1),
    }


def real(num: int, seed: int) -> dict[str, object]:
    """Plant `num` NaNs in the example's trainer: real processes over gloo, read by topk; the cells of origin_sweep.py."""
    import origin_sweep as sweep

    rng = random.Random(seed)
    runs = [(layout, monitored) for layout in sweep.LAYOUTS.values() for monitored in (True, False)]
    began, right, wrong = time.perf_counter(), 0, []
    for at, (layout, is_monitored) in enumerate(runs):
        some = rng.sample(sweep.cells(layout, 1), num // len(runs) + (at < num % len(runs)))
        planted = [dataclasses.replace(cell, step=sweep.FIRST_STEP + number) for number, cell in enumerate(some)]
        if not planted:
            continue
        with tempfile.TemporaryDirectory(prefix="origin-real-") as scratch:
            run_dir = sweep.train(layout, planted, Path(scratch), is_monitored=is_monitored, is_sudden=False, extra=[])
            for cell in planted:
                entries = [entry.anomaly for entry in topk(run_dir, 8, steps={cell.step}).entries]
                said = sweep.outcome(layout, cell, entries, is_monitored=is_monitored)
                if not said and entries[0].id != entries[leading_causes(entries)[0]].id:
                    said = f"the first line is another one: {entries[0].kind} of {entries[0].tag_name}"
                right += not said
                if said:
                    on = "on" if is_monitored else "off"
                    wrong.append({"layout": layout.name, "monitoring": on, **dataclasses.asdict(cell), "said": said})
    return {"num": num, "right": right, "wrong": wrong, "seconds": round(time.perf_counter() - began, 1)}


def rejudged(run_dir: Path, pack: Path) -> Path:
    """Judge a recorded run anew, by the rules as they are now; return the directory that holds the anomalies."""
    out = run_dir.parent / "judged"
    shutil.rmtree(out, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "sentinel.cli",
        "replay",
        str(run_dir),
        "--recompute",
        "--rules",
        str(pack),
        "-o",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)})
    if done.returncode > 1:
        raise SystemExit(f"replay ended with exit code {done.returncode}: {done.stderr[-2000:]}")
    return out


def real_finite(num: int, seed: int, only: str = "", keep: Path | None = None) -> dict[str, object]:
    """Plant `num` blow-ups in the example's trainer: a module's work is 30 to 1000 times what it should be, for one step.

    keep: runs lie there and stay; what is there is not trained again, only judged.

    Unseen: no rule saw anything in that step; one micro-batch of one replica is an eighth of it, and what softmax and
    normalisation take away of a factor is not drawn here but real.
    """
    import origin_sweep as sweep

    rng = random.Random(seed)
    layouts = [one for name, one in sweep.LAYOUTS.items() if only in ("", name)]
    runs = [(layout, monitored) for layout in layouts for monitored in (True, False)]
    began, places, wrong = time.perf_counter(), Counter[int](), []
    for at, (layout, is_monitored) in enumerate(runs):
        some = rng.sample(sweep.cells(layout, 1), num // len(runs) + (at < num % len(runs)))
        if not some:
            continue
        planted = [dataclasses.replace(cell, step=WARM_UP + APART * number) for number, cell in enumerate(some)]
        factors = [10.0 ** rng.uniform(1.5, 3.0) for _ in planted]
        with tempfile.TemporaryDirectory(prefix="origin-real-") as scratch:
            folder = keep / f"{layout.name}-{'on' if is_monitored else 'off'}-{num}-{seed}" if keep else Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / "trained").exists():
                sweep.write_pack(folder, is_finite=True)
                run_dir = rejudged(folder / "run", folder / "pack.yaml")
            else:
                shutil.rmtree(folder / "run", ignore_errors=True)
                run_dir = sweep.train(
                    layout, planted, folder, is_monitored=is_monitored, is_sudden=False, extra=[], factors=factors
                )
                (folder / "trained").touch()
            for cell, factor in zip(planted, factors, strict=True):
                entries = [entry.anomaly for entry in topk(run_dir, 8, steps={cell.step}).entries]
                born = [origin(anomaly, entries) for anomaly in entries]
                place = next((n for n, one in enumerate(born, 1) if _names_cell(one, cell, layout, is_monitored)), 0)
                places[place] += 1
                if not 0 < place <= 3:
                    said = [f"{one.kind} of {one.name} ({one.segment or '?'})" for one in born[:3]]
                    on = "on" if is_monitored else "off"
                    notified = {"layout": layout.name, "monitoring": on, **dataclasses.asdict(cell), "factor": factor}
                    wrong.append({**notified, "place": place, "said": said})
    right = sum(places[place] for place in (1, 2, 3))
    unseen = sum(1 for one in wrong if not one["said"])
    figures = {"num": num, "right": right, "unseen": unseen, "places": dict(sorted(places.items())), "wrong": wrong}
    return {**figures, "seconds": round(time.perf_counter() - began, 1)}


def _names_cell(born: Origin, cell: object, layout: object, is_monitored: bool) -> bool:
    module, segment = cell.module, cell.segment(layout)
    if module in (born.module, *born.candidates):
        return True
    return segment == born.segment if not is_monitored else False


def show(figures: dict[str, object]) -> None:
    """Print the figures as a table."""
    print(f"{'':24} {'NaN first':>14} {'finite in three':>16}")

    def line(name: str, row: dict[str, dict[str, object]]) -> None:
        cells = [f"{one['right']}/{one['of']}" if one["of"] else "-" for one in row.values()]
        print(f"{name:24} {cells[0]:>14} {cells[1]:>16}")

    line("all", {"nan": figures["nan_first"], "finite": figures["finite_in_three"]})
    for name, row in {**figures["by_monitoring"], **figures["by_layout"]}.items():
        line(f"monitoring {name}" if name in ("on", "off") else name, row)
    print(f"places of the origin: {figures['places']}")
    print(f"anomalies in steps without a plant: {figures['anomalies_in_steps_without_a_plant']}", end="; ")
    print(f"{figures['num_steps']} steps, {figures['num_rows']} rows judged, {figures['seconds']} s")
    for one in figures["wrong"]:
        print(f"  {one}")


def write(figures: dict[str, object], name: str) -> None:
    """Write the figures into benchmarks/results."""
    notified = {"command": "python benchmarks/origin.py " + " ".join(sys.argv[1:]), "cores": os.cpu_count()}
    path = ROOT / "benchmarks" / "results" / f"{datetime.datetime.now(datetime.UTC).date()}-{name}.json"
    path.write_text(json.dumps({**notified, **figures}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="write the results into benchmarks/results")
    parser.add_argument("--keep", type=Path, help="leave the runs in this folder")
    parser.add_argument("--real", type=int, metavar="NUM", help="plant NUM NaNs in the real trainer instead")
    parser.add_argument("--layout", default="", help="with --real-finite: this layout of origin_sweep.py alone")
    parser.add_argument("--real-finite", type=int, metavar="NUM", help="the same with NUM blow-ups")
    options = parser.parse_args()
    if options.real or options.real_finite:
        figures = (
            real(options.real, options.seed)
            if options.real
            else real_finite(options.real_finite, options.seed, options.layout, options.keep)
        )
        print(json.dumps(figures, indent=1))
        if options.write:
            write(figures, "origin-real" if options.real else "origin-real-finite")
        return 0 if figures["right"] == figures["num"] else 1
    with tempfile.TemporaryDirectory(prefix="origin-") as scratch:
        figures = measure(options.num, options.seed, options.keep or Path(scratch))
    if options.json:
        print(json.dumps(figures, indent=1))
    else:
        show(figures)
    if options.write:
        write(figures, "origin")
    is_good = figures["nan_first"]["share"] >= 0.99 and figures["finite_in_three"]["share"] >= 0.95
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
