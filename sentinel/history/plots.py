"""Pictures of answers, drawn by matplotlib: series with their band, histograms, what was found along the steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sentinel.errors import ConfigError
from sentinel.printable import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_LINES = 20
"""Series that are drawn; more could not be told apart. The title says how many there are."""
MOST_NAMES = 40
"""Tensors with anomalies that have a line of their own; the first ones, in the order of their steps."""
SERIES_KEY = ("run", "name", "kind", "place", "statistic")
COLOURS = {"critical": "tab:red", "warning": "tab:orange", "info": "tab:blue"}


def plot_series(rows: pa.Table, ax: Axes | None) -> Axes:
    """Draw the rows of `OpenedRuns.series`: a line of the mean, a band from least to greatest, marks where not finite."""
    axes = _axes(ax)
    several = [name for name in SERIES_KEY if len(pc.unique(rows.column(name))) > 1]
    num_series = 0
    bad: list[float] = []
    for part in _parts(rows, SERIES_KEY):
        num_series += 1
        if num_series > MOST_LINES:
            continue
        first = {name: part.column(name)[0].as_py() for name in SERIES_KEY}
        steps = (_numbers(part, "step") + _numbers(part, "last_step")) / 2
        label = _text(" ".join(str(first[name]) for name in several if first[name]) or f"{first['kind']} {first['name']}")
        is_one = len(steps) == 1
        (line,) = axes.plot(steps, _numbers(part, "avg"), label=label, linewidth=1.2, marker="o" if is_one else None)
        least, greatest = _numbers(part, "min"), _numbers(part, "max")
        if (greatest > least).any():
            axes.fill_between(steps, least, greatest, alpha=0.25, color=line.get_color(), linewidth=0)
        bad.extend(steps[_numbers(part, "bad_steps") > 0])
    if bad:
        # At the lower edge, whatever the values are: what is not finite has no place among them.
        axes.plot(
            bad, np.full(len(bad), 0.02), "x", color="tab:red", transform=axes.get_xaxis_transform(), label="not finite"
        )
    statistics = pc.unique(rows.column("statistic")).to_pylist()
    axes.set_xlabel("step")
    axes.set_ylabel(_text(statistics[0]) if len(statistics) == 1 else "")
    return _titled(axes, rows, num_series, "series")


def plot_histogram(rows: pa.Table, ax: Axes | None) -> Axes:
    """Draw the rows of `OpenedRuns.histogram`: counts over the bins that hold any, side by side in their order."""
    axes = _axes(ax)
    held = rows.filter(pc.greater(rows.column("count"), 0))
    if not held.num_rows:
        raise ConfigError("plot: expected a histogram that counts something, got none but empty bins")
    low, high = int(pc.min(held.column("bin")).as_py()), int(pc.max(held.column("bin")).as_py())
    edges: dict[int, float] = {}
    num = 0
    for part in _parts(rows, ("run", "attempt", "step", "rank", "kind", "name", "micro_step")):
        num += 1
        bins, counts = _numbers(part, "bin").astype(np.int64), _numbers(part, "count")
        edges.update(zip(bins.tolist(), _numbers(part, "low").tolist(), strict=True))
        edges[int(bins[-1]) + 1] = float(_numbers(part, "high")[-1])
        if num <= MOST_LINES:
            shown = (bins >= low) & (bins <= high)
            first = {name: part.column(name)[0].as_py() for name in ("kind", "name", "step", "rank")}
            label = _text(f"{first['kind']} {first['name']}, step {first['step']}, rank {first['rank']}")
            axes.stairs(counts[shown], np.append(bins[shown], bins[shown][-1] + 1), label=label, fill=num == 1, alpha=0.6)
    # Bins of powers of two: drawn by their numbers, all between -1e-19 and 1e-19 would be one point.
    ticks = np.unique(np.linspace(low, high + 1, 9).astype(np.int64))
    axes.set_xticks(ticks, [f"{edges[int(one)]:.2g}" for one in ticks])
    axes.set_xlabel("value")
    axes.set_ylabel("elements")
    return _titled(axes, rows, num, "histograms")


def plot_picture(rows: pa.Table, ax: Axes | None) -> Axes:
    """Draw the last row of `OpenedRuns.traces` that is a picture: its last two dimensions, the first of the leading ones."""
    pictures = rows.filter(pc.equal(rows.column("part"), ""))
    if not pictures.num_rows:
        raise ConfigError("plot: expected a picture of a tensor, got none")
    [last] = pictures.slice(pictures.num_rows - 1).to_pylist()
    shape = [1, 1, *last["shape"]]
    values = np.asarray(last["values"], np.float64).reshape(-1, *shape[-2:])
    if not values.size:
        raise ConfigError(f"plot: expected a picture with numbers in it, got one of shape {last['shape']}")
    axes = _axes(ax)
    axes.imshow(values[0], aspect="auto", interpolation="nearest")
    axes.set_title(_text(f"{last['kind']} {last['name']}, step {last['step']}, rank {last['rank']}", 120))
    return axes


def plot_anomalies(rows: pa.Table, ax: Axes | None) -> Axes:
    """Draw the rows of `OpenedRuns.anomalies`: a point each onset at its step, a line each tensor, coloured by severity."""
    onsets = rows.filter(pc.equal(rows.column("event"), "onset"))
    names = list(dict.fromkeys(onsets.column("tag_name").to_pylist()))
    place = {name: at for at, name in enumerate(names[:MOST_NAMES])}
    axes = _axes(ax, 1.5 + 0.2 * len(place))
    drawn: dict[str, list[tuple[int, int]]] = {}
    for row in onsets.select(["tag_name", "step", "severity"]).to_pylist():
        if row["tag_name"] in place:
            drawn.setdefault(row["severity"], []).append((row["step"], place[row["tag_name"]]))
    for severity, points in drawn.items():
        steps, lines = zip(*points, strict=True)
        axes.scatter(steps, lines, s=16, color=COLOURS.get(severity, "tab:gray"), label=_text(severity))
    axes.set_yticks(range(len(place)), [_text(name) for name in place])
    axes.invert_yaxis()
    axes.set_xlabel("step")
    return _titled(axes, rows, len(names), "tensors", MOST_NAMES)


def plot_incidents(rows: pa.Table, ax: Axes | None) -> Axes:
    """Draw the rows of `OpenedRuns.incidents`: a bar each over the steps that it spans, the worst on top."""
    shown = rows.slice(0, MOST_NAMES).to_pylist()
    axes = _axes(ax, 1.5 + 0.3 * len(shown))
    for at, row in enumerate(shown):
        width = max(row["last_step"] - row["opened_step"], 0) + 1
        axes.barh(at, width, left=row["opened_step"], color=COLOURS.get(row["severity"], "tab:gray"), height=0.6)
    axes.set_yticks(range(len(shown)), [_text(f"{row['id']} {row['title']}") for row in shown])
    axes.invert_yaxis()
    axes.set_xlabel("step")
    return _titled(axes, rows, rows.num_rows, "incidents", MOST_NAMES, has_labels=False)


def plot_columns(rows: pa.Table, ax: Axes | None) -> Axes:
    """Draw the rows of any answer that has a column `step`: a line each column of numbers, and each run and name."""
    is_number = {
        field.name: pa.types.is_floating(field.type) or pa.types.is_integer(field.type) or pa.types.is_decimal(field.type)
        for field in rows.schema
    }
    numbers = [name for name in rows.column_names if is_number[name] and name not in ("step", "attempt")]
    if not is_number.get("step") or not numbers:
        known = ", ".join(printable(name) for name in rows.column_names)
        raise ConfigError(f"plot: expected a column step and a column of numbers beside it, got {known or 'no columns'}")
    axes = _axes(ax)
    key = [name for name in ("run", "name", "kind") if name in rows.column_names and not is_number[name]]
    num = 0
    for part in _parts(rows, key):
        order = np.argsort(_numbers(part, "step"), kind="stable")
        for name in numbers:
            num += 1
            if num <= MOST_LINES:
                label = " ".join((*(str(part.column(one)[0].as_py()) for one in key), name))
                axes.plot(_numbers(part, "step")[order], _numbers(part, name)[order], label=_text(label), linewidth=1.2)
    axes.set_xlabel("step")
    return _titled(axes, rows, num, "lines")


def _axes(ax: Axes | None, height: float = 4.0) -> Axes:
    """Return the axes to draw on. height: of new ones, in inches. ConfigError where matplotlib is not installed."""
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot
    except ImportError as error:
        raise ConfigError(f"plot needs the package matplotlib ({error}); pip install matplotlib") from error
    _, axes = matplotlib.pyplot.subplots(figsize=(9, height), layout="constrained")
    return axes


def _titled(axes: Axes, rows: pa.Table, num: int, what: str, most: int = MOST_LINES, *, has_labels: bool = True) -> Axes:
    runs = pc.unique(rows.column("run")).to_pylist() if "run" in rows.column_names else []
    title = ", ".join(str(one) for one in runs[:4])
    if num > most:
        title += f" ({most} of {num:,} {what})"
    axes.set_title(_text(title, 120))
    if has_labels and axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
    return axes


def _parts(rows: pa.Table, key: Sequence[str]) -> Iterator[pa.Table]:
    """Yield the rows of each series, in the order in which they come first. Rows of one may lie anywhere."""
    if not rows.num_rows:
        return
    codes = np.zeros(rows.num_rows, np.int64)
    for name in key:
        column = rows.column(name).combine_chunks().dictionary_encode(null_encoding="encode")
        codes = np.unique(codes * (len(column.dictionary) + 1) + column.indices.to_numpy(), return_inverse=True)[1]
    _, firsts = np.unique(codes, return_index=True)
    order = np.argsort(codes, kind="stable")
    sizes = np.bincount(codes)
    begins = np.cumsum(sizes) - sizes
    by_series = rows.take(pa.array(order))
    for code in codes[np.sort(firsts)]:
        yield by_series.slice(int(begins[code]), int(sizes[code]))


def _numbers(rows: pa.Table, name: str) -> npt.NDArray[np.float64]:
    """Return [rows] a column as float64, null as NaN: a gap in a line."""
    column = rows.column(name).cast(pa.float64())
    values: npt.NDArray[np.float64] = column.to_numpy()
    return values


def _text(text: str, most: int = 60) -> str:
    """Return a text as matplotlib shows it letter by letter: `$` would begin a formula, `_` in front hides a label."""
    shown = printable(text)
    shown = shown if len(shown) <= most else shown[: most - 3] + "..."
    return (" " if shown.startswith("_") else "") + shown.replace("$", r"\$")
