// Layers x steps: one statistic of every tensor of a kind, in the order of the model's forward, over the run.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { scaleOf } from "./colours.js";
import { Choice, INF, Legend, NAN, NOTHING, UNDEFINED, VALUE, paint, unpacked } from "./heat.jsx";
import { Plot, movedView } from "./plot.jsx";
import { go, incidentLink, layersLink } from "./route.js";
import { NoHistory, Toolbar, Unanswered, useHistory, viewOf } from "./run.jsx";
import { address, useAnswer } from "./server.js";
import { RunTabs } from "./tabs.jsx";
import { grouped, number, plural, seen, seenEnd, severityClass } from "./words.js";

const OF_WORDS = { extreme: "farthest from zero", max: "greatest", min: "least", avg: "mean", last: "last" };
const MADE = ["rms", "norm", "absmax"]; // Of what is made of kept statistics a history knows no mean of several steps.
const LABELS_PX = 190;

function readAnswer(answer) {
  return { ...answer, values: unpacked(answer.values, Float32Array), states: unpacked(answer.states, Uint8Array) };
}

// Each row beside its own median, so that rows of any size are seen as they move; a row whose median is not above 0 stays.
function besideMedian(map) {
  const values = map.values.slice();
  const n = map.num_columns;
  for (let row = 0; row < map.rows.length; row += 1) {
    const own = values.subarray(row * n, row * n + n);
    const sorted = own.filter(Number.isFinite).sort();
    const middle = sorted[sorted.length >> 1];
    if (middle > 0) for (let at = 0; at < n; at += 1) own[at] /= middle;
  }
  return { ...map, values };
}

function describe(map, row, column) {
  const cell = row * map.num_columns + column;
  const first = map.first_step + column * map.width;
  const steps = map.width > 1 ? `steps ${grouped(first)} to ${grouped(first + map.width - 1)}` : `step ${grouped(first)}`;
  const state = { [NOTHING]: "not measured", [UNDEFINED]: "not defined", [INF]: "has an infinity", [NAN]: "has a NaN" }[map.states[cell]];
  const value = Number.isFinite(map.values[cell]) ? `${map.statistic} ${number(map.values[cell], 5)}` : "";
  const one = map.rows[row];
  const more = one.num > 1 ? ` and ${one.num - 1} behind it` : "";
  return `${seen(one.name, 120)}${more}${one.place ? ` (${seen(one.place, 40)})` : ""}, ${steps}: ${[value, state].filter(Boolean).join(", ")}`;
}

function HeatMap({ map, painted, scale, view, extent, onView, onOpen, chosen, incidents }) {
  const canvas = useRef(null);
  const frame = useRef(null);
  const [width, setWidth] = useState(0);
  const [cursor, setCursor] = useState(null);
  const [drag, setDrag] = useState(null);
  const rowPx = Math.max(2, Math.min(20, Math.floor(560 / map.rows.length)));
  const height = rowPx * map.rows.length;
  const every = Math.max(1, Math.ceil(13 / rowPx));

  useEffect(() => {
    const watch = new ResizeObserver(() => setWidth(frame.current?.clientWidth ?? 0));
    watch.observe(frame.current);
    return () => watch.disconnect();
  }, []);
  useEffect(() => {
    if (width) paint(canvas.current, painted, painted.rows.length, scale);
  }, [painted, scale, width, height]);

  const cellAt = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) / box.width) * map.num_columns);
    const row = Math.floor(((event.clientY - box.top) / box.height) * map.rows.length);
    return { row: Math.max(0, Math.min(map.rows.length - 1, row)), column: Math.max(0, Math.min(map.num_columns - 1, column)) };
  };
  const stepOf = (column) => map.first_step + column * map.width;
  const down = (event) => {
    const cell = cellAt(event);
    canvas.current.setPointerCapture(event.pointerId);
    setDrag({ from: cell, to: cell });
  };
  const move = (event) => {
    const cell = cellAt(event);
    setCursor(cell);
    if (drag) setDrag({ ...drag, to: cell });
  };
  const up = () => {
    if (!drag) return;
    const [a, b] = [drag.from.column, drag.to.column].sort((one, other) => one - other);
    setDrag(null);
    if (b - a >= 2) onView([Math.max(extent[0], stepOf(a)), Math.min(extent[1], stepOf(b + 1) - 1)]);
    else onOpen(map.rows[drag.to.row]);
  };
  const keyed = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const at = cursor ?? { row: 0, column: map.num_columns - 1 };
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-10, 0], PageDown: [10, 0] };
    if (event.key in moves) {
      const [rows, columns] = moves[event.key];
      setCursor({
        row: Math.max(0, Math.min(map.rows.length - 1, at.row + rows)),
        column: Math.max(0, Math.min(map.num_columns - 1, at.column + columns)),
      });
    } else if (event.key === "Enter" || event.key === " ") onOpen(map.rows[at.row]);
    else {
      const moved = movedView(event.key, view, extent);
      if (moved === undefined) return;
      onView(moved);
    }
    event.preventDefault();
  };
  const x = (column) => (column * width) / map.num_columns;
  const shownIncidents = incidents.filter((one) => one.opened_step >= map.first_step && one.opened_step < stepOf(map.num_columns));
  const ticks = Array.from({ length: 5 }, (_, at) => Math.round((at * (map.num_columns - 1)) / 4));
  return (
    <div class="heat">
      <div class="marks-row"><div class="labels" /><div class="marks">
        {shownIncidents.slice(0, 60).map((one) => (
          <a key={one.id} class={`mark ${severityClass(one.severity)}`} href={incidentLink(one)} style={{ left: `${x((one.opened_step - map.first_step + 0.5) / map.width)}px` }} title={`step ${one.opened_step}: ${seen(one.title, 200)}`} aria-label={`Incident at step ${one.opened_step}: ${seen(one.title, 200)}`} />
        ))}
      </div></div>
      <div class="body">
        <div class="labels" style={{ height: `${height}px` }} aria-hidden="true">
          {map.rows.map((one, at) => (at % every === 0) && (
            <span key={at} class={chosen === one.series ? "chosen" : ""} style={{ top: `${at * rowPx}px` }} title={seen(one.name, 200)}>{seenEnd(one.name, 30)}</span>
          ))}
        </div>
        <div class="frame" ref={frame} style={{ height: `${height}px` }}>
          <canvas
            ref={canvas} tabIndex={0} role="img" onPointerDown={down} onPointerMove={move} onPointerUp={up} onPointerLeave={() => setCursor(null)} onKeyDown={keyed}
            aria-label={`${map.statistic} of ${map.kind} by layer and step; arrows move over cells, Enter opens a tensor, plus and minus zoom. The table below says the same.`}
          />
          {cursor && <div class="cursor" style={{ left: `${x(cursor.column)}px`, top: `${cursor.row * rowPx}px`, width: `${Math.max(3, x(1))}px`, height: `${rowPx}px` }} />}
          {drag && drag.from.column !== drag.to.column && <div class="drag" style={{ left: `${x(Math.min(drag.from.column, drag.to.column))}px`, width: `${x(Math.abs(drag.from.column - drag.to.column))}px` }} />}
        </div>
      </div>
      <div class="ticks"><div class="labels" /><div class="row">{ticks.map((one, at) => <span key={at}>{grouped(stepOf(one))}</span>)}</div></div>
      <p class="readout" aria-live="polite">{cursor && cursor.row < map.rows.length && cursor.column < map.num_columns ? describe(map, cursor.row, cursor.column) : "Point at a cell to read it; click it for the tensor's series; drag to zoom."}</p>
    </div>
  );
}

// Rows with what was not finite first, the earliest before the others and at one step in the order in which it goes through the
// model; then those that rose farthest above their own median.
function ranked(map) {
  const way = map.kind.startsWith("dgrad") ? -1 : 1;
  const n = map.num_columns;
  return map.rows.map((row, at) => {
    const values = map.values.subarray(at * n, at * n + n);
    const states = map.states.subarray(at * n, at * n + n);
    const count = (state) => states.reduce((sum, one) => sum + (one === state), 0);
    const bad = states.findIndex((one) => one === NAN || one === INF);
    let most = -1;
    for (let column = 0; column < n; column += 1) if (Number.isFinite(values[column]) && (most < 0 || Math.abs(values[column]) > Math.abs(values[most]))) most = column;
    const sorted = values.filter(Number.isFinite).map(Math.abs).sort();
    const middle = sorted.length ? sorted[sorted.length >> 1] : NaN;
    return {
      row, at, nans: count(NAN), infs: count(INF), bad: bad < 0 ? null : map.first_step + bad * map.width,
      most: most < 0 ? NaN : values[most], mostAt: most < 0 ? null : map.first_step + most * map.width,
      rise: middle > 0 ? Math.abs(values[most]) / middle : 0, middle,
    };
  }).sort((a, b) => (a.bad === null) - (b.bad === null) || (a.bad ?? 0) - (b.bad ?? 0) || (a.bad === null ? b.rise - a.rise : way * (a.at - b.at)));
}

function DataTable({ map, onOpen }) {
  const [all, setAll] = useState(false);
  const [rows, setRows] = useState([]);
  useEffect(() => {
    // Behind the frame that shows the picture, which is as much work again.
    let timer = 0;
    const frame = requestAnimationFrame(() => { timer = setTimeout(() => setRows(ranked(map)), 0); });
    return () => {
      cancelAnimationFrame(frame);
      clearTimeout(timer);
    };
  }, [map]);
  return (
    <div class="wide">
      <table>
        <caption>What stands out: not finite first, in the order of steps and of the model, then the farthest above its own median</caption>
        <thead><tr><th>Tensor</th><th class="number">First not finite</th><th class="number">Columns with NaN</th><th class="number">inf</th><th class="number">Farthest from zero</th><th class="number">at step</th><th class="number">Median</th><th class="number">Times</th></tr></thead>
        <tbody>
          {rows.slice(0, all ? 300 : 12).map((one) => (
            <tr key={one.row.series}>
              <td><button type="button" class="plain" onClick={() => onOpen(one.row)}>{seen(one.row.name, 120)}</button>{one.row.num > 1 && <span class="muted"> and {one.row.num - 1} behind it</span>} <span class="muted">{seen(one.row.place, 40)}</span></td>
              <td class={`number ${one.bad === null ? "" : "critical"}`}>{one.bad === null ? "" : grouped(one.bad)}</td>
              <td class="number">{one.nans || ""}</td><td class="number">{one.infs || ""}</td>
              <td class="number">{number(one.most)}</td><td class="number">{grouped(one.mostAt)}</td><td class="number">{number(one.middle)}</td><td class="number">{one.rise ? number(one.rise, 3) : ""}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {rows.length > 12 && !all && <button type="button" onClick={() => setAll(true)}>{plural(Math.min(rows.length, 300) - 12, "more row")}</button>}
    </div>
  );
}

export function LayersView({ name: run, query }) {
  const statistic = query.statistic ?? "std";
  const of = query.of === "avg" && MADE.includes(statistic) ? "extreme" : query.of ?? "extreme";
  const isRelative = query.colour === "row";
  const columns = Math.min(1500, Math.max(120, Math.round((globalThis.innerWidth ?? 1000) - LABELS_PX - 60)));
  const isLive = !query.to;
  // Before the list of what there is, which may take as long: of which kind it is where nobody chose one, the answer says.
  const asked = { run, kind: query.kind, statistic, of, from: query.from, to: query.to, columns };
  const answer = useAnswer(address("api/v1/history/heatmap", asked), isLive ? 10_000 : 0, true);
  const { held, problem } = useHistory(run);
  const incidents = useAnswer(address("api/v1/incidents", { run, limit: 300 }), 10_000);
  const kinds = Object.keys(held?.kinds ?? {});
  const kind = query.kind ?? answer.data?.kind;
  const known = held ?? answer.data;
  const extent = known ? [known.first_step, Math.max(known.first_step, known.last_step)] : [0, 1];
  const view = viewOf(query, extent);
  const chosen = /^\d+$/.test(query.series ?? "") ? Number(query.series) : null;
  const opened = useAnswer(kind && chosen !== null ? address("api/v1/history/series", { run, kind, statistic, series: chosen, from: query.from, to: query.to, columns }) : null, isLive ? 10_000 : 0);

  const map = useMemo(() => answer.data && readAnswer(answer.data), [answer.data]);
  const shown = useMemo(() => map && (isRelative ? besideMedian(map) : map), [map, isRelative]);
  const scale = useMemo(() => shown && scaleOf(shown.values.filter((one, at) => shown.states[at] === VALUE)), [shown]);
  const set = (changes) => go(layersLink(run, { ...query, ...changes }));
  const onView = (next) => set({ from: next?.[0], to: next?.[1] });
  const onOpen = (row) => set({ series: row.series });
  const found = opened.data?.series[0];
  const open = incidents.data?.incidents ?? [];
  return (
    <>
      <h1>{seen(run, 120)}</h1>
      <RunTabs run={run} current="Layers x steps" query={query} />
      {problem && <NoHistory problem={problem} />}
      {held && kinds.length === 0 && <p class="muted">The history of this run holds no tensor yet.</p>}
      {held && kinds.length > 0 && (
        <Toolbar view={view} extent={extent} onView={onView}>
          <Choice label="kind" value={kind} options={kinds.map((one) => [one, `${one} (${held.kinds[one]})`])} onChange={(value) => set({ kind: value, series: "" })} />
          <Choice label="statistic" value={statistic} options={held.statistics.map((one) => [one, one])} onChange={(value) => set({ statistic: value })} />
          <Choice label="of a column, the" value={of} options={Object.entries(OF_WORDS).filter(([name]) => name !== "avg" || !MADE.includes(statistic))} onChange={(value) => set({ of: value })} />
          <Choice label="colour" value={isRelative ? "row" : "all"} options={[["all", "one scale"], ["row", "each row beside its median"]]} onChange={(value) => set({ colour: value === "row" ? "row" : "" })} />
        </Toolbar>
      )}
      {answer.error && !problem && <Unanswered error={answer.error} extent={extent} onView={onView} />}
      {shown && shown.num_columns > 0 && (
        <>
          <p class="muted">{plural(shown.rows.reduce((sum, one) => sum + one.num, 0), "tensor")} in the order of the forward, a column is {shown.width === 1 ? "one step" : plural(shown.width, "step")}</p>
          <HeatMap map={map} painted={shown} scale={scale} view={view} extent={extent} onView={onView} onOpen={onOpen} chosen={chosen} incidents={open} />
          <Legend scale={scale} unit={isRelative ? " x the row's median" : ""} />
          {found && <Plot title={`${statistic} of ${found.name} (${kind})`} columns={{ ...found, width: opened.data.width }} view={view} extent={extent} onView={onView} isLog={query.log === "1"} incidents={open} />}
          {opened.error && <p class="problem" role="alert">{seen(opened.error.message)}</p>}
          <DataTable map={map} onOpen={onOpen} />
        </>
      )}
    </>
  );
}
