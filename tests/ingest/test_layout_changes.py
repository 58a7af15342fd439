"""Layouts that change while a run goes on, on several ranks: against a run that says everything anew in each step."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from sentinel.ingest.follow import RunFollower
from sentinel.ingest.model_layout import LayoutCache, ModelLayout
from sentinel.ingest.steps import StepAssembler, snapshot_positions
from sentinel.judge.judge import Judge
from sentinel.messages import ChunkInfo, Descriptor, EndStep, TensorInfo
from sentinel.moments import Moments
from sentinel.place import Place
from sentinel.record import NONE_ID, ROW_DTYPE, STATS_DTYPE, Kind
from sentinel.rules.language.loader import load_pack
from sentinel.testing import FakeClock
from sentinel.wire.frame import FrameType, encode_message, row_fields, run_id_of
from sentinel.wire.spool import SpoolWriter, incarnation_folder

NUM_RANKS = 2
KINDS = ("activation", "dgrad", "saturation")
NUM_STEPS = 40
RULES = """
rules:
  - {name: large, detector: Threshold, match: {kind: [param, wgrad, activation, dgrad], statistic: norm}, args: {above: 5.0}}
  - {name: moves, detector: AnomalyTurbulence, match: {kind: [activation, dgrad, saturation], statistic: mean},
     args: {warmup: 5, k: 3.0}}
  - {name: dead, detector: DeadTensor, match: {kind: [activation, dgrad, wgrad]}, args: {zero_steps: 3}}
"""
"""Over the default pack: enough is said to tell one judgement from another."""


class Rank:
    """One rank of a mixture of experts: an expert without a token is not called, and has no row."""

    def __init__(self, run_dir: Path, rank: int, *, is_lavish: bool) -> None:
        """is_lavish: the reference, which describes everything whole before each step."""
        incarnation = rank.to_bytes(4, "big") * 4
        folder = incarnation_folder(run_dir, rank, incarnation)
        self.out = SpoolWriter(folder, incarnation, rank, run_id_of("r"), 0, clock=FakeClock(), file_bytes=60_000)
        self.is_lavish, self.rng = is_lavish, random.Random(rank)
        self.tensors: list[TensorInfo] = []
        self.place = Place(rank=rank, world_size=NUM_RANKS, dp_rank=rank, dp_size=NUM_RANKS)
        self.num_rows = 0
        for number in range(4):
            for kind in ("param", "wgrad"):
                self._entry(f"experts.{number}.fc.weight", kind)

    def _entry(self, name: str, kind: str) -> int:
        for one in self.tensors:
            if (one.name, one.kind) == (name, kind):
                return one.id
        placements = {"dp": "replicate" if kind in ("param", "wgrad") else "shard"}
        self.tensors.append(
            TensorInfo(id=len(self.tensors), name=name, kind=kind, shape=(4, 4), dtype="float32", placements=placements)
        )
        return len(self.tensors) - 1

    def step(self, step: int) -> None:
        """Train one step: other experts each time, now and then read by other modules, or placed anew."""
        rng = self.rng
        chosen = [one for one in range(4) if rng.random() < 0.5]
        held = [one.id for one in self.tensors if one.kind in ("param", "wgrad")]
        held += [self._entry(f"experts.{one}.fc", kind) for one in chosen for kind in KINDS]
        if rng.random() < 0.3:
            at = rng.randrange(len(self.tensors))
            fresh: dict[str, Any] = {"site_pos": step} if rng.random() < 0.5 else {"consumers": (f"experts.{step % 4}.fc",)}
            self.tensors[at] = msgspec.structs.replace(self.tensors[at], **fresh)
        elif rng.random() < 0.2:  # Back to what it was at first.
            self.tensors = [msgspec.structs.replace(one, site_pos=0, consumers=()) for one in self.tensors]
        self.describe()
        self.say(step, {number: self.values(number, step) for number in held})

    def describe(self) -> None:
        """Say what the table holds now."""
        names = tuple(f"experts.{one}.fc" for one in range(4))
        descriptor = Descriptor(
            version="0", place=self.place, chunks=(ChunkInfo(vpp_stage=0, depth=0, segments=("stem",), modules=names),),
            tensors=tuple(self.tensors), row_fields=row_fields(ROW_DTYPE), row_bytes=ROW_DTYPE.itemsize,
        )  # fmt: skip
        if self.is_lavish:
            self.out.append(FrameType.DESCRIPTOR, encode_message(descriptor))
        else:
            self.out.describe(descriptor)

    def values(self, number: int, step: int) -> np.ndarray:
        """Return what a tensor holds in a step."""
        values = np.random.default_rng((number, step)).normal(size=16)
        if step > 24 and "experts.1" in self.tensors[number].name:
            values = values * 0.0 if step % 2 else values * 1e4
        if step == 32 and number == 3:
            values[2] = np.nan
        return values

    def say(self, step: int, held: dict[int, np.ndarray]) -> None:
        """Write the rows of a step, and its end."""
        rows = np.zeros(len(held), ROW_DTYPE)
        rows["bad_call_id"] = NONE_ID
        for row, (number, values) in zip(rows, held.items(), strict=True):
            row["tensor"], row["kind"], row["call_id"] = number, Kind.of(self.tensors[number].kind), number
            stats = Moments.of(values).stats[0]
            for name in STATS_DTYPE.names or ():
                row[name] = stats[name]
        self.num_rows += self.out.append_rows(rows, step=step)
        end = EndStep(step=step, num_rows=len(rows), num_calls=len(rows), scalars={"loss": 1.0 / (step + 1)})
        self.out.append(FrameType.END_STEP, encode_message(end), step=step)


class Daemon:
    """Follows, assembles and judges; may be killed, and goes on from its snapshot."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        rules = run_dir.with_name("rules.yaml")
        rules.write_text(RULES)
        self.pack = load_pack([rules])
        self.found: list[bytes] = []
        self.layouts: list[ModelLayout] = []
        self._begin(None)

    def _begin(self, saved: tuple[bytes, bytes] | None) -> None:
        self.follower, self.judge = RunFollower(self.run_dir), Judge(self.pack)
        self.assembler = StepAssembler("r", late_after_steps=0, late_after_s=0.0)
        if saved is not None:
            self.follower.restore(snapshot_positions(saved[0]))
            self.assembler.restore(saved[0], self.follower.incarnations)
            self.judge.restore(saved[1])

    def listen(self) -> None:
        while records := self.follower.poll():
            self.assembler.take(records, 0.0)
            for view in self.assembler.close(0.0, self.follower.behind):
                judgement = self.judge.judge(view.decision, view)
                self.found += [msgspec.json.encode(one) for one in judgement.anomalies]
                if not any(one is view.layout for one in self.layouts):
                    self.layouts.append(view.layout)

    def kill(self) -> None:
        self._begin((self.assembler.snapshot(), self.judge.snapshot()))


def write_and_follow(run_dir: Path, seed: int, *, is_lavish: bool, kills: bool) -> tuple[Daemon, list[Rank]]:
    rng = random.Random(seed)
    ranks = [Rank(run_dir, rank, is_lavish=is_lavish) for rank in range(NUM_RANKS)]
    for rank in ranks:
        rank.rng.seed(100 * seed + rank.place.rank)
    run_dir.mkdir(exist_ok=True)
    daemon = Daemon(run_dir)
    for step in range(NUM_STEPS):
        order = rng.sample(ranks, NUM_RANKS)
        order[0].step(step)
        if rng.random() < 0.3:
            daemon.listen()  # In the middle of a step: one rank has spoken.
            if kills and rng.random() < 0.5:
                daemon.kill()
        order[1].step(step)
        if rng.random() < 0.4:
            daemon.listen()
    daemon.listen()
    return daemon, ranks


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_verdicts_are_those_of_a_run_that_says_everything_anew(seed: int, tmp_path: Path) -> None:
    lavish, lavish_ranks = write_and_follow(tmp_path / "lavish", seed, is_lavish=True, kills=False)
    thrifty, ranks = write_and_follow(tmp_path / "thrifty", seed, is_lavish=False, kills=False)
    killed, _ = write_and_follow(tmp_path / "killed", seed, is_lavish=False, kills=True)

    assert lavish.found == thrifty.found == killed.found
    assert len(lavish.found) > 25, "there is something to compare"
    num_rows = sum(rank.num_rows for rank in ranks)
    assert num_rows == sum(rank.num_rows for rank in lavish_ranks) > 800
    assert lavish.judge.num_rows_judged == thrifty.judge.num_rows_judged == killed.judge.num_rows_judged == num_rows
    assert 1 < len(thrifty.layouts) <= len(lavish.layouts)
    sizes = [sum(file.stat().st_size for file in (tmp_path / name).rglob("*.spool")) for name in ("lavish", "thrifty")]
    assert sizes[1] < 0.75 * sizes[0]


@pytest.mark.parametrize("seed", range(3))
def test_a_layout_made_after_another_is_the_same_as_one_made_alone(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    cache = LayoutCache()
    descriptors: dict[int, Descriptor] = {}
    for rank in range(3):
        place = Place(rank=rank, world_size=3, dp_rank=rank, dp_size=3)
        descriptors[rank] = Descriptor(
            version="0", place=place, chunks=(ChunkInfo(vpp_stage=0, depth=0, modules=("a", "b"), blocks=("b.0", "b.1")),),
            tensors=(), row_fields=(), row_bytes=1,
        )  # fmt: skip
    num_kept = 0
    former: ModelLayout | None = None
    for turn in range(60):
        rank = rng.randrange(3)
        one = descriptors[rank]
        tensors = list(one.tensors)
        action = rng.random()
        if action < 0.5 or not tensors:
            kind = rng.choice(("param", "wgrad", "activation", "dgrad", "exp_avg"))
            placements = {"dp": rng.choice(("shard", "replicate", "unknown", "partial"))}
            name = rng.choice(("a", "b.0.fc", "b.1.fc", "", ":logits")) + f".{turn % 7}"
            tensors.append(TensorInfo(id=len(tensors), name=name, kind=kind, placements=placements, shape=(2, turn)))
        elif action < 0.9:
            at = rng.randrange(len(tensors))
            fresh = rng.choice(({"site_pos": turn}, {"also": ("a",)}, {"dtype": "bf16"}, {"placements": {"dp": "shard"}}))
            tensors[at] = msgspec.structs.replace(tensors[at], **fresh)
        else:
            one = msgspec.structs.replace(one, name_map={"a": f"x{turn}"})
        descriptors = {**descriptors, rank: msgspec.structs.replace(one, tensors=tuple(tensors))}
        layout, alone = cache.of(turn, lambda now=descriptors: now), ModelLayout(descriptors)  # type: ignore[misc]
        assert layout.tensors == alone.tensors and layout.names == alone.names
        assert layout.shards.replicas == alone.shards.replicas and layout.num_copies == alone.num_copies
        assert layout.added_copies == alone.added_copies and layout.replicated == alone.replicated
        for which in descriptors:
            ids = np.arange(len(descriptors[which].tensors) + 1, dtype=np.uint32)
            np.testing.assert_array_equal(layout.logical_of(which, ids), alone.logical_of(which, ids))
            np.testing.assert_array_equal(layout.copies_of(which, ids), alone.copies_of(which, ids))
        if former is not None:
            num_kept += sum(any(one is known for known in former.tensors) for one in layout.tensors)
        former = layout
    assert num_kept > 200, "most of it is taken from the one before"
    assert cache.of(59, lambda: pytest.fail("known")) is former
    assert former.digest_rows is None or former.tables_of(0)[2] == len(descriptors[0].tensors)
    sent = pickle.loads(pickle.dumps(former))
    assert sent.tensors == former.tensors and not sent._tables, "an address means nothing in another process"


def test_a_tensor_that_is_not_measured_is_no_zero(tmp_path: Path) -> None:
    """An expert not called for thirty steps, one called with no tokens; beside them one whose zeros are measured."""
    rank = Rank(tmp_path / "r", 0, is_lavish=False)
    rank.place = Place()
    (tmp_path / "r").mkdir()
    absent, empty, zeros = ([rank._entry(f"experts.{one}.fc", kind) for kind in KINDS[:2]] for one in range(3))
    daemon = Daemon(tmp_path / "r")
    rng = np.random.default_rng(0)
    for step in range(64):
        rank.describe()
        is_usual = step < 30 or step >= 60
        held = {one: 0.5 * rng.normal(size=16) * is_usual for one in zeros}
        held.update((one, 0.5 * rng.normal(size=16 * is_usual)) for one in empty)
        held.update((one, 0.5 * rng.normal(size=16)) for one in absent if is_usual)
        rank.say(step, held)
    daemon.listen()

    said = [msgspec.json.decode(one) for one in daemon.found]
    late = {(one["rule"], one["kind"], one["tag_name"]) for one in said if one["step"] >= 30 and one["kind"] != "scalar"}
    assert {("dead", "activation", "experts.2.fc"), ("dead", "dgrad", "experts.2.fc")} <= late
    assert {name for rule, _, name in late if rule != "moves"} == {"experts.2.fc"}
    assert daemon.judge.num_rows_judged == rank.num_rows == 4 * 64 + 2 * 34
