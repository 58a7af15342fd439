"""Aggregates: which tensors a glob groups, and that their merged moments are those of the tensors end to end."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
import time
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from sentinel.aggregate import MAX_TABLES, Aggregate, Groups, matches, nearest_names
from sentinel.errors import ConfigError
from sentinel.ingest.merge import ClosedStep
from sentinel.ingest.model_layout import ModelLayout
from sentinel.messages import ChunkInfo, Descriptor, EndStep, TensorInfo
from sentinel.moments import Moments
from sentinel.place import Place
from sentinel.record import NONE_ID, ROW_DTYPE, STATS_DTYPE, Kind
from sentinel.step_view import RankStep


@dataclasses.dataclass(frozen=True)
class Held:
    """What one rank holds of one tensor."""

    name: str
    values: np.ndarray
    kind: str = "wgrad"
    placements: Mapping[str, str] = dataclasses.field(default_factory=dict)
    part: str = ""
    also: tuple[str, ...] = ()


def step_of(
    ranks: Sequence[tuple[Place, Sequence[Held]]],
    *,
    missing: Sequence[int] = (),
    name_maps: Mapping[int, dict[str, str]] | None = None,
) -> ClosedStep:
    """Return one closed step in which each rank tells the moments of what it holds; those missing are known, and silent."""
    descriptors = {}
    parts = []
    for place, held in ranks:
        infos = tuple(
            TensorInfo(
                id=at, name=one.name, kind=one.kind, shape=one.values.shape, placements=dict(one.placements), part=one.part,
                also=one.also, site_pos=at,
            )
            for at, one in enumerate(held)
        )  # fmt: skip
        descriptor = Descriptor(
            version="0", place=place, chunks=(ChunkInfo(vpp_stage=0, depth=place.pp_rank),), tensors=infos, row_fields=(),
            row_bytes=ROW_DTYPE.itemsize, name_map=(name_maps or {}).get(place.rank, {}),
        )  # fmt: skip
        rows = np.zeros(len(held), ROW_DTYPE)
        rows["bad_call_id"] = NONE_ID
        for at, one in enumerate(held):
            rows[at]["tensor"], rows[at]["kind"] = at, Kind.of(one.kind)
            for name in STATS_DTYPE.names or ():
                rows[at][name] = Moments.of(one.values).stats[0][name]
        descriptors[place.rank] = descriptor
        end = EndStep(step=3, num_rows=len(rows), num_calls=len(rows))
        parts.append(RankStep(rank=place.rank, descriptor=descriptor, rows=rows, end_step=end, time=5.0))
    here = [part for part in parts if part.rank not in missing]
    return ClosedStep(run="r", attempt=0, step=3, layout=ModelLayout(descriptors), parts=here)


def merged(view: ClosedStep, *texts: str, kinds: Sequence[str] | None = None) -> dict[tuple[str, str], Moments]:
    groups = Groups(view.tensors, [Aggregate.parse(text) for text in texts], kinds=kinds)
    stats = groups.merge(view.stats)
    return {(group.name, group.kind): Moments(stats[at]) for at, group in enumerate(groups.groups)}


def assert_is(found: Moments, tensors: Sequence[np.ndarray]) -> None:
    whole = np.concatenate([np.empty(0), *(one.ravel() for one in tensors)])
    finite = whole[np.isfinite(whole)]
    centered = finite - math.fsum(finite) / max(len(finite), 1)

    assert found.num_elements()[0] == len(whole)
    assert found.nans()[0] == np.isnan(whole).sum()
    assert found.infs()[0] == np.isinf(whole).sum()
    if len(finite):
        assert found.min()[0] == finite.min()
        assert found.max()[0] == finite.max()
        assert found.mean()[0] == pytest.approx(math.fsum(finite) / len(finite), rel=1e-12, abs=1e-15)
        assert found.norm()[0] == pytest.approx(math.sqrt(math.fsum(finite**2)), rel=1e-12)
    if len(finite) > 1 and centered.any():
        m2, m3, m4 = (math.fsum(centered**power) / len(finite) for power in (2, 3, 4))
        assert found.std()[0] == pytest.approx(math.sqrt(m2), rel=1e-9)
        assert found.skew()[0] == pytest.approx(m3 / m2**1.5, rel=1e-7, abs=1e-9)
        assert found.kurtosis()[0] == pytest.approx(m4 / m2**2, rel=1e-7)


def model(seed: int = 1) -> dict[str, np.ndarray]:
    """Tensors of unequal sizes, means and spreads, one with bad values, one of no element."""
    rng = np.random.default_rng(seed)
    found = {
        f"layers.{i}.{part}.weight": rng.normal(10 * (-1) ** i * i, 0.1 + i, 90 + 13 * i + 7 * at)
        for i in (0, 1, 2, 10, 11)
        for at, part in enumerate(("attn.q", "attn.o", "mlp.fc1", "mlp.fc2"))
    }
    found["layers.1.mlp.fc1.weight"][[3, 50]] = [np.nan, -np.inf]
    found["norm.weight"] = rng.normal(1, 1e-4, 33)
    found["empty.weight"] = np.empty(0)
    return found


def cut(values: np.ndarray, num_parts: int) -> list[np.ndarray]:
    """Return uneven shards, the last of which is empty where there are three and more."""
    rng = np.random.default_rng(len(values))
    borders = sorted(int(border) for border in rng.integers(0, len(values) + 1, num_parts - 1))
    if num_parts > 2:
        borders[-1] = len(values)
    return np.split(values, borders)


def single() -> list[tuple[Place, list[Held]]]:
    return [(Place(), [Held(name, values) for name, values in model().items()])]


def replicas() -> list[tuple[Place, list[Held]]]:
    return [
        (Place(rank=r, world_size=4, dp_rank=r, dp_size=4), [Held(name, values) for name, values in model().items()])
        for r in range(4)
    ]


def shards(axis: str) -> list[tuple[Place, list[Held]]]:
    return [
        (
            Place(**{"rank": r, "world_size": 3, f"{axis}_rank": r, f"{axis}_size": 3}),
            [Held(name, cut(values, 3)[r], placements={axis: "shard"}) for name, values in model().items()],
        )
        for r in range(3)
    ]


def shards_of_replicas() -> list[tuple[Place, list[Held]]]:
    ranks = []
    for r in range(4):
        place = Place(rank=r, world_size=4, tp_rank=r % 2, tp_size=2, dp_rank=r // 2, dp_size=2)
        held = [
            # A norm is on every tensor-parallel rank, the rest is cut.
            Held(name, values if "norm" in name else cut(values, 2)[r % 2],
                 placements={"tp": "replicate" if "norm" in name else "shard"})
            for name, values in model().items()
        ]  # fmt: skip
        ranks.append((place, held))
    return ranks


def flat_parts() -> list[tuple[Place, list[Held]]]:
    """A distributed optimizer: each data-parallel rank holds a range of the flattened tensor, of many tensors nothing."""
    ranks = []
    for r in range(3):
        held = []
        for name, values in model().items():
            begin, end = (len(values) * r // 3, len(values) * (r + 1) // 3) if "mlp" in name else (0, len(values))
            if "mlp" in name or r == len(name) % 3:
                held.append(Held(name, values[begin:end], part=f"{begin}:{end}", placements={"dp": "shard"}))
        ranks.append((Place(rank=r, world_size=3, dp_rank=r, dp_size=3), held))
    return ranks


def pipeline() -> list[tuple[Place, list[Held]]]:
    names = list(model())
    return [
        (
            Place(rank=r, world_size=4, pp_rank=r // 2, pp_size=2, dp_rank=r % 2, dp_size=2),
            [Held(name, model()[name]) for name in (names[:9] if r < 2 else names[9:])],
        )
        for r in range(4)
    ]


LAYOUTS = {
    "single": single,
    "data parallel": replicas,
    "fsdp": lambda: shards("dp"),
    "tensor parallel": lambda: shards("tp"),
    "expert parallel": lambda: shards("ep"),
    "tp x dp": shards_of_replicas,
    "distributed optimizer": flat_parts,
    "pp x dp": pipeline,
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("glob", ["*", "layers.1.*", "layers.*.attn.*", "layers.*.mlp.fc1.weight", "norm.*", "empty.*"])
def test_a_group_is_its_tensors_end_to_end_on_every_layout(layout: str, glob: str) -> None:
    tensors = [values for name, values in model().items() if fnmatch.fnmatchcase(name, glob)]
    assert tensors

    found = merged(step_of(LAYOUTS[layout]()), glob)

    assert list(found) == [(glob, "wgrad")]
    assert_is(found[glob, "wgrad"], tensors)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_global_gradient_norm_is_the_root_of_the_sum_of_squares(layout: str) -> None:
    finite = [values[np.isfinite(values)] for values in model().values()]
    expected = math.sqrt(sum(math.fsum(values**2) for values in finite))

    found = merged(step_of(LAYOUTS[layout]()), "global_grad_norm=*", kinds=["wgrad"])

    assert found["global_grad_norm", "wgrad"].norm()[0] == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("seed", range(20))
def test_any_partition_of_the_tensors_merges_to_the_same(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tensors = [rng.normal(rng.normal(0, 1e3), 10.0 ** rng.integers(-1, 4), rng.integers(0, 60)) for _ in range(12)]
    ranks = int(rng.integers(1, 5))
    held: list[list[Held]] = [[] for _ in range(ranks)]
    for at, values in enumerate(tensors):
        pieces = np.split(values, np.sort(rng.integers(0, len(values) + 1, rng.integers(0, ranks))))
        begin = 0
        for rank, piece in zip(rng.permutation(ranks), pieces, strict=False):
            part = f"{begin}:{begin + len(piece)}"
            held[rank].append(Held(f"t.{at}", piece, part=part, placements={"dp": "shard"}))
            begin += len(piece)
    view = step_of([(Place(rank=r, world_size=ranks, dp_rank=r, dp_size=ranks), held[r]) for r in range(ranks)])

    found = merged(view, "*", "t.{}")

    assert_is(found["*", "wgrad"], tensors)
    for at, values in enumerate(tensors):
        assert_is(found[f"t.{at}", "wgrad"], [values])


@pytest.mark.parametrize("mean_over_std", [0.0, 10.0, 1e4])
def test_a_large_mean_costs_no_digits(mean_over_std: float) -> None:
    rng = np.random.default_rng(5)
    tensors = {f"w.{i}": rng.standard_normal(500) + mean_over_std for i in range(20)}
    view = step_of([(Place(), [Held(name, values) for name, values in tensors.items()])])

    assert_is(merged(view, "w.*")["w.*", "wgrad"], list(tensors.values()))


def test_tied_tensors_are_counted_once_and_found_by_each_of_their_names() -> None:
    rng = np.random.default_rng(6)
    tied, other = rng.normal(2, 1, 50), rng.normal(0, 1, 20)
    view = step_of([(Place(), [Held("embed.weight", tied, also=("head.weight",)), Held("head.bias", other)])])

    found = merged(view, "*", "head.*", "embed.*", "both=embed.*,head.*")

    assert_is(found["*", "wgrad"], [tied, other])
    assert_is(found["head.*", "wgrad"], [tied, other])
    assert_is(found["embed.*", "wgrad"], [tied])
    assert_is(found["both", "wgrad"], [tied, other])


def test_an_embedding_tied_across_stages_is_counted_once() -> None:
    """The first stage and the last hold copies, under two local names of which the map makes one."""
    rng = np.random.default_rng(9)
    tied, first, last = rng.normal(2, 1, 50), rng.normal(0, 1, 20), rng.normal(-3, 1, 30)
    places = [Place(rank=r, world_size=2, pp_rank=r, pp_size=2) for r in range(2)]
    ranks = [
        (places[0], [Held("embed.weight", tied), Held("layers.0.w", first)]),
        (places[1], [Held("layers.1.w", last), Held("head.weight", tied)]),
    ]

    view = step_of(ranks, name_maps={1: {"head.weight": "embed.weight"}})

    assert_is(merged(view, "*")["*", "wgrad"], [tied, first, last])
    assert_is(merged(view, "embed.*")["embed.*", "wgrad"], [tied])
    assert merged(step_of(ranks), "*")["*", "wgrad"].num_elements()[0] == 150, "nobody says that they are tied"


def test_what_each_rank_keeps_for_itself_is_left_out_and_counted() -> None:
    rng = np.random.default_rng(7)
    values = [rng.normal(0, 1, 10) for _ in range(2)]
    whole = rng.normal(5, 1, 30)
    ranks = [
        (
            Place(rank=r, world_size=2, tp_rank=r, tp_size=2),
            [
                Held("a.known", whole, placements={"tp": "replicate"}),
                Held("a.unknown", values[r]),
                Held("a.partial", values[r], placements={"tp": "partial"}),
            ],
        )
        for r in range(2)
    ]
    view = step_of(ranks)

    (group,) = Groups(view.tensors, [Aggregate.parse("a.*")]).groups

    assert (len(group.members), group.num_excluded) == (1, 4)
    assert_is(merged(view, "a.*")["a.*", "wgrad"], [whole])


def test_kinds_are_never_merged_with_one_another() -> None:
    held = [Held("w", np.ones(3), kind="param"), Held("w", np.full(3, 7.0), kind="wgrad")]

    found = merged(step_of([(Place(), held)]), "*")

    assert {key: float(one.mean()[0]) for key, one in found.items()} == {("*", "param"): 1.0, ("*", "wgrad"): 7.0}


def test_a_capture_makes_one_group_for_each_value() -> None:
    names = [f"layers.{i}.experts.{e}.w{n}" for i in (0, 1, 10) for e in (0, 1, 11) for n in (1, 2)] + ["layers.0.router"]
    view = step_of([(Place(), [Held(name, np.full(at + 1, float(at))) for at, name in enumerate(names)])])
    sizes = {name: at + 1 for at, name in enumerate(names)}

    found = merged(view, "layers.*.experts.{}.*", "layer {}=layers.{}.*", "layers.{}.experts.{}.w1")

    assert {name for name, _ in found} == {
        *(f"layers.*.experts.{e}.*" for e in (0, 1, 11)),
        *(f"layer {i}" for i in (0, 1, 10)),
        *(f"layers.{i}.experts.{e}.w1" for i in (0, 1, 10) for e in (0, 1, 11)),
    }
    for group, pattern in {"layers.*.experts.1.*": r"\.experts\.1\.", "layer 1": r"^layers\.1\."}.items():
        expected = sum(size for name, size in sizes.items() if re.search(pattern, name))
        assert found[group, "wgrad"].num_elements()[0] == expected


@pytest.mark.parametrize("num_overlapping", [1, 2, MAX_TABLES, MAX_TABLES + 1, 12])
def test_groups_may_overlap_as_often_as_they_like(num_overlapping: int) -> None:
    rng = np.random.default_rng(10)
    tensors = {f"t.{at}": rng.normal(at, 1 + at, 5 + at) for at in range(num_overlapping + 1)}
    view = step_of([(Place(), [Held(name, values) for name, values in tensors.items()])])

    # Each of them shares t.0 with all the others.
    found = merged(view, *(f"g{at}=t.0,t.{at + 1}" for at in range(num_overlapping)), "t.{}")

    for at in range(num_overlapping):
        assert_is(found[f"g{at}", "wgrad"], [tensors["t.0"], tensors[f"t.{at + 1}"]])
        assert_is(found[f"t.{at}", "wgrad"], [tensors[f"t.{at}"]])


def test_a_tensor_is_whole_while_each_shard_has_a_holder_that_spoke() -> None:
    ranks = shards_of_replicas()

    assert step_of(ranks).is_whole.all()
    assert step_of(ranks, missing=[0]).is_whole.all(), "its replica speaks for it"
    view = step_of(ranks, missing=[0, 2])
    assert {tensor.name for tensor in view.tensors if view.is_whole[tensor.index]} == {"norm.weight"}


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "globs"),
    [
        ("layers.*", "layers.*", ("layers.*",)),
        ("mlp=layers.*.mlp.*", "mlp", ("layers.*.mlp.*",)),
        ("ends = embed.*, head.*", "ends", ("embed.*", "head.*")),
        ("embed.*,head.*", "embed.*,head.*", ("embed.*", "head.*")),
    ],
)
def test_a_name_may_stand_before_the_globs(text: str, name: str, globs: tuple[str, ...]) -> None:
    assert Aggregate.parse(text) == Aggregate(name=name, globs=globs)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "got an empty part"),
        ("a=", "got an empty part"),
        ("a=x,,y", "got an empty part"),
        ("=x", "got an empty part"),
        ("layers.*{}.w", "has no bounds"),
        ("layers.{}*", "has no bounds"),
        ("{}{}", "has no bounds"),
        ("a=x.{},y.*", 'equally many "{}"'),
        ("a{}{}=x.{}", 'as many "{}" as in its globs, 1, got 2'),
        ("a" * 300, "at most 256 characters"),
        (".".join(["{}"] * 5), '4 "{}"'),
    ],
)
def test_what_is_no_aggregate_is_said(text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(what)):
        Aggregate.parse(text)


@pytest.mark.slow
def test_globs_match_as_fnmatch_does() -> None:
    rng = np.random.default_rng(8)
    num_matches = 0
    for _ in range(5000):
        glob = "".join(rng.choice([*"ab.*?1", "[a]", "[!b]", "[a-b1]", "["], rng.integers(1, 8)))
        name = "".join(rng.choice(list("ab.1[!"), rng.integers(0, 8)))
        expected = re.compile(fnmatch.translate(glob)).match(name) is not None
        num_matches += expected

        assert matches(glob, name) == expected, (glob, name)
    assert num_matches > 100


def test_layer_one_is_not_layer_ten() -> None:
    assert matches("layers.1.*", "layers.1.mlp") and matches("layers.10.*", "layers.10.mlp")
    assert not matches("layers.1.*", "layers.10.mlp")
    assert Aggregate.parse("layers.{}.*").groups_of(["layers.10.mlp.3"]) == ("layers.10.*",)


@pytest.mark.parametrize("glob", ["*a" * 80 + "b", "a{}." * 4 + "*" * 60 + "b"])
def test_no_glob_is_slow(glob: str) -> None:
    begun = time.process_time()

    assert not matches(glob, "a" * 2000)
    assert time.process_time() - begun < 0.5


def test_near_misses_are_named_first() -> None:
    names = [f"layers.{i}.{part}" for i in range(40) for part in ("mlp.fc1", "attn.out")] + ["embed.weight"]

    assert nearest_names(["layer.*.mlp.fc1"], names)[0] == "layers.0.mlp.fc1"
    assert nearest_names(["embeddings.weight"], names)[0] == "embed.weight"
    assert nearest_names(["zzz"], names)
    assert nearest_names(["zzz"], []) == []
