// One value over steps: a line, the band from least to greatest where a point stands for several steps, marks for what is not
// finite, for anomalies and for incidents. What is in view decides the scale, and nothing is cut off.
import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";

import { colours } from "./colours.js";
import { incidentLink } from "./route.js";
import { grouped, number, plural, seen, severityClass } from "./words.js";

export const AXIS_PX = 68;
const NONE = []; // The same one each time: effects compare by identity.
const AROUND = 50; // Steps on either side of what is zoomed to.

// Columns: {width, steps, least, greatest, mean, last, nans, infs}, as the history answers; values may be null.
function drawn(columns, isLog) {
  const hidden = (one) => (one === null || (isLog && one <= 0) ? null : one);
  const half = (columns.width - 1) / 2;
  const line = columns.mean.map((one, at) => hidden(one ?? columns.last[at]));
  const isBand = columns.width > 1;
  const empty = columns.steps.map(() => null);
  return [
    columns.steps.map((one) => one + half),
    line,
    isBand ? columns.greatest.map(hidden) : empty,
    isBand ? columns.least.map(hidden) : empty,
  ];
}

export function summed(columns) {
  const finite = { least: Infinity, most: -Infinity, mostAt: null };
  let bad = 0;
  columns.steps.forEach((step, at) => {
    if (columns.least[at] !== null) finite.least = Math.min(finite.least, columns.least[at]);
    if (columns.greatest[at] !== null && columns.greatest[at] > finite.most) [finite.most, finite.mostAt] = [columns.greatest[at], step];
    bad += columns.nans[at] + columns.infs[at] > 0;
  });
  return { ...finite, bad };
}

function spanOf(columns, at) {
  const first = columns.steps[at];
  return columns.width > 1 ? `steps ${grouped(first)} to ${grouped(first + columns.width - 1)}` : `step ${grouped(first)}`;
}

function sentenceAt(columns, at) {
  const middle = columns.mean[at] ?? columns.last[at];
  const bad = [columns.nans[at] && `${grouped(columns.nans[at])} NaN`, columns.infs[at] && `${grouped(columns.infs[at])} inf`].filter(Boolean);
  const band = columns.width > 1 && columns.least[at] !== null ? ` (${number(columns.least[at])} to ${number(columns.greatest[at])})` : "";
  return `${spanOf(columns, at)}: ${middle === null ? "" : number(middle, 5)}${band}${bad.length ? ` ${bad.join(", ")}` : ""}`;
}

function sentence(columns) {
  if (!columns.steps.length) return "nothing in view";
  const { least, most, mostAt, bad } = summed(columns);
  const end = columns.steps.length - 1;
  const last = columns.last[end];
  const parts = [`last ${last === null ? "not finite" : number(last, 5)}`];
  if (most > -Infinity) parts.push(`${number(least)} to ${number(most)}`, `greatest at step ${grouped(mostAt)}`);
  if (bad) parts.push(`not finite in ${plural(bad, columns.width > 1 ? "column" : "step")}`);
  return parts.join(" \u00b7 ");
}

// The view that a key asks for: [from, to], null for the whole run, undefined where the key means nothing here.
export function movedView(key, [from, to], [first, last]) {
  const span = Math.max(1, to - from);
  const bounded = (a, b) => {
    const [low, high] = [Math.max(first, Math.round(a)), Math.min(last, Math.round(b))];
    return high > low ? [low, high] : undefined;
  };
  if (key === "ArrowLeft") return bounded(Math.max(first, from - span / 4), Math.max(first, from - span / 4) + span);
  if (key === "ArrowRight") return bounded(Math.min(last, to + span / 4) - span, Math.min(last, to + span / 4));
  if (key === "+" || key === "=") return bounded(from + span / 4, to - span / 4);
  if (key === "-") return bounded(from - span / 2, to + span / 2);
  return key === "0" || key === "Escape" ? null : undefined;
}

// As many digits as tell neighbouring ticks apart.
export function labelled(_, ticks, __, ___, increment) {
  const most = Math.max(...ticks.map((one) => Math.abs(one ?? 0)));
  const digits = Math.min(12, Math.max(3, Math.ceil(Math.log10(most / (increment || most || 1) || 1)) + 1));
  return ticks.map((one) => (one === null ? "" : number(one, digits)));
}

export function axisOf(tones) {
  return { stroke: tones.axis, grid: { stroke: tones.grid, width: 1 }, ticks: { stroke: tones.grid, width: 1 }, font: "12px system-ui, sans-serif" };
}

// The scale of what is in view. What moves by less than a hundred times the rounding of a history is a flat line.
function roomy(_, least, most) {
  if (least === null || most === null) return [0, 1];
  const size = Math.max(Math.abs(least), Math.abs(most)) || 1;
  return most - least > 1e-5 * size ? uPlot.rangeNum(least, most, 0.08, false) : [least - 0.1 * size, most + 0.1 * size];
}

// What happened to a run beside its values: [letter, words].
const EVENTS = { restart: ["R", "restart"], checkpoint: ["C", "checkpoint"], rules: ["P", "other rules"], command: ["M", "command"] };
const EVENT_PX = 16;

export function EventKey({ marks }) {
  const kinds = Object.keys(EVENTS).filter((kind) => marks.some((one) => one.kind === kind));
  if (!kinds.length) return null;
  return (
    <p class="muted">
      On the lower edge: {kinds.map((kind) => `${EVENTS[kind][0]} ${EVENTS[kind][1]} (${grouped(marks.filter((one) => one.kind === kind).length)})`).join(", ")}; Enter zooms to it.
    </p>
  );
}

// Marks that would lie over each other are one: {x, letter, marks}.
function gathered(marks, x) {
  const groups = [];
  for (const one of marks) {
    const last = groups.at(-1);
    if (last && x(one.step) - last.x < EVENT_PX) last.marks.push(one);
    else groups.push({ x: x(one.step), marks: [one] });
  }
  return groups.map((one) => ({ ...one, letter: one.marks.length > 1 ? String(Math.min(one.marks.length, 99)) : EVENTS[one.marks[0].kind]?.[0] ?? "?" }));
}

const eventWords = (marks) => marks.slice(0, 8).map((one) => `step ${grouped(one.step)}: ${seen(one.label, 200)}`).join("; ") + (marks.length > 8 ? `; and ${marks.length - 8} more` : "");

function drawMarks(plot, columns, anomalies, incidents, marks, tones) {
  const { ctx, bbox } = plot;
  const x = (step) => plot.valToPos(step, "x", true);
  const inView = (step) => step >= plot.scales.x.min && step <= plot.scales.x.max;
  const ratio = devicePixelRatio || 1;
  ctx.save();
  for (const one of incidents) {
    if (!inView(one.opened_step)) continue;
    ctx.strokeStyle = tones[severityClass(one.severity)];
    ctx.setLineDash([3 * ratio, 3 * ratio]);
    ctx.lineWidth = ratio;
    ctx.beginPath();
    ctx.moveTo(x(one.opened_step), bbox.top);
    ctx.lineTo(x(one.opened_step), bbox.top + bbox.height);
    ctx.stroke();
  }
  for (const one of marks) {
    if (!inView(one.step)) continue;
    ctx.strokeStyle = tones.axis;
    ctx.setLineDash([ratio, 3 * ratio]);
    ctx.lineWidth = ratio;
    ctx.beginPath();
    ctx.moveTo(x(one.step), bbox.top);
    ctx.lineTo(x(one.step), bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.setLineDash([]);
  columns.steps.forEach((step, at) => {
    if (!columns.nans[at] && !columns.infs[at]) return;
    ctx.fillStyle = columns.nans[at] ? tones.nan : tones.inf;
    const left = Math.max(bbox.left, x(step - 0.5));
    const wide = Math.max(2 * ratio, Math.min(bbox.left + bbox.width, x(step + columns.width - 0.5)) - left);
    ctx.globalAlpha = 0.3;
    ctx.fillRect(left, bbox.top, wide, bbox.height);
    ctx.globalAlpha = 1;
    ctx.fillRect(left - ratio, bbox.top + bbox.height - 7 * ratio, wide + 2 * ratio, 7 * ratio);
  });
  ctx.lineWidth = 1.6 * ratio;
  for (const one of anomalies) {
    if (!inView(one.step)) continue;
    const y = one.value === null ? bbox.top + bbox.height - 12 * ratio : plot.valToPos(one.value, "y", true);
    if (!Number.isFinite(y)) continue;
    ctx.strokeStyle = tones[severityClass(one.severity)];
    ctx.beginPath();
    ctx.arc(x(one.step), y, 4.5 * ratio, 0, 2 * Math.PI);
    ctx.stroke();
  }
  ctx.restore();
}

export function Plot({ title, columns, view, extent, onView, isLog, anomalies = NONE, incidents = NONE, marks = NONE, isFirst = true, height = 190 }) {
  const place = useRef(null);
  const plot = useRef(null);
  const now = useRef({});
  const [box, setBox] = useState(null);
  const [at, setAt] = useState(null);
  const { least } = summed(columns);
  // With a logarithm, values at and below zero have a scale of their own kind rather than none.
  const kind = isLog ? (least > 0 ? 3 : 4) : 1;
  now.current = { columns, anomalies, incidents, marks, onView, range: [view[0], Math.max(view[1], view[0] + 1)] };

  useEffect(() => {
    const tones = colours();
    const axis = axisOf(tones);
    const own = new uPlot(
      {
        width: Math.max(200, place.current.clientWidth),
        height,
        padding: [12, 18, 0, 0],
        legend: { show: false },
        cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: false } },
        scales: { x: { time: false, range: () => now.current.range }, y: { distr: kind, ...(kind === 1 ? { range: roomy } : {}) } },
        axes: [
          { ...axis, values: (_, ticks) => ticks.map((one) => (Number.isInteger(one) ? grouped(one) : "")) },
          { ...axis, size: AXIS_PX, values: labelled },
        ],
        series: [
          {},
          { stroke: tones.line, width: 1.5, spanGaps: false, points: { show: (own) => (own.data?.[0]?.length ?? 0) < 60, size: 4, fill: tones.line } },
          { stroke: tones.band, width: 1, points: { show: false } },
          { stroke: tones.band, width: 1, points: { show: false } },
        ],
        bands: [{ series: [2, 3], fill: tones.band }],
        hooks: {
          draw: [
            (one) => {
              drawMarks(one, now.current.columns, now.current.anomalies, now.current.incidents, now.current.marks, tones);
              const [left, top, width, high] = [one.bbox.left, one.bbox.top, one.bbox.width, one.bbox.height].map((px) => px / devicePixelRatio);
              setBox((before) => (before?.left === left && before.width === width && before.bottom === top + high ? before : { left, width, bottom: top + high }));
            },
          ],
          setCursor: [(one) => setAt(one.cursor.idx ?? null)],
          setSelect: [
            (one) => {
              const { left, width } = one.select;
              if (width < 4) return;
              const chosen = [Math.floor(one.posToVal(left, "x")), Math.ceil(one.posToVal(left + width, "x"))];
              one.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
              now.current.onView(chosen);
            },
          ],
        },
      },
      [[], [], [], []],
      place.current,
    );
    own.over.addEventListener("dblclick", () => now.current.onView(null));
    plot.current = own;
    const watch = new ResizeObserver(() => {
      const width = place.current?.clientWidth;
      if (width && width !== own.width) own.setSize({ width, height });
    });
    watch.observe(place.current);
    return () => {
      watch.disconnect();
      own.destroy();
    };
  }, [kind, height]);

  useEffect(() => {
    plot.current.setData(drawn(columns, kind === 3));
  }, [columns, anomalies, incidents, marks, view[0], view[1], kind, height]);

  const keyed = (event) => {
    const moved = movedView(event.key, view, extent);
    if (moved === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    onView(moved);
  };
  const x = (step) => box.left + (box.width * (step - view[0])) / Math.max(1, view[1] - view[0]);
  const shown = incidents.filter((one) => one.opened_step >= view[0] && one.opened_step <= view[1]).slice(0, 60);
  return (
    <figure class="plot">
      <figcaption><b>{seen(title, 120)}</b> <span class="muted">{at !== null && at < columns.steps.length ? sentenceAt(columns, at) : sentence(columns)}</span></figcaption>
      <div class="canvas" tabIndex={0} role="group" aria-label={`${seen(title, 120)} over steps. ${sentence(columns)}. Arrows move, plus and minus zoom, 0 shows all.`} onKeyDown={keyed}>
        <div ref={place} />
        {box && shown.map((one) => (
          <a key={one.id} class={`mark ${severityClass(one.severity)}`} style={{ left: `${x(one.opened_step)}px` }} href={incidentLink(one)} title={`step ${one.opened_step}: ${seen(one.title, 200)}`} aria-label={`Incident at step ${one.opened_step}: ${seen(one.title, 200)}`} />
        ))}
        {/* The lines are on every plot; the keyboard meets each once, on the first. */}
        {box && gathered(marks.filter((one) => one.step >= view[0] && one.step <= view[1]), x).slice(0, 80).map((one) => (
          <button
            key={`${one.marks[0].kind}/${one.marks[0].attempt}/${one.marks[0].step}`} type="button" class="event" tabIndex={isFirst ? 0 : -1}
            style={{ left: `${one.x}px`, top: `${box.bottom - EVENT_PX}px` }} title={eventWords(one.marks)} aria-label={eventWords(one.marks)}
            onClick={() => onView([Math.max(extent[0], one.marks[0].step - AROUND), Math.min(extent[1], one.marks.at(-1).step + AROUND)])}
          >{one.letter}</button>
        ))}
      </div>
    </figure>
  );
}
