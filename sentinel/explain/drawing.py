"""A cascade in letters: stages and ranks down the page, phases of steps across, and the way it took in words."""

from __future__ import annotations

from collections.abc import Sequence

from sentinel.explain.cascade import MANY, SCALARS, Cascade, Cell, Row, Wave

WIDTH = 100
"""Columns of a page that is no terminal."""

_MARKS = {"cause": "@", "nonfinite": "#", "finite": "+"}
_LEGEND = {"@": "@ came first", "#": "# NaN or inf", "+": "+ out of its range"}
_MOST_ROWS = 40
_MOST_SPANS = 3
_MOST_LABEL = 24
_RULE = " | "


def draw(cascade: Cascade, width: int = WIDTH) -> list[str]:
    """Return the lines of the drawing, none wider than `width` as far as labels and the phases of one step fit into it.

    Steps stand side by side where there is room, else one below the other.
    """
    rows = cascade.rows[:_MOST_ROWS]
    labels = _labels(rows)
    margin = max(len(label) for label in labels)
    table = [[_cell(cell) for cell in row.cells] for row in rows]
    by_step: dict[int, list[int]] = {}
    for at, column in enumerate(cascade.columns):
        by_step.setdefault(column.step, []).append(at)
    panels: list[list[str]] = []
    reported: list[list[int]] = []
    for step, columns in by_step.items():
        panel = _panel(cascade, columns, table)
        if panels and panels[-1] == panel:
            reported[-1].append(step)
        else:
            panels.append(panel)
            reported.append([step])
    for panel, steps in zip(panels, reported, strict=True):
        title = f"step {steps[0]}" if len(steps) == 1 else f"steps {spans(steps)}, each"
        wide = max(len(title), len(panel[0]))
        panel[:] = [line.ljust(wide) for line in (title, *panel)]
    lines: list[str] = []
    while panels:
        taken = 1
        while taken < len(panels) and margin + sum(len(_RULE) + len(p[0]) for p in panels[: taken + 1]) <= width:
            taken += 1
        block, panels = panels[:taken], panels[taken:]
        if lines:
            lines.append("")
        for number, label in enumerate(("", "", *labels)):
            lines.append((label.ljust(margin) + "".join(_RULE + panel[number] for panel in block)).rstrip())
    texts = {cell for cells in table for cell in cells}
    legend = [words for mark, words in _LEGEND.items() if any(text.startswith(mark) for text in texts)]
    if any("m" in text for text in texts):
        legend.append("m: in these micro-steps")
    lines += _wrapped("; ".join([*legend, "numbers: anomalies of one rank"]), width, "")
    if len(cascade.rows) > len(rows):
        lines.append(f"{len(cascade.rows) - len(rows)} more rows are not shown")
    if cascade.hidden_steps:
        lines += _wrapped(f"more steps with anomalies: {spans(cascade.hidden_steps, most=8)}", width, "")
    return lines


def _panel(cascade: Cascade, columns: Sequence[int], table: Sequence[Sequence[str]]) -> list[str]:
    """Return one step's lines: the phases, then the rows."""
    widths = [max(len(cascade.columns[at].phase), *(len(cells[at]) for cells in table)) for at in columns]
    lines = [" ".join(cascade.columns[at].phase.ljust(wide) for at, wide in zip(columns, widths, strict=True))]
    for cells in table:
        lines.append(" ".join(cells[at].ljust(wide) for at, wide in zip(columns, widths, strict=True)))
    return lines


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return "."
    return _MARKS[cell.mark] + (f"m{spans(cell.micro_steps)}".replace(", ", ",") if cell.micro_steps else str(cell.num))


def _labels(rows: Sequence[Row]) -> list[str]:
    is_looped = any(chunk > 0 for row in rows for _, chunk in row.chunks)
    stages = []
    for row in rows:
        if row.depths == (SCALARS,):
            stages.append("logged")
        elif is_looped and len(row.chunks) == 1:
            # Which chunk of the stage: 0.1 is the second one of stage 0.
            stages.append("stage " + ".".join(map(str, row.chunks[0])))
        elif is_looped:
            stages.append(f"depths {spans(row.depths)}")
        else:
            of_ranks = sorted({stage for stage, _ in row.chunks})
            stages.append(("stage " if len(of_ranks) == 1 else "stages ") + spans(of_ranks))
    wide = max(len(stage) for stage in stages)
    ranks = []
    for row in rows:
        alike = [len(other.ranks) for other in rows if other.depths == row.depths]
        is_rest = len(row.ranks) > MANY and len(alike) > 1 and len(row.ranks) == max(alike) and alike.count(max(alike)) == 1
        ranks.append(f"{len(row.ranks)} other ranks" if is_rest else _short(row.ranks))
    return [f"  {stage.ljust(wide)}  {of}".rstrip() for stage, of in zip(stages, ranks, strict=True)]


def _short(ranks: Sequence[int]) -> str:
    words = rank_words(ranks)
    if len(words) <= _MOST_LABEL:
        return words
    first, last = _spans(ranks)[0], _spans(ranks)[-1]
    return f"ranks {first} ... {last} ({len(ranks)})"


def rank_words(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-3`, `ranks 1, 3, ... 1023 (512 of them)`; nothing for none"""
    if not ranks:
        return ""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {spans(ranks)}"


def spans(numbers: Sequence[int], most: int = _MOST_SPANS) -> str:
    """`0-3, 8`; where there are more than `most` pieces the first ones and the last: `1, 3, ... 15 (8 of them)`."""
    words = _spans(numbers)
    if len(words) <= most:
        return ", ".join(words)
    return ", ".join(words[: most - 1]) + f", ... {words[-1]} ({len(numbers)} of them)"


def _spans(numbers: Sequence[int]) -> list[str]:
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in found]


def way(cascade: Cascade, width: int = WIDTH) -> list[str]:
    """Return the way that the fault took, a leg a line."""
    lines = []
    for wave in cascade.waves:
        lines += _wrapped(_leg(wave, cascade), width, "  ")
    return lines


def _leg(wave: Wave, cascade: Cascade) -> str:
    stages = _stage_words(wave, cascade)
    further = f", reaching {rank_words(wave.ranks)}" if wave.ranks else ""
    num = f"{wave.num_anomalies} " + ("anomaly" if wave.num_anomalies == 1 else "anomalies")
    if wave.how == "born":
        where = f" on {rank_words(wave.ranks)}" if wave.ranks else ""
        return f"step {wave.step}: born{where}{', ' + stages if wave.depths else ''}: {wave.what}"
    words = {
        "weights": f"in the weights as the step read them: {num}",
        "up": f"forward, up through {stages}: {num}",
        "loss": f"into what is logged of the forward: {wave.what}",
        "down": f"backward, down through {stages}: {num}",
        "reduced": f"into the weight gradients of {stages}{', by their reduction' if wave.ranks else ''}: {num}",
        "normed": f"into the norm over all gradients: {wave.what}",
        "written": f"by the optimizer into {stages}: {num}",
        "other": f"beside them: {num}",
        "read": f"step {wave.step} read it from the weights: {num}",
        "next": f"step {wave.step}: {num}",
        "again": f"seen again at step {wave.step}: {num}",
    }
    return words[wave.how] + further


def _stage_words(wave: Wave, cascade: Cascade) -> str:
    if not wave.depths:
        return "what is logged"
    chunks = {depth: row.chunks for row in cascade.rows for depth in row.depths}
    is_looped = any(chunk > 0 for of in chunks.values() for _, chunk in of)
    word = "depth" if is_looped else "stage"
    if len(wave.depths) == 1:
        return f"{word} {wave.depths[0]}"
    return f"{word}s {wave.depths[0]} to {wave.depths[-1]}"


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    words, lines, line = text.split(" "), [], indent
    for word in words:
        if len(line) + len(word) > width and line.strip():
            lines.append(line.rstrip())
            line = indent + "  "
        line += word + " "
    return [*lines, line.rstrip()]
