"""Verdicts held against planted causes: the fault library x layouts, judged by the daemon's own Judge.

    python benchmarks/attribution.py [--layouts pp2dp2 dp4 fsdp4] [--faults "lr x100"] [--seeds 3] [--write]

A run is healthy for 60 steps, then one fault strikes. The verdict is that of the gravest incident that the fault opened, in
its last revision; `ever` is each verdict that any of its incidents ever had. Two figures. `names the cause itself`: the
verdict is the cause, whatever the layout can show. `right for what can be known`: it is among the verdicts that the layout
can show at best. `shown` are the cases where nothing but the cause is right. A `hardware` that is not right is wrong
whenever it is said, for one step too. `messages` are what a sink that hears warnings gets of a fault; `turns` those among
them that exchange a diagnosis that was told for another, or take it back; `wrong skips` the faults that are no batch and of
which somebody was told to skip one.
"""

from __future__ import annotations

import argparse
import datetime
import re
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from attribution_faults import PLANTS, Plant, ReportedStep
from attribution_held_out import HELD_OUT
from attribution_programs import PROGRAMS

from sentinel.anomaly import Severity
from sentinel.decision import RankFacts, Tick
from sentinel.incident import Incident
from sentinel.ingest.merge import ClosedStep
from sentinel.ingest.model_layout import ModelLayout
from sentinel.judge.judge import Judge
from sentinel.messages import Descriptor, TensorInfo
from sentinel.record import NONE_ID, ROW_DTYPE, Kind
from sentinel.report.alert import RouteConfig, change_of
from sentinel.rules.language.loader import load_pack
from sentinel.step_view import RankStep
from sentinel.testing import SyntheticRun

LAYOUTS = (
    "dp1", "dp2", "dp4", "dp8", "tp2", "pp2", "dp2tp2", "pp2dp2", "pp2tp2", "pp2dp2tp2", "pp4dp3", "fsdp4", "dp4ep2",
)  # fmt: skip
HEALTHY_STEPS = 60
ROOT = Path(__file__).parents[1]


class Rig:
    """One layout: a healthy past, judged once, and what comes after it, judged for each fault."""

    def __init__(self, layout: str, seed: int, dtype: str, healthy: int = HEALTHY_STEPS, *, has_comm: bool = False) -> None:
        sizes = {word: int(size) for word, size in re.findall(r"(pp|fsdp|dp|tp|ep)(\d+)", layout)}
        pp, dp, tp, ep = sizes.get("pp", 1), sizes.get("dp", sizes.get("fsdp", 1)), sizes.get("tp", 1), sizes.get("ep", 1)
        self.run = SyntheticRun(
            Path(tempfile.mkdtemp()) / f"{layout}-{seed}", pp=pp, dp=dp, tp=tp, layers=4, elements=32, seed=seed, ranks=(),
            d_model=32, kinds=("param", "wgrad", "activation", "dgrad"),
        )  # fmt: skip
        self.run.is_sharded, self.run.ep = "fsdp" in sizes, ep  # type: ignore[attr-defined]
        self._descriptors, self._positions, self._probes, self._names = {}, [], [], []
        for rank, one in enumerate(self.run._ranks):
            notified = self.run.descriptor(rank)
            tensors = [_placed(tensor, dtype, sizes) for tensor in notified.tensors]
            of = np.zeros(len(tensors), np.int64)
            of[one.table.rows["tensor"]] = one.table.position
            probes, rows, at = _probes(notified, of, ep, has_comm=has_comm)
            place = notified.place
            if ep > 1:
                place = msgspec.structs.replace(place, ep_size=ep, ep_rank=place.dp_rank % ep)
            self._descriptors[rank] = msgspec.structs.replace(notified, place=place, tensors=(*tensors, *probes))
            self._positions.append(np.concatenate([of, at]))
            self._probes.append(rows)
            self._names.append({tensor.id: tensor.name for tensor in probes})
        self._layout = ModelLayout(self._descriptors)
        self._seed = seed
        self.healthy = healthy
        self._pack = load_pack()
        judge = Judge(self._pack)
        self.num_rows = 0
        self.early: list[Incident] = []
        for step in range(healthy):
            self.early += judge.judge(None, self.view(step, None)).incidents
        self.is_disturbed = bool(judge.open_incidents)
        """An incident of the healthy past is still open: it would take the fault's anomalies."""
        self._snapshot = judge.snapshot()

    def view(self, step: int, plant: Plant | None) -> ClosedStep:
        """Return one step of all ranks, a fault in it."""
        parts = []
        for rank in range(self.run.num_ranks):
            rows, end = self.run.observe(rank, step)
            rows = np.concatenate([rows, self._noisy(self._probes[rank], step)])
            if plant is not None and plant.change is not None:
                said = ReportedStep(
                    self.run,
                    self.run.place(rank),
                    step - self.healthy,
                    rows,
                    end,
                    self._positions[rank][rows["tensor"]],
                    self._names[rank],
                )
                plant.change(said)
                rows, end = said.rows, said.end
            parts.append(RankStep(rank=rank, descriptor=self._descriptors[rank], rows=rows, end_step=end, time=float(step)))
        self.num_rows = sum(len(part.rows) for part in parts)
        return ClosedStep(run=self.run.run, attempt=0, step=step, layout=self._layout, parts=parts)

    def _noisy(self, probes: np.ndarray, step: int) -> np.ndarray:
        """Return the rows of probes, each off by some percent."""
        rows = probes.copy()
        off = np.exp(0.05 * np.random.default_rng((self._seed, step, 99)).standard_normal(len(rows)))
        for name in ("mean", "min", "max"):
            rows[name] *= off
        return rows

    def silence(self, judge: Judge) -> list[Incident]:
        """Return what comes of a rank that is not heard of any more, while the others wait for it."""
        found: list[Incident] = []
        last = self.run.num_ranks - 1
        for seq, now in enumerate(range(10, 400, 10)):
            ranks = tuple(
                RankFacts(
                    rank=rank,
                    incarnation=bytes([rank] * 16),
                    pp_stage=self.run.place(rank).pp_rank,
                    received_at=0.0 if rank == last else float(now),
                    moved_at=0.0,
                    step=self.healthy,
                    call_id=40,
                    num_calls=90,
                    is_waiting=-1 if rank == last else 1,
                )
                for rank in range(self.run.num_ranks)
            )
            tick = Tick(seq=seq, run=self.run.run, attempt=0, step=self.healthy - 1, now=float(now), ranks=ranks)
            found += judge.judge_tick(tick).incidents
        return found

    def revisions(self, plant: Plant) -> list[Incident]:
        """Return all revisions of the incidents that a fault opened."""
        judge = Judge(self._pack)
        judge.restore(self._snapshot)
        if plant.is_frozen:
            return self.silence(judge)
        self.run.faults[:] = plant.faults(self.run, self.healthy) if plant.faults is not None else []
        self.run._values._poisoned_from = None
        found: list[Incident] = []
        for step in range(self.healthy, self.healthy + plant.steps):
            found += judge.judge(None, self.view(step, plant)).incidents
            self.run._values.settle(step)
        self.run.faults[:] = []
        self.run._values._poisoned_from = None
        return [one for one in found if one.opened_step >= self.healthy]


def quiet_rig(layout: str, seed: int, plant: Plant) -> Rig:
    """Return a layout whose healthy past has left no incident open: under another seed where it has, of four."""
    rig = Rig(layout, seed, plant.dtype, plant.healthy, has_comm=plant.has_comm)
    for other in range(seed + 100, seed + 400, 100):
        if not rig.is_disturbed:
            break
        print(f"{layout} seed {other - 100}: {[one.title for one in rig.early[-1:]]} before any fault")
        rig = Rig(layout, other, plant.dtype, plant.healthy, has_comm=plant.has_comm)
    return rig


def _placed(tensor: TensorInfo, dtype: str, sizes: dict[str, int]) -> TensorInfo:
    """Return a tensor as the layout holds it."""
    placements = dict(tensor.placements)
    if tensor.kind in ("param", "wgrad"):
        if "fsdp" in sizes:
            placements["dp"] = "shard"
        if "ep" in sizes and ".mlp." in tensor.name:
            placements["ep"] = "shard"
    return msgspec.structs.replace(tensor, dtype=dtype, placements=placements)


def _probes(
    notified: Descriptor, positions: np.ndarray, ep: int, *, has_comm: bool = False
) -> tuple[list[TensorInfo], np.ndarray, np.ndarray]:
    """Return tensors, rows and positions of what probes say of a rank's modules."""
    tensors, values, at = [], [], []
    last = max((one.id for one in notified.tensors if one.kind == "wgrad"), default=-1)
    for one in notified.tensors:
        found: list[tuple[str, str, float]] = []
        if has_comm and one.id == last:
            found = [("comm", f"all_reduce@train.py:41:{way}", 1e-3) for way in ("in", "out")]
        elif one.kind == "param":
            found = [("update_ratio", f"{one.name}:adamw", 1e-3)]
        elif one.kind == "activation" and one.name.endswith(".attn"):
            found = [("attention", f"{one.name}:max_logit", 6.0), ("attention", f"{one.name}:entropy", 2.0)]
        elif one.kind == "activation" and one.name.endswith(".mlp") and ep > 1:
            found = [("router", f"{one.name}:balance", 0.05), ("router", f"{one.name}:inactive", 0.0)]
        for kind, name, value in found:
            tensors.append(
                TensorInfo(
                    id=len(notified.tensors) + len(tensors),
                    name=name,
                    kind=kind,
                    shape=(1,),
                    dtype="float32",
                    chunk=one.chunk,
                    site_pos=one.site_pos,
                    placements={"dp": "replicate" if kind == "update_ratio" else "shard", "tp": "replicate"},
                )
            )
            values.append(value)
            at.append(positions[one.id])
    rows = np.zeros(len(tensors), ROW_DTYPE)
    rows["tensor"], rows["kind"] = [one.id for one in tensors], [Kind.of(one.kind) for one in tensors]
    rows["micro_step"], rows["bad_micro_step"], rows["max_micro_step"] = -1, -1, -1
    rows["num_folded"], rows["bad_call_id"], rows["count"] = 1, NONE_ID, 1
    rows["site_pos"] = [one.site_pos for one in tensors]
    rows["call_id"] = rows["max_call_id"] = 100_000 + np.arange(len(tensors))
    for name in ("mean", "min", "max"):
        rows[name] = values
    return tensors, rows, np.array(at, np.int64)


def gravest(revisions: list[Incident]) -> Incident | None:
    """Return the newest revision of the incident that is the gravest, the oldest of several."""
    newest = {one.id: one for one in revisions}
    own = [one for one in newest.values() if one.state != "merged"]
    return min(own, key=lambda one: (-one.severity.level, one.opened_step, one.id), default=None)


def notified(revisions: list[Incident]) -> list[tuple[str, Incident, Incident | None]]:
    """Return what a sink that hears warnings would get: (change, revision, the one before)."""
    newest: dict[str, Incident] = {}
    found = []
    for one in revisions:
        before = newest.get(one.id)
        change = change_of(before, one, RouteConfig())
        if change is not None:
            found.append((change, one, before))
        newest[one.id] = one
    return found


class Result(NamedTuple):
    """What was said of one planted fault."""

    layout: str
    plant: Plant
    suspected: str
    """Of the gravest incident in the end; `nothing`: none was opened."""
    ever: set[str]
    right: set[str]
    """Verdicts that the layout can show at best."""
    num_messages: int = 0
    num_turns: int = 0
    is_skip_wrong: bool = False

    @property
    def cause(self) -> str:
        """The verdict that names it."""
        return "nothing" if self.plant.is_silent else self.plant.cause

    @property
    def is_shown(self) -> bool:
        """Nothing but the cause is right."""
        return self.right == {self.cause}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="*", default=LAYOUTS)
    parser.add_argument("--faults", nargs="*", help="names, or parts of them; default: all")
    parser.add_argument("--library", choices=["first", "held-out", "programs", "all"], default="all")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="evidence of every verdict")
    parser.add_argument("--unnamed", action="store_true", help="evidence of every verdict that is not the cause")
    parser.add_argument("--write", action="store_true", help="write the dated result")
    options = parser.parse_args()
    libraries = {"first": PLANTS, "held-out": HELD_OUT, "programs": PROGRAMS, "all": [*PLANTS, *HELD_OUT, *PROGRAMS]}
    library = libraries[options.library]
    plants = [one for one in library if not options.faults or any(word in one.name for word in options.faults)]
    results: list[Result] = []
    began = time.process_time()
    for layout in options.layouts:
        for seed in range(options.seeds):
            rigs: dict[tuple[str, int, bool], Rig] = {}
            for plant in plants:
                key = plant.dtype, plant.healthy, plant.has_comm
                if key not in rigs:
                    rigs[key] = quiet_rig(layout, seed, plant)
                rig = rigs[key]
                if not plant.needs(rig.run):
                    continue
                revisions = rig.revisions(plant)
                one = gravest(revisions)
                if plant.is_silent and one is not None and one.severity is Severity.INFO:
                    one = None
                ever = {revision.suspected for revision in revisions}
                messages = notified(revisions)
                turns = [now for _, now, before in messages if before and before.suspected not in ("unknown", now.suspected)]
                found = Result(
                    layout,
                    plant,
                    one.suspected if one is not None else "nothing",
                    ever,
                    plant.right(rig.run),
                    len(messages),
                    len(turns),
                    plant.cause != "batch" and any(now.skip_steps for _, now, _ in messages),
                )
                results.append(found)
                is_wrong = found.suspected not in found.right or "hardware" in ever - found.right
                if options.verbose or is_wrong or (options.unnamed and found.suspected != found.cause):
                    right = " ".join(sorted(found.right))
                    print(f"{layout} seed {seed}: {plant.name}: {found.suspected} (right: {right}; ever {sorted(ever)})")
                    for line in one.evidence if one is not None else ():
                        print(f"      {line}")
    lines = report(results, time.process_time() - began)
    print("\n".join(lines))
    if options.write:
        name = f"{datetime.date.today()}-attribution.txt"
        (ROOT / "benchmarks" / "results" / name).write_text("\n".join(lines) + "\n")


WORDS = ("batch", "model", "precision", "hardware", "program", "unknown", "nothing")


def report(results: list[Result], seconds: float) -> list[str]:
    """Return the tables."""
    of_library = {plant.name: "faults added later" for plant in HELD_OUT}
    of_library.update((plant.name, "programs, aftermaths, recurrences, young runs") for plant in PROGRAMS)
    lines = [*headline("all", results)]
    for name in ("the first library", *dict.fromkeys(of_library.values())):
        own = [one for one in results if of_library.get(one.plant.name, "the first library") == name]
        lines += headline(name, own) if 0 < len(own) < len(results) else []
    lines += [f"{seconds:.0f} s of processor time", "", "fault x verdict, all layouts and seeds", ""]
    words = "".join(f"{word:>10}" for word in WORDS)
    lines.append(f"{'cause':10} {'fault':50}{words}   right   messages  turns  wrong skips")
    for name in dict.fromkeys(one.plant.name for one in results):
        own = [one for one in results if one.plant.name == name]
        count = Counter(one.suspected for one in own)
        good = sum(one.suspected in one.right for one in own)
        cells = "".join(f"{count[word] or '.':>10}" for word in WORDS)
        said = f"{sum(one.num_messages for one in own) / len(own):>8.1f}{sum(one.num_turns for one in own):>7}"
        lines.append(
            f"{own[0].plant.cause:10} {name:50}{cells}   {f'{good}/{len(own)}':7}{said}"
            f"{sum(one.is_skip_wrong for one in own):>13}"
        )
    lines += [
        "",
        "cause x verdict, by layout: `names` the cause itself, of all and of what is shown; `right` for what can be known",
    ]
    for layout in ("", *dict.fromkeys(one.layout for one in results)):
        own = [one for one in results if layout in ("", one.layout)]
        shown = [one for one in own if one.is_shown]
        lines += [
            "",
            f"{layout or 'all':10}" + "".join(f"{word:>10}" for word in WORDS)
            + f"   names {_share(own)}, where shown {_share(shown)}, right {_share(own, known=True)}",
        ]  # fmt: skip
        for cause in ("batch", "model", "precision", "hardware", "program", "none"):
            count = Counter(one.suspected for one in own if one.plant.cause == cause)
            lines.append(f"{cause:10}" + "".join(f"{count[word] or '.':>10}" for word in WORDS))
    return lines


def headline(name: str, results: list[Result]) -> list[str]:
    """Return both figures, and the wrong `hardware` verdicts."""
    shown = [one for one in results if one.is_shown]
    wrong = [f"{one.layout}: {one.plant.name}" for one in results if "hardware" in one.ever - one.right]
    return [
        f"{name}: names the cause itself {_share(results)}; where the layout can show it {_share(shown)}; "
        f"right for what can be known {_share(results, known=True)}",
        f"{name}: wrong hardware verdicts, at any step: {len(wrong)} {wrong[:6] if wrong else ''}".rstrip(),
        f"{name}: {sum(one.num_messages for one in results) / max(len(results), 1):.2f} messages a fault, of which "
        f"{sum(one.num_turns for one in results)} took a diagnosis back; told to skip a batch where it was none: "
        f"{sum(one.is_skip_wrong for one in results)}",
    ]


def _share(results: list[Result], *, known: bool = False) -> str:
    good = sum(one.suspected in one.right if known else one.suspected == one.cause for one in results)
    return f"{good} of {len(results)} ({good / max(len(results), 1):.1%})"


if __name__ == "__main__":
    main()
