// Runs over each other, by step, tokens or time; and where two of them diverge.
import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";

import { colours } from "./colours.js";
import { AXIS_PX, axisOf, labelled, movedView } from "./plot.jsx";
import { compareLink, go, layersLink, runLink } from "./route.js";
import { address, useAnswer } from "./server.js";
import { grouped, number, plural, seen } from "./words.js";

const SLOTS = ["a", "b", "c", "d"]; // In the address: which runs, in the order in which they are drawn.
const NTH = ["first", "second", "third", "fourth"];
const LINES = [["line", []], ["line2", [8, 4]], ["line3", [2, 3]], ["line4", [10, 3, 2, 3]]];
const AROUND = 60;
const SCALAR = "scalar";
const TOKENS = /tokens/i;
const BY = { step: "step", tokens: "tokens", time: "time since its first step" };

// What a run's history has: its extent, its logged values, its kinds; why there is none.
function useRun(run) {
  const held = useAnswer(run ? address("api/v1/history", { run }) : null, 15_000);
  return { run, held: held.data, problem: held.error };
}

// Whether a run is known not to have what is asked of it: it is not asked.
const lacks = ({ held }, asked) => asked.kind === SCALAR && held.scalars.length === held.num_scalars && !held.scalars.some((one) => one.name === asked.name);

function useValues(one, asked) {
  const url = one.run && one.held && asked && !lacks(one, asked) ? address("api/v1/history/series", { run: one.run, ...asked }) : null;
  return useAnswer(url, asked?.to ? 0 : 10_000, true);
}

const tokensOf = (held) => held?.scalars.find((one) => TOKENS.test(one.name))?.name;

// Where a step lies by another measure: between two columns in proportion. null: the measure is no total that grows with the
// steps, as what is counted anew in each step is none.
function placesOf(columns, width) {
  const known = columns.steps.map((step, at) => [step + (width - 1) / 2, columns.mean[at]]).filter(([, value]) => value !== null);
  if (known.some(([, value], at) => at && value < known[at - 1][1])) return null;
  let at = 0;
  return (step) => {
    while (at > 0 && known[at][0] > step) at -= 1;
    while (at < known.length - 2 && known[at + 1][0] < step) at += 1;
    const [one, other] = [known[at], known[at + 1]];
    if (!other) return one && one[0] === step ? one[1] : null;
    const share = (step - one[0]) / (other[0] - one[0]);
    return share < 0 || share > 1 ? null : one[1] + share * (other[1] - one[1]);
  };
}

// One run's line: points [x, y] in rising order of x.
function lineOf(columns, width, placeOf) {
  const half = (width - 1) / 2;
  const points = columns.steps.map((step, at) => [placeOf ? placeOf(step + half) : step + half, columns.mean[at] ?? columns.last[at]]).filter(([x]) => x !== null);
  return points.filter(([x], at) => !at || x > points[at - 1][0]);
}

function sentence(line) {
  const values = line.map(([, y]) => y).filter((one) => one !== null);
  if (!values.length) return "nothing in view";
  const bad = line.length - values.length;
  return `last ${number(values.at(-1), 5)}, ${number(Math.min(...values))} to ${number(Math.max(...values))}${bad ? `, not finite in ${plural(bad, "column")}` : ""}`;
}

function Overlay({ title, lines, by, view, extent, onView, isLog }) {
  const place = useRef(null);
  const plot = useRef(null);
  const now = useRef({});
  const drawn = lines.filter((one) => one.line.length > 0);
  const isPositive = drawn.every((one) => one.line.every(([, y]) => y === null || y > 0));
  const kind = isLog ? (isPositive ? 3 : 4) : 1;
  now.current = { onView, by, view };
  const shape = `${kind}/${by}/${drawn.map((one) => one.at).join()}`;
  useEffect(() => {
    const tones = colours();
    const axis = axisOf(tones);
    const own = new uPlot(
      {
        width: Math.max(200, place.current.clientWidth),
        height: 320,
        padding: [12, 18, 0, 0],
        legend: { show: false },
        cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: false } },
        scales: { x: { time: false }, y: { distr: kind } },
        axes: [
          { ...axis, values: (_, ticks) => ticks.map((one) => (now.current.by === "step" ? (Number.isInteger(one) ? grouped(one) : "") : number(one, 3))) },
          { ...axis, size: AXIS_PX, values: labelled },
        ],
        series: [{}, ...drawn.map(({ at }) => ({ stroke: tones[LINES[at][0]], dash: LINES[at][1], width: 1.6, spanGaps: true, points: { show: false } }))],
        hooks: {
          setSelect: [
            (one) => {
              const { left, width } = one.select;
              one.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
              if (width >= 4 && now.current.by === "step") now.current.onView([Math.floor(one.posToVal(left, "x")), Math.ceil(one.posToVal(left + width, "x"))]);
            },
          ],
        },
      },
      [[], ...drawn.map(() => [])],
      place.current,
    );
    own.over.addEventListener("dblclick", () => now.current.onView(null));
    plot.current = own;
    const watch = new ResizeObserver(() => {
      const width = place.current?.clientWidth;
      if (width && width !== own.width) own.setSize({ width, height: 320 });
    });
    watch.observe(place.current);
    return () => {
      watch.disconnect();
      own.destroy();
    };
  }, [shape]);
  useEffect(() => {
    if (drawn.length) plot.current.setData(uPlot.join(drawn.map((one) => [one.line.map(([x]) => x), one.line.map(([, y]) => y)])));
  });
  const keyed = (event) => {
    const moved = by === "step" ? movedView(event.key, view, extent) : undefined;
    if (moved === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    onView(moved);
  };
  const words = lines.map((one) => `${seen(one.run, 60)}: ${sentence(one.line)}`).join(". ");
  return (
    <figure class="plot">
      <figcaption><b>{seen(title, 160)}</b> <span class="muted">over {BY[by]}</span></figcaption>
      <ul class="plain">
        {lines.map((one) => <li key={one.at}><span class={`keyed ${LINES[one.at][0]}`} aria-hidden="true" /><a href={runLink(one.run)}>{seen(one.run, 80)}</a> <span class="muted">{one.problem ? seen(one.problem, 300) : sentence(one.line)}</span></li>)}
      </ul>
      <div class="canvas" tabIndex={0} role="group" aria-label={`${seen(title, 120)} over ${BY[by]}. ${words}${by === "step" ? ". Arrows move, plus and minus zoom, 0 shows all." : ""}`} onKeyDown={keyed}><div ref={place} /></div>
    </figure>
  );
}

const lies = (share) => `${number(100 * Math.abs(share), 3)} % ${share < 0 ? "below" : "above"}`;

function evidenceOf(one) {
  if (one.difference === null) return `${one.values.map((value) => (value === null ? "not finite" : number(value, 5))).join(" and ")}: one of them is not finite`;
  const beyond = one.noise > 0 ? `${number(Math.abs(one.difference - one.usual) / one.noise, 3)} deviations beyond the usual ${lies(one.usual)} \u00b1 ${number(100 * one.noise, 3)} %` : "equal before, but for rounding";
  return `${one.values.map((value) => number(value, 6)).join(" and ")}: the first is ${lies(one.difference)} the second, ${beyond}`;
}

function Where({ one, runs, statistic }) {
  const span = { from: Math.max(0, one.step - AROUND), to: one.step + AROUND };
  const href = (at) => (one.kind === SCALAR ? runLink(runs[at], span) : layersLink(runs[at], { kind: one.kind, statistic, series: one.series[at], ...span }));
  return <><a href={href(1)}>{seen(one.name, 160)}</a> <span class="muted">{seen(one.kind, 40)}{one.place ? ` (${seen(one.place, 40)})` : ""}; in <a href={href(0)}>{seen(runs[0], 60)}</a></span></>;
}

function Divergence({ one, other, statistic }) {
  const answer = useAnswer(address("api/v1/history/divergence", { run: [one, other], statistic }));
  const told = answer.data;
  const names = <>{seen(one, 60)} and {seen(other, 60)}</>;
  if (!told) return <p role={answer.error ? "alert" : "status"} class={answer.error ? "problem" : "muted"}>{answer.error ? seen(answer.error.message, 400) : <>Looking where {names} diverge.</>}</p>;
  const steps = (step) => (told.width > 1 ? `steps ${grouped(step)} to ${grouped(step + told.width - 1)}` : `step ${grouped(step)}`);
  const isNone = told.last_step < told.first_step;
  return (
    <section class="whatif">
      <h3>{names}</h3>
      {isNone ? <p>They have no step in common.</p> : !told.num_series ? <p>They have no tensor and no value of the same name and kind.</p> : told.first ? (
        <>
          <p role="status">They diverge at <b>{steps(told.first.step)}</b>, first in <Where one={told.first} runs={told.runs} statistic={told.statistic} />: {evidenceOf(told.first)}.</p>
          {told.others.length > 0 && (
            <details><summary>{grouped(told.num_diverged - 1)} more diverged behind it{told.num_diverged - 1 > told.others.length ? `: the first ${told.others.length}` : ""}</summary>
              <ol>{told.others.map((item) => <li key={`${item.kind}/${item.name}/${item.place}`}>{steps(item.step)}: <Where one={item} runs={told.runs} statistic={told.statistic} />: {evidenceOf(item)}</li>)}</ol>
            </details>
          )}
        </>
      ) : <p role="status">They do not diverge beyond noise in steps {grouped(told.first_step)} to {grouped(told.last_step)}.</p>}
      <p class="muted">
        {told.statistic} of {plural(told.num_series, "series").replace("seriess", "series")} that both have{told.num_lacking ? ` (${grouped(told.num_lacking)} only one has)` : ""}, over the steps that both have.
        {told.num_apart > 0 && ` ${grouped(told.num_apart)} differ from their first steps on: other data, or another seed; that is their noise.`}
        {told.width > 1 && " Single steps of that time are no longer kept."}
      </p>
    </section>
  );
}

const METHOD = "Of every tensor and value that both runs have, the difference at a step, over the size of the two, is held against what it was in up to 64 steps before: their median, and their median absolute deviation. A series has diverged at the first of 3 steps in a row that are more than 8 deviations away, or at the first in which one run is finite and the other is not; what was equal in all of those steps, at the first difference beyond rounding. At one step that comes first which is made first: weights, the forward in its order, the loss, the backward in its order.";

function Choice({ label, value, options, onChange }) {
  return (
    <label>{label} <select aria-label={label} value={value} onChange={(event) => onChange(event.currentTarget.value)}>
      {options.map(([name, words]) => <option key={name} value={name}>{words}</option>)}
    </select></label>
  );
}

export function CompareView({ query }) {
  const all = useAnswer(address("api/v1/runs"), 10_000);
  const names = all.data?.runs.map((one) => one.run) ?? [];
  // Without a choice: the first two that there are.
  const wanted = { ...query };
  wanted.a ||= names[0];
  wanted.b ||= names.find((one) => one !== wanted.a);
  const runs = SLOTS.map((slot) => useRun(wanted[slot]));
  const there = runs.filter((one) => one.run);
  const scalars = [...new Set(there.flatMap((one) => one.held?.scalars.map((scalar) => scalar.name) ?? []))];
  const kinds = [...new Set(there.flatMap((one) => Object.keys(one.held?.kinds ?? {})))];
  const kind = query.kind ?? SCALAR;
  const name = query.series ?? (kind === SCALAR ? scalars.find((one) => one === "loss") ?? scalars.find((one) => /loss/i.test(one)) ?? scalars[0] : undefined);
  const statistic = kind === SCALAR ? "value" : query.statistic ?? "std";
  const hasTokens = there.length > 0 && there.every((one) => !one.held || tokensOf(one.held));
  const by = query.by === "time" || (query.by === "tokens" && hasTokens) ? query.by : "step";
  const columns = Math.min(1500, Math.max(200, Math.round((globalThis.innerWidth ?? 1000) - 80)));
  const extents = there.filter((one) => one.held && one.held.last_step >= 0).map((one) => [one.held.first_step, one.held.last_step]);
  const extent = extents.length ? [Math.min(...extents.map(([first]) => first)), Math.max(...extents.map(([, last]) => last))] : [0, 1];
  const span = by === "step" ? { from: query.from, to: query.to } : {};
  const asked = name ? { kind, name, statistic, columns, ...span } : null;
  const values = runs.map((one) => useValues(one, asked));
  const places = runs.map((one) => useValues(one, by === "time" ? { kind: "steps", statistic: "elapsed", columns } : by === "tokens" ? { kind: SCALAR, name: tokensOf(one.held), columns } : null));
  const tensors = useAnswer(kind !== SCALAR && wanted.a ? address("api/v1/history", { run: wanted.a, find: query.series ?? "" }) : null);
  const [typed, setTyped] = useState(query.series ?? "");
  useEffect(() => setTyped(query.series ?? ""), [query.series]);
  const set = (changes) => go(compareLink({ ...query, ...changes }));
  const view = /^\d+$/.test(query.from ?? "") && /^\d+$/.test(query.to ?? "") && Number(query.to) > Number(query.from) ? [Number(query.from), Number(query.to)] : extent;
  if (!all.data) return <p class="muted">{all.error ? seen(all.error.message) : "Asking the daemon."}</p>;

  const lines = runs.map((one, at) => {
    if (!one.run) return null;
    const isLacking = asked && one.held && lacks(one, asked);
    const found = isLacking ? undefined : values[at].data?.series.find((series) => series.name === name);
    const where = places[at].data?.series[0];
    const placed = by === "step" ? null : where && placesOf(where, places[at].data.width);
    const problem = one.problem?.message ?? (isLacking ? "it has logged no value of this name" : values[at].error && !found ? values[at].error.message : by === "tokens" && where && !placed ? "its tokens are no total that grows with the steps" : "");
    return { at, run: one.run, problem, line: found && (by === "step" || placed) ? lineOf(found, values[at].data.width, placed) : [] };
  }).filter(Boolean);
  // A history answers one question at a time: the lines come first.
  const isDrawn = !name || lines.every((one) => one.line.length > 0 || one.problem);
  const served = (run) => names.includes(run);
  const others = there.slice(1).filter((one) => one.run !== there[0].run && served(one.run) && served(there[0].run));
  return (
    <>
      <h1>Runs over each other</h1>
      {names.length < 2 && <p class="notice">One run is served here: two are needed to compare them.</p>}
      <form class="choices" onSubmit={(event) => { event.preventDefault(); set({ series: typed }); }}>
        {SLOTS.slice(0, Math.min(SLOTS.length, Math.max(2, there.length + 1), Math.max(2, names.length))).map((slot, at) => (
          <Choice key={slot} label={`${NTH[at]} run`} value={wanted[slot] ?? ""} options={[...(at < 2 ? [] : [["", "none"]]), ...names.map((one) => [one, seen(one, 60)])]} onChange={(value) => set({ [slot]: value, from: "", to: "" })} />
        ))}
        <Choice label="by" value={by} options={Object.entries(BY).filter(([one]) => one !== "tokens" || hasTokens)} onChange={(value) => set({ by: value === "step" ? "" : value })} />
        <Choice label="kind" value={kind} options={[[SCALAR, "logged value"], ...kinds.map((one) => [one, one])]} onChange={(value) => set({ kind: value === SCALAR ? "" : value, series: "", statistic: "" })} />
        {kind === SCALAR ? <Choice label="value" value={name ?? ""} options={scalars.map((one) => [one, seen(one, 60)])} onChange={(value) => set({ series: value })} /> : (
          <>
            <label>tensor <input aria-label="tensor" list="tensors" value={typed} maxLength={300} onInput={(event) => setTyped(event.currentTarget.value)} onChange={(event) => set({ series: event.currentTarget.value })} placeholder="part of its name" /></label>
            <datalist id="tensors">{(tensors.data?.tensors ?? []).filter((one) => one.kind === kind).slice(0, 50).map((one) => <option key={one.series} value={one.name} />)}</datalist>
            <Choice label="statistic" value={statistic} options={(there[0]?.held?.statistics ?? [statistic]).map((one) => [one, one])} onChange={(value) => set({ statistic: value })} />
          </>
        )}
        <label class="check"><span>scale</span><span><input type="checkbox" checked={query.log === "1"} onChange={(event) => set({ log: event.currentTarget.checked ? "1" : "" })} /> logarithm</span></label>
        {by === "step" && <button type="button" disabled={view === extent} onClick={() => set({ from: "", to: "" })}>Whole runs</button>}
      </form>
      {name ? <Overlay title={kind === SCALAR ? name : `${statistic} of ${name} (${kind})`} lines={lines} by={by} view={view} extent={extent} isLog={query.log === "1"} onView={(next) => set({ from: next?.[0], to: next?.[1] })} /> : <p class="muted">{kind === SCALAR ? "None of these runs has logged a value yet, or none has a history." : "Type the name of a tensor."}</p>}
      <h2>Where they diverge</h2>
      {isDrawn && others.map((one) => <Divergence key={one.run} one={there[0].run} other={one.run} statistic={kind === SCALAR || !["mean", "std", "min", "max", "skew", "kurtosis"].includes(statistic) ? "std" : statistic} />)}
      {others.length === 0 && <p class="muted">Choose two different runs.</p>}
      <details><summary>How that is told</summary><p>{METHOD}</p></details>
    </>
  );
}
