// Experts and heads: how much each expert of a router gets, and what each head of an attention does, over steps.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { scaleOf } from "./colours.js";
import { Choice, Legend, VALUE, paint, unpacked } from "./heat.jsx";
import { Plot } from "./plot.jsx";
import { expertsLink, go } from "./route.js";
import { NoHistory, Toolbar, Unanswered, useHistory, viewOf } from "./run.jsx";
import { address, useAnswer } from "./server.js";
import { RunTabs } from "./tabs.jsx";
import { grouped, number, plural, seen, seenEnd } from "./words.js";

const KINDS = { router: "experts", attention: "heads" };
const NONE = [];
const ROUTER_SERIES = ["entropy", "max_over_mean", "inactive"];

function SwitchOn({ kind }) {
  const text = { router: "probes: {router: {step_interval: 10}}", attention: "probes: {attention: {step_interval: 100}}" }[kind];
  const what = { router: "No load of experts is in this run's history", attention: "Nothing of single heads is in this run's history" }[kind];
  return (
    <p class="notice">
      {what}. Write <code>{text}</code> into the trainer's configuration, which may be done while it trains; what the history holds comes with the
      next steps{kind === "router" ? ", where the model has routers that are found or named as targets" : ", where attention is computed by functions that can be seen"}.
    </p>
  );
}

function describe(map, row, column) {
  const first = map.first_step + column * map.width;
  const steps = map.width > 1 ? `steps ${grouped(first)} to ${grouped(first + map.width - 1)}` : `step ${grouped(first)}`;
  const cell = row * map.num_columns + column;
  const state = { 0: "not measured", 4: "has a value that is not finite" }[map.states[cell]];
  const value = Number.isFinite(map.values[cell]) ? (map.balance ? `${number(100 * map.values[cell], 4)} % of the tokens` : `${map.statistic} ${number(map.values[cell], 5)}`) : "";
  return `${map.axis} ${row}, ${steps}: ${[value, state].filter(Boolean).join(", ")}`;
}

function HeatMap({ map, scale }) {
  const [cursor, onCursor] = useState(null);
  const canvas = useRef(null);
  const frame = useRef(null);
  const [width, setWidth] = useState(0);
  const rowPx = Math.max(2, Math.min(20, Math.floor(480 / map.num_values)));
  const height = rowPx * map.num_values;
  const every = Math.max(1, Math.ceil(13 / rowPx));
  useEffect(() => {
    const watch = new ResizeObserver(() => setWidth(frame.current?.clientWidth ?? 0));
    watch.observe(frame.current);
    return () => watch.disconnect();
  }, []);
  useEffect(() => {
    if (width) paint(canvas.current, map, map.num_values, scale);
  }, [map, scale, width, height]);
  const within = (row, column) => ({ row: Math.max(0, Math.min(map.num_values - 1, row)), column: Math.max(0, Math.min(map.num_columns - 1, column)) });
  const at = (event) => {
    const box = canvas.current.getBoundingClientRect();
    return within(Math.floor(((event.clientY - box.top) / box.height) * map.num_values), Math.floor(((event.clientX - box.left) / box.width) * map.num_columns));
  };
  const keyed = (event) => {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-10, 0], PageDown: [10, 0] };
    if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const from = cursor ?? { row: 0, column: map.num_columns - 1 };
    onCursor(within(from.row + moves[event.key][0], from.column + moves[event.key][1]));
  };
  const x = (column) => (column * width) / map.num_columns;
  const ticks = Array.from({ length: 5 }, (_, one) => Math.round((one * (map.num_columns - 1)) / 4));
  return (
    <div class="heat">
      <div class="body">
        <div class="labels" style={{ height: `${height}px` }} aria-hidden="true">
          {Array.from({ length: map.num_values }, (_, one) => one % every === 0 && <span key={one} style={{ top: `${one * rowPx}px` }}>{map.axis} {one}</span>)}
        </div>
        <div class="frame" ref={frame} style={{ height: `${height}px` }}>
          <canvas
            ref={canvas} tabIndex={0} role="img" onKeyDown={keyed} onPointerMove={(event) => onCursor(at(event))} onPointerLeave={() => onCursor(null)}
            aria-label={`${map.statistic} of each ${map.axis} of ${seen(map.name, 120)} over steps; arrows move over cells. The table below says the same.`}
          />
          {cursor && width > 0 && <div class="cursor" style={{ left: `${x(cursor.column)}px`, top: `${cursor.row * rowPx}px`, width: `${Math.max(3, x(1))}px`, height: `${rowPx}px` }} />}
        </div>
      </div>
      <div class="ticks"><div class="labels" /><div class="row">{ticks.map((one, place) => <span key={place}>{grouped(map.first_step + one * map.width)}</span>)}</div></div>
      <p class="readout" aria-live="polite">{cursor && cursor.row < map.num_values && cursor.column < map.num_columns ? describe(map, cursor.row, cursor.column) : "Point at a cell to read it."}</p>
    </div>
  );
}

function ValueTable({ map }) {
  const [all, setAll] = useState(false);
  const isLoad = map.balance !== null;
  const last = map.last_step;
  const rows = useMemo(() => {
    const numbered = map.of_values.map((one, at) => ({ ...one, at }));
    // Experts that got no token for the longest come first, then the least; heads in the order of their value.
    return numbered.sort((a, b) => (isLoad ? a.last_step_above_0 - b.last_step_above_0 : 0) || (a.mean ?? Infinity) - (b.mean ?? Infinity) || a.at - b.at);
  }, [map]);
  const share = (value) => (value === null ? "\u2013" : isLoad ? `${number(100 * value, 3)} %` : number(value));
  return (
    <div class="wide">
      <table>
        <caption>{isLoad ? "Experts, those without tokens first" : "Heads, the smallest first"}</caption>
        <thead><tr><th class="number">{isLoad ? "Expert" : "Head"}</th><th class="number">{isLoad ? "Mean share" : "Mean"}</th><th class="number">{isLoad ? "Last share" : "Last"}</th><th class="number">Least{isLoad ? " of a rank" : ""}</th><th class="number">Greatest{isLoad ? " of a rank" : ""}</th>{isLoad && <th>Tokens</th>}<th class="number">Not finite</th></tr></thead>
        <tbody>
          {rows.slice(0, all ? rows.length : 16).map((one) => (
            <tr key={one.at}>
              <td class="number">{one.at}</td><td class="number">{share(one.mean)}</td><td class="number">{share(one.last)}</td><td class="number">{number(one.least)}</td><td class="number">{number(one.greatest)}</td>
              {isLoad && <td class={one.last_step_above_0 <= last - map.width ? "critical" : ""}>{one.last_step_above_0 < 0 ? "none in these steps" : one.last_step_above_0 <= last - map.width ? `none since step ${grouped(one.last_step_above_0)}` : ""}</td>}
              <td class={`number ${one.num_bad ? "critical" : ""}`}>{one.num_bad || ""}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {rows.length > 16 && !all && <button type="button" onClick={() => setAll(true)}>{plural(rows.length - 16, "more row")}</button>}
    </div>
  );
}

function ofBalance(map, name) {
  const values = map.balance[name];
  return { width: map.width, steps: values.map((_, at) => map.first_step + at * map.width), least: values, greatest: values, mean: values, last: values, nans: values.map(() => 0), infs: values.map(() => 0) };
}

const BALANCE = { entropy: "Entropy of the load, over that of equal shares", max_over_mean: "Largest share over the mean share", idle: "Experts without a token" };

function lastOf(values) {
  return values.findLast((one) => one !== null) ?? null;
}

// What the probe itself has of the router beside its load: a number a step.
function RouterSeries({ run, map, view, query, onView }) {
  const base = map.name.replace(/:load$/, "");
  // Its own name is always known: a question of which nothing is known would be refused.
  const names = [map.name, ...ROUTER_SERIES.map((one) => `${base}:${one}`)];
  const asked = { run, kind: "router", statistic: "mean", name: names, from: query.from, to: query.to, columns: 800 };
  const answer = useAnswer(address("api/v1/history/series", asked), 0, true);
  const found = useMemo(() => (answer.data?.series ?? []).filter((one) => one.name !== map.name).map((one) => ({ ...one, width: answer.data.width })), [answer.data]);
  return found.map((one) => <Plot key={one.series} title={`${one.name} (router)`} columns={one} view={view} extent={view} onView={onView} incidents={NONE} />);
}

export function ExpertsView({ name: run, query }) {
  const { held, problem } = useHistory(run);
  const kind = query.kind in KINDS ? query.kind : "router";
  const columns = Math.min(1200, Math.max(120, Math.round((globalThis.innerWidth ?? 1000) - 260)));
  const asked = { run, kind, statistic: query.statistic, series: query.series, rank: query.rank, from: query.from, to: query.to, columns };
  const answer = useAnswer(held ? address("api/v1/history/vectors", asked) : null, query.to ? 0 : 10_000, true);
  const told = answer.data?.run === run && answer.data.kind === kind ? answer.data : null;
  const map = useMemo(() => told?.values && { ...told, values: unpacked(told.values, Float32Array), states: unpacked(told.states, Uint8Array) }, [told]);
  const scale = useMemo(() => map && scaleOf(map.values.filter((one, at) => map.states[at] === VALUE)), [map]);
  const plots = useMemo(() => (map?.balance ? Object.keys(BALANCE).map((name) => [name, ofBalance(map, name)]) : []), [map]);
  const set = (changes) => go(expertsLink(run, { ...query, ...changes }));
  const extent = map ? [Math.min(map.first_step, held.first_step), Math.max(map.last_step, held.last_step)] : [0, 1];
  const view = map ? viewOf(query, [map.first_step, map.last_step]) : [0, 1];
  const onView = (next) => set({ from: next?.[0], to: next?.[1] });
  const of = (told?.choices ?? []).filter((one) => one.statistic === (map?.statistic ?? one.statistic));
  const own = of.find((one) => one.series === map?.series);
  const statistics = [...new Set((told?.choices ?? []).map((one) => one.statistic))];
  const idle = map?.balance ? lastOf(map.balance.idle) : null;
  return (
    <>
      <h1>{seen(run, 120)}</h1>
      <RunTabs run={run} current="Experts and heads" query={query} />
      {problem && <NoHistory problem={problem} />}
      {held && (
        <Toolbar view={view} extent={extent} onView={onView}>
          <Choice label="what" value={kind} options={Object.entries(KINDS)} onChange={(value) => set({ kind: value, series: "", statistic: "", rank: "" })} />
          {of.length > 0 && <Choice label="of" value={map?.series} options={of.map((one) => [one.series, seenEnd(one.name, 60)])} onChange={(value) => set({ series: value, rank: "" })} />}
          {statistics.length > 1 && <Choice label="statistic" value={map?.statistic} options={statistics.map((one) => [one, one])} onChange={(value) => set({ statistic: value, series: "", rank: "" })} />}
          {own && own.ranks.length > 1 && <Choice label="rank" value={map.rank ?? ""} options={[...(map.balance ? [["", "all ranks"]] : []), ...own.ranks.slice(0, 300).map((one) => [one, `rank ${one}`])]} onChange={(value) => set({ rank: value })} />}
        </Toolbar>
      )}
      {answer.error && !problem && <Unanswered error={answer.error} extent={held ? [held.first_step, held.last_step] : extent} onView={onView} />}
      {told && told.choices.length === 0 && <SwitchOn kind={kind} />}
      {map && map.num_columns > 0 && (
        <>
          <p>
            {map.balance
              ? <>{plural(map.num_values, "expert")}; in the last column {idle === null ? "nothing was measured" : <span class={idle ? "critical" : "ok"}>{idle ? `${idle} without a token` : "each has tokens"}</span>}, the largest share is {number(lastOf(map.balance.max_over_mean), 3)} times the mean, the entropy {number(lastOf(map.balance.entropy), 3)} of that of equal shares.</>
              : <>{plural(map.num_values, "head")} of rank {map.rank}. Ranks of one tensor-parallel group hold other heads.</>}
            {" "}<span class="muted">A column is {map.width === 1 ? "one step" : plural(map.width, "step")}.</span>
          </p>
          <HeatMap map={map} scale={scale} />
          <Legend scale={scale} unit={map.balance ? " of the tokens" : ""} />
          {plots.map(([name, columns]) => <Plot key={name} title={BALANCE[name]} columns={columns} view={view} extent={extent} onView={onView} incidents={NONE} />)}
          {map.balance && <RouterSeries run={run} map={map} view={view} query={query} onView={onView} />}
          <ValueTable map={map} />
        </>
      )}
    </>
  );
}
