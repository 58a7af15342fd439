"""How an incident spread: over stages, ranks and phases, step by step; ranks that fared alike are one row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from sentinel.anomaly import Anomaly, is_liveness, is_nonfinite
from sentinel.anomaly_words import place_words
from sentinel.kinds import Phase
from sentinel.order.causal import sort_key
from sentinel.order.phase import phase_of

MAX_STEPS = 4
"""Most steps that a cascade shows, which fit side by side: the first, those right behind it, and the first recurrences."""

MAX_ROWS = 16
"""Rows past which stages that fared alike are one row, and micro-steps are left out: what a screen shows at once."""

MANY = 8
"""Ranks past which those that fared alike are many, and come last of their stage. Smaller: small groups are taken for the
crowd; larger: the few that differ come behind it."""

SCALARS = -1
"""Depth of the row of what belongs to no stage: logged scalars."""

PHASE_WORDS = {
    Phase.PARAM: "weights",
    Phase.FORWARD: "forward",
    Phase.LOSS: "loss",
    Phase.METRIC: "metrics",
    Phase.BACKWARD: "backward",
    Phase.WGRAD_UNREDUCED: "own grads",
    Phase.WGRAD: "gradients",
    Phase.SCHEDULE: "schedule",
    Phase.NORM: "norm",
    Phase.OPTIMIZER: "optimizer",
    Phase.COMM: "comm",
    Phase.FREE: "other",
}


class Column(msgspec.Struct, frozen=True):
    """One phase of one step."""

    step: int
    phase: str


class Cell(msgspec.Struct, frozen=True):
    """What a row shows in a column."""

    mark: str
    """`cause` (a first cause is among them), `nonfinite` or `finite`."""
    num: int
    """Anomalies, of the rank that has most."""
    micro_steps: tuple[int, ...] = ()
    """Those known."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that fared alike in the chunks of some depths."""

    depths: tuple[int, ...]
    """Places of the chunks in the whole model; (SCALARS,) for what belongs to none."""
    chunks: tuple[tuple[int, int], ...] = ()
    """(pp_stage, vpp_stage) of each."""
    ranks: tuple[int, ...] = ()
    cells: tuple[Cell | None, ...]
    """One for each column; None: nothing was seen."""


class Wave(msgspec.Struct, frozen=True, kw_only=True):
    """One leg of the way that a fault took."""

    step: int
    how: str
    """`born`; in the same step `weights`, `up`, `loss`, `down`, `reduced`, `normed`, `written`, `other`; in the next one
    `read` (non-finite weights) or `next`; later `again`."""
    depths: tuple[int, ...] = ()
    """In the order in which they were reached."""
    ranks: tuple[int, ...] = ()
    """Ranks reached now that were not before."""
    num_anomalies: int
    first: str
    """Id of its first anomaly."""
    what: str
    """The same in words."""


class Cascade(msgspec.Struct, frozen=True, kw_only=True):
    """An incident drawn over stages, ranks and steps."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    """Last stage first: forward runs up the page, backward down."""
    waves: tuple[Wave, ...]
    num_ranks: int
    """Ranks that any of its anomalies names, as its own or as those of its tensor."""
    again: tuple[int, ...] = ()
    """Later steps in which what came first was seen again."""
    hidden_steps: tuple[int, ...] = ()
    """Steps with anomalies that no column shows."""


def cascade_of(members: Sequence[Anomaly], causes: Sequence[Anomaly]) -> Cascade | None:
    """Return how an incident's anomalies spread from its first causes; None where nothing is about a step's arithmetic."""
    members = sorted((one for one in members if not is_liveness(one) and not _is_free(one)), key=sort_key)
    if not members:
        return None
    root = next((one for one in causes if one.id in {m.id for m in members}), members[0])
    members = [one for one in members if (one.attempt, one.step) >= (root.attempt, root.step)]
    ids = {one.id for one in causes} | {root.id}
    steps = sorted({one.step for one in members})
    shown = steps[:MAX_STEPS]
    columns = sorted({(one.step, phase_of(one.kind, one.tag_name)) for one in members if one.step in set(shown)})
    at = {key: place for place, key in enumerate(columns)}
    grid: dict[tuple[int, int | None], dict[int, list[Anomaly]]] = defaultdict(lambda: defaultdict(list))
    holders: dict[int, set[int]] = defaultdict(set)
    chunks: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for one in members:
        depth = _depth(one)
        if depth != SCALARS:
            holders[depth].update(_own_ranks(one), one.group_mates)
            chunks[depth].add((one.pp_stage, one.vpp_stage))
        column = at.get((one.step, phase_of(one.kind, one.tag_name)))
        if column is not None:
            for rank in _own_ranks(one) if depth != SCALARS else (None,):
                grid[depth, rank][column].append(one)
    rows = _rows(grid, holders, chunks, ids, len(columns), with_micro_steps=True)
    if len(rows) > MAX_ROWS:
        rows = _alike(_rows(grid, holders, chunks, ids, len(columns), with_micro_steps=False))
    again = _again(members, root)
    return Cascade(
        columns=tuple(Column(step, PHASE_WORDS[phase]) for step, phase in columns),
        rows=tuple(rows),
        waves=tuple(_waves(members, root, ids, again)),
        num_ranks=len(set().union(*holders.values())) if holders else 0,
        again=tuple(again),
        hidden_steps=tuple(steps[MAX_STEPS:]),
    )


def _is_free(anomaly: Anomaly) -> bool:
    return phase_of(anomaly.kind, anomaly.tag_name) is Phase.FREE


def _depth(anomaly: Anomaly) -> int:
    return SCALARS if anomaly.kind in ("scalar", "comm") or anomaly.num_members else anomaly.depth


def _own_ranks(anomaly: Anomaly) -> tuple[int, ...]:
    return (anomaly.ranks or anomaly.group_mates) if anomaly.rank is None else (anomaly.rank,)


def _ranks(leg: Iterable[Anomaly]) -> set[int]:
    """Return the ranks whose tensors show it: who logs a scalar is of no account."""
    return {rank for one in leg if _depth(one) != SCALARS for rank in _own_ranks(one)}


def _cell(found: Sequence[Anomaly], causes: set[str], with_micro_steps: bool) -> Cell | None:
    if not found:
        return None
    mark = "cause" if any(one.id in causes for one in found) else "finite"
    if mark == "finite" and any(is_nonfinite(one) for one in found):
        mark = "nonfinite"
    micro_steps = sorted({one.micro_step for one in found if one.micro_step is not None}) if with_micro_steps else ()
    return Cell(mark, len(found), tuple(micro_steps))


def _rows(
    grid: dict[tuple[int, int | None], dict[int, list[Anomaly]]],
    holders: dict[int, set[int]],
    chunks: dict[int, set[tuple[int, int]]],
    causes: set[str],
    width: int,
    *,
    with_micro_steps: bool,
) -> list[Row]:
    """Return the rows, ranks of one depth that show the same as one; the number of anomalies is no difference."""
    rows = []
    for depth in sorted(holders, reverse=True):
        alike: dict[tuple[object, ...], list[int]] = {}
        cells: dict[int, tuple[Cell | None, ...]] = {}
        for rank in sorted(holders[depth]):
            found = grid.get((depth, rank), {})
            cells[rank] = tuple(_cell(found.get(at, ()), causes, with_micro_steps) for at in range(width))
            key = tuple(None if one is None else (one.mark, one.micro_steps) for one in cells[rank])
            alike.setdefault(key, []).append(rank)
        most = max(map(len, alike.values()))
        # Few are named before the many that are like each other.
        for ranks in sorted(alike.values(), key=lambda one: (len(one) == most > MANY, one[0])):
            rows.append(
                Row(
                    depths=(depth,),
                    chunks=tuple(sorted(chunks[depth])),
                    ranks=tuple(ranks),
                    cells=_most([cells[rank] for rank in ranks]),
                )
            )
    found = grid.get((SCALARS, None), {})
    if found:
        cells_of = tuple(_cell(found.get(at, ()), causes, False) for at in range(width))
        rows.append(Row(depths=(SCALARS,), cells=cells_of))
    return rows


def _most(alike: Sequence[tuple[Cell | None, ...]]) -> tuple[Cell | None, ...]:
    return tuple(max(cells, key=lambda cell: cell.num if cell else 0) for cells in zip(*alike, strict=True))


def _pattern(rows: Sequence[Row]) -> tuple[object, ...]:
    return tuple(tuple(None if cell is None else cell.mark for cell in row.cells) for row in rows)


def _alike(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with neighbouring depths of the same rows as one."""
    by_depth: dict[int, list[Row]] = {}
    for row in rows:
        by_depth.setdefault(row.depths[0], []).append(row)
    groups: list[list[list[Row]]] = []
    for of_depth in by_depth.values():
        if groups and _pattern(groups[-1][-1]) == _pattern(of_depth):
            groups[-1].append(of_depth)
        else:
            groups.append([of_depth])
    found = []
    for group in groups:
        for same in zip(*group, strict=True):
            found.append(
                Row(
                    depths=tuple(depth for row in same for depth in row.depths),
                    chunks=tuple(dict.fromkeys(chunk for row in same for chunk in row.chunks)),
                    ranks=tuple(sorted({rank for row in same for rank in row.ranks})),
                    cells=_most([row.cells for row in same]),
                )
            )
    return found


def _again(members: Sequence[Anomaly], root: Anomaly) -> list[int]:
    """Return later steps that show the root's own series, or its segment, when the step before did not."""
    mine = {
        one.step
        for one in members
        if (one.kind, one.tag_name) == (root.kind, root.tag_name) or (root.segment and one.segment == root.segment)
    }
    return sorted(step for step in mine if step > root.step + 1 and step - 1 not in mine)


_LEGS = (
    ("weights", (Phase.PARAM,)),
    ("up", (Phase.FORWARD,)),
    ("loss", (Phase.LOSS, Phase.METRIC)),
    ("down", (Phase.BACKWARD, Phase.WGRAD_UNREDUCED)),
    ("reduced", (Phase.WGRAD,)),
    ("normed", (Phase.NORM,)),
    ("written", (Phase.OPTIMIZER,)),
    ("other", (Phase.SCHEDULE, Phase.COMM)),
)


def _waves(members: Sequence[Anomaly], root: Anomaly, causes: set[str], again: Sequence[int]) -> Iterable[Wave]:
    first = [one for one in members if one.step == root.step and one.attempt == root.attempt]
    born = [one for one in first if one.id in causes]
    reached = _ranks(born)
    yield _wave("born", born, set())
    rest = [one for one in first if one.id not in causes]
    for how, phases in _LEGS:
        leg = [one for one in rest if phase_of(one.kind, one.tag_name) in phases]
        if leg:
            yield _wave(how, leg, reached)
            reached |= _ranks(leg)
    following = [one for one in members if (one.attempt, one.step) == (root.attempt, root.step + 1)]
    if following:
        is_read = is_nonfinite(root) and any(
            is_nonfinite(one) and phase_of(one.kind, one.tag_name) is Phase.PARAM for one in following
        )
        yield _wave("read" if is_read else "next", following, reached)
        reached |= _ranks(following)
    for step in again[:MAX_STEPS]:
        yield _wave("again", [one for one in members if one.step == step], reached)


def _wave(how: str, leg: Sequence[Anomaly], reached: set[int]) -> Wave:
    return Wave(
        step=leg[0].step,
        how=how,
        depths=tuple(dict.fromkeys(_depth(one) for one in leg if _depth(one) != SCALARS)),
        ranks=tuple(sorted(_ranks(leg) - reached)),
        num_anomalies=len(leg),
        first=leg[0].id,
        what=place_words(leg[0]),
    )
