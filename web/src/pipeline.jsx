// One step as its ranks ran it, and an incident on it: from one anomaly to the next in the causal order.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { colours } from "./colours.js";
import { useEdited } from "./edited.js";
import { go, incidentLink, pipelineLink } from "./route.js";
import { address, useAnswer } from "./server.js";
import { RunTabs } from "./tabs.jsx";
import { grouped, number, plural, seen, severityClass } from "./words.js";

const WAYS = { F: "forward", B: "backward", W: "weight gradients" };
const BEFORE = ["weights"];
const BEHIND = ["loss", "metrics", "gradients", "schedule", "norm", "optimizer", "comm", "other"];
const MARKS = { cause: "came first", nonfinite: "NaN or inf", finite: "out of its range" };
const RANK = { cause: 0, nonfinite: 1, finite: 2 };
const EXTRA_PX = 62;
const A_PAGE = 40; // Rows of a table at once.
const LOGGED = "logged";

function useWidth(frame) {
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const watch = new ResizeObserver(() => setWidth(frame.current?.clientWidth ?? 0));
    watch.observe(frame.current);
    return () => watch.disconnect();
  }, []);
  return width;
}

// Where everything stands: rows of ranks, one more for what no rank shows; columns of passes between those of what is of the step.
function layOut(told) {
  const here = told.events.map((one, at) => ({ ...one, at })).filter((one) => one.step === told.step);
  const of = (names) => names.filter((name) => here.some((one) => one.phase === name && !one.way));
  const [before, behind] = [of(BEFORE), of(BEHIND)];
  const rows = told.rows.map((one) => ({ label: one.label, stage: one.pp_stage, passes: told.orders[one.order] ?? [] }));
  if (here.some((one) => !one.rows.length)) rows.push({ label: LOGGED, stage: null, passes: [] });
  const cells = [];
  for (const one of here) {
    for (const row of one.rows.length ? one.rows : [rows.length - 1]) {
      const passes = (rows[row]?.passes ?? []).filter(([way, chunk, micro]) =>
        (way === one.way || (one.way === "B" && way === "W")) && chunk === one.vpp_stage && (one.micro_step === null || micro === -1 || micro === one.micro_step));
      if (one.way && passes.length) for (const [, , , column] of passes) cells.push({ at: one.at, mark: one.mark, row, kind: "pass", column });
      else {
        const name = one.way ? null : one.phase;
        const from = before.indexOf(name);
        cells.push({ at: one.at, mark: one.mark, row, kind: from >= 0 ? "before" : "behind", column: from >= 0 ? from : Math.max(0, behind.indexOf(name)) });
      }
    }
  }
  // What is drawn of several at one place: whether it has been reached, and the gravest mark.
  const places = new Map();
  for (const one of cells) {
    const key = `${one.row}/${one.kind}/${one.column}`;
    const known = places.get(key);
    places.set(key, known ? { ...known, mark: RANK[one.mark] < RANK[known.mark] ? one.mark : known.mark } : one);
  }
  return { rows, before, behind, cells, places: [...places.values()], num: Math.max(told.num_columns, 1) };
}

function scaleOf(plan, width) {
  const extra = Math.min(EXTRA_PX, (0.45 * width) / Math.max(1, plan.before.length + plan.behind.length));
  const left = plan.before.length * extra;
  const pass = Math.max(0.5, (width - left - plan.behind.length * extra) / plan.num);
  const x = (kind, column) => (kind === "before" ? column * extra : kind === "pass" ? left + column * pass : left + plan.num * pass + column * extra);
  return { x, wide: (kind) => (kind === "pass" ? pass : extra), pass, extra };
}

function paint(canvas, plan, scale, rowPx, current) {
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(canvas.clientWidth * ratio);
  canvas.height = Math.round(canvas.clientHeight * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const tones = colours();
  const shades = { F: tones.line, B: tones.backward, W: tones.wgrad };
  const gap = rowPx >= 8 ? 1.5 : 0;
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  plan.rows.forEach((row, at) => {
    for (const [way, , micro, column] of row.passes) {
      const [left, wide] = [scale.x("pass", column), scale.pass];
      context.fillStyle = shades[way];
      context.globalAlpha = 0.3;
      context.fillRect(left, at * rowPx + gap, Math.max(0.5, wide - (wide > 4 ? 1 : 0)), rowPx - 2 * gap);
      context.globalAlpha = 1;
      if (wide >= 18 && rowPx >= 14) {
        context.fillStyle = tones.ink;
        context.fillText(micro === -1 ? `${way}*` : wide >= 26 ? `${way}${micro}` : String(micro), left + 3, at * rowPx + rowPx / 2);
      }
    }
  });
  const middle = (cell) => [scale.x(cell.kind, cell.column) + scale.wide(cell.kind) / 2, cell.row * rowPx + rowPx / 2];
  const size = (cell) => Math.max(2, Math.min(scale.wide(cell.kind) / 2 - 1, rowPx / 2 - 1, 7));
  for (const cell of plan.places) {
    const [x, y] = middle(cell);
    context.beginPath();
    context.arc(x, y, size(cell), 0, 7);
    context.fillStyle = cell.mark === "finite" ? tones.warning : tones.nan;
    context.globalAlpha = cell.at <= current ? 1 : 0.3;
    context.fill();
    if (cell.mark === "cause") {
      context.globalAlpha = 1;
      context.lineWidth = 2;
      context.strokeStyle = tones.ink;
      context.stroke();
    }
  }
  context.globalAlpha = 0.8;
  context.strokeStyle = tones.ink;
  context.lineWidth = 1.2;
  context.beginPath();
  let last = -1;
  for (const cell of plan.cells) {
    if (cell.at > current) break;
    if (cell.at === last) continue;
    context[last < 0 ? "moveTo" : "lineTo"](...middle(cell));
    last = cell.at;
  }
  context.stroke();
}

function passWords(row, column) {
  const found = row?.passes.find((one) => one[3] === column);
  if (!found) return "";
  const [way, chunk, micro] = found;
  const has = row.passes.some((one) => one[1] !== chunk);
  return `${WAYS[way]} of ${micro === -1 ? "all micro-steps" : `micro-step ${micro}`}${has ? ` through chunk ${chunk}` : ""}`;
}

function whereWords(one) {
  const at = one.micro_step === null ? "" : `, micro-step ${one.micro_step}`;
  return `${one.ranks ? `${one.ranks}` : LOGGED}, ${one.phase}${at}`;
}

function Drawing({ told, plan, current, onAt, onKey }) {
  const canvas = useRef(null);
  const frame = useRef(null);
  const width = useWidth(frame);
  const [pointed, setPointed] = useState(null);
  const rowPx = Math.max(3, Math.min(26, Math.floor(560 / plan.rows.length)));
  const height = rowPx * plan.rows.length;
  const every = Math.max(1, Math.ceil(13 / rowPx));
  const scale = useMemo(() => scaleOf(plan, width), [plan, width]);
  useEffect(() => {
    if (width) paint(canvas.current, plan, scale, rowPx, current);
  }, [plan, scale, width, height, current]);

  const at = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const row = Math.max(0, Math.min(plan.rows.length - 1, Math.floor(y / rowPx)));
    const cells = plan.cells.filter((one) => one.row === row && x >= scale.x(one.kind, one.column) && x < scale.x(one.kind, one.column) + scale.wide(one.kind));
    const column = Math.floor((x - scale.x("pass", 0)) / scale.pass);
    return { row, cells, column };
  };
  const hasStages = plan.rows.some((row) => row.stage > 0);
  const own = plan.cells.filter((one) => one.at === current).slice(0, 80);
  const one = told.events[current];
  const pointedWords = pointed && plan.rows[pointed.row] && [plan.rows[pointed.row].label, passWords(plan.rows[pointed.row], pointed.column), pointed.cells.length && plural(pointed.cells.length, "anomaly").replace("anomalys", "anomalies")].filter(Boolean).join(", ");
  const names = [...plan.before.map((name, place) => ["before", place, name]), ...plan.behind.map((name, place) => ["behind", place, name])];
  const said = one ? `${current + 1} of ${told.events.length}: ${MARKS[one.mark]}, step ${one.step}, ${whereWords(one)}: ${one.what}` : "";
  return (
    <div class="heat pipeline">
      <div class="body">
        <div class="labels" style={{ height: `${height}px` }} aria-hidden="true">
          {plan.rows.map((row, place) => place % every === 0 && (
            <span key={place} style={{ top: `${place * rowPx + Math.max(0, (rowPx - 13) / 2)}px` }} title={row.label}>{row.stage !== null && hasStages && <i class="stage">stage {row.stage}, </i>}{row.label}</span>
          ))}
        </div>
        <div class="frame" ref={frame} style={{ height: `${height}px` }}>
          <canvas
            ref={canvas} tabIndex={0} role="img" onKeyDown={onKey} onPointerMove={(event) => setPointed(at(event))} onPointerLeave={() => setPointed(null)}
            onClick={(event) => { const { cells } = at(event); if (cells.length) onAt(cells[0].at); }}
            aria-label={`Step ${told.step} as ${plural(told.num_ranks, "rank")} ran it. Left and right arrows move along the causal order of ${plural(told.events.length, "anomaly").replace("anomalys", "anomalies")}, Home and End to its ends. The tables below say the same.`}
          />
          {width > 0 && own.map((cell, place) => (
            <div key={place} class="cursor" style={{ left: `${scale.x(cell.kind, cell.column)}px`, top: `${cell.row * rowPx}px`, width: `${Math.max(3, scale.wide(cell.kind))}px`, height: `${rowPx}px` }} />
          ))}
        </div>
      </div>
      <div class="ticks"><div class="labels" /><div class="row columns">
        {width > 0 && names.map(([kind, place, name]) => <span key={name} style={{ left: `${scale.x(kind, place)}px`, width: `${scale.extra}px` }}>{name}</span>)}
        {width > 0 && plan.num > 1 && <span style={{ left: `${scale.x("pass", 0)}px`, width: `${scale.pass * plan.num}px` }}>order of the passes</span>}
      </div></div>
      <p class="readout" aria-live="polite">{pointedWords ? seen(pointedWords, 300) : seen(said || "Point at a pass to read it.", 500)}</p>
    </div>
  );
}

function Legend() {
  return (
    <p class="legend muted">
      {Object.entries(WAYS).map(([way, words]) => <span key={way}><i class={`swatch way-${way}`} /> {way}: {words}</span>)}
      <span><i class="swatch dot-mark cause" /> came first</span><span><i class="swatch dot-mark nan" /> NaN or infinity</span><span><i class="swatch dot-mark warning" /> out of its range</span>
      <span>a number: the micro-step</span><span>line: the causal order so far</span>
    </p>
  );
}

function EventTable({ told, current, onAt }) {
  const [page, setPage] = useState(null);
  useEffect(() => setPage(null), [current]);
  const from = page ?? Math.floor(Math.max(0, current) / A_PAGE) * A_PAGE;
  const shown = told.events.slice(from, from + A_PAGE);
  const last = from + shown.length;
  return (
    <div class="wide">
      <table class="events">
        <caption>What was found, in the causal order: {told.events.length ? `${grouped(from + 1)} to ${grouped(last)} of ${grouped(told.num_events)}` : "nothing"}</caption>
        <thead><tr><th class="number">No.</th><th class="number">Step</th><th>Where</th><th>Phase</th><th class="number">Micro-step</th><th>What</th><th>Mark</th></tr></thead>
        <tbody>
          {shown.map((one, place) => (
            <tr key={one.id} aria-current={from + place === current ? "true" : undefined}>
              <td class="number"><button type="button" class="plain" onClick={() => onAt(from + place)}>{from + place + 1}</button></td>
              <td class="number">{grouped(one.step)}</td><td>{one.ranks ? seen(one.ranks, 80) : LOGGED}</td><td>{one.phase}</td>
              <td class="number">{one.micro_step ?? ""}</td><td>{seen(one.what, 300)}</td><td class={one.mark === "cause" ? "critical" : severityClass(one.severity)}>{MARKS[one.mark]}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {from > 0 && <button type="button" onClick={() => setPage(from - A_PAGE)}>Earlier ones</button>}{" "}
      {last < told.events.length && <button type="button" onClick={() => setPage(last)}>Later ones</button>}
    </div>
  );
}

function RankTable({ told }) {
  const [all, setAll] = useState(false);
  const shown = told.rows.slice(0, all ? told.rows.length : 16);
  const seconds = (one) => (one.wait_s === null ? "not recorded" : one.wait_s[0] === one.wait_s[1] ? number(one.wait_s[0], 3) : `${number(one.wait_s[0], 3)} to ${number(one.wait_s[1], 3)}`);
  return (
    <div class="wide">
      <table>
        <caption>Ranks in step {grouped(told.step)}: F forward, B backward, W weight gradients, each with its micro-step; a star where they are folded</caption>
        <thead><tr><th>Ranks</th><th class="number">Stage</th><th>Order</th><th class="number">Step, s</th><th class="number">Waited for others, s</th></tr></thead>
        <tbody>
          {shown.map((one) => (
            <tr key={one.first_rank}><td>{seen(one.label, 80)}</td><td class="number">{one.pp_stage}</td><td><code>{seen(told.orders_in_words[one.order] || "none", 600)}</code></td><td class="number">{one.step_time_s === null ? "" : number(one.step_time_s, 4)}</td><td class="number">{seconds(one)}</td></tr>
          ))}
        </tbody>
      </table>
      {told.rows.length > shown.length && <button type="button" onClick={() => setAll(true)}>{plural(told.rows.length - shown.length, "more row")}</button>}
    </div>
  );
}

function Waits({ waits }) {
  return waits.length > 0 && (
    <div class="wide">
      <table>
        <caption>Who waited for whom in collectives</caption>
        <thead><tr><th class="number">Rank</th><th>waited for</th><th class="number">s</th><th>in</th><th class="number">calls</th></tr></thead>
        <tbody>{waits.map((one) => <tr key={`${one.call}/${one.rank}`}><td class="number">{one.rank}</td><td>rank {one.behind}</td><td class="number">{number(one.seconds, 3)}</td><td><code>{seen(one.call, 160)}</code></td><td class="number">{grouped(one.num_calls)}</td></tr>)}</tbody>
      </table>
    </div>
  );
}

function StepForm({ step, onStep }) {
  const [text, setText] = useEdited(String(step ?? ""));
  const submit = (event) => {
    event.preventDefault();
    if (/^\d+$/.test(text)) onStep(Number(text));
  };
  return (
    <form class="inline" onSubmit={submit}>
      <button type="button" disabled={!step} onClick={() => onStep(step - 1)} aria-label="Step before">&lt;</button>
      <label>step <input class="short" inputMode="numeric" pattern="\d*" value={text} onInput={(event) => setText(event.currentTarget.value)} /></label>
      <button type="submit">Show</button>
      <button type="button" disabled={step === null} onClick={() => onStep(step + 1)} aria-label="Step behind">&gt;</button>
    </form>
  );
}

export function PipelineView({ name: run, query }) {
  const step = /^\d+$/.test(query.step ?? "") ? Number(query.step) : undefined;
  const incidents = useAnswer(address("api/v1/incidents", { run, limit: 300 }), 10_000);
  const answer = useAnswer(address("api/v1/pipeline", { run, step, incident: query.incident }), 0, true);
  const told = answer.data?.run === run && (answer.data.incident ?? "") === (query.incident ?? "") ? answer.data : null;
  const plan = useMemo(() => told && layOut(told), [told]);
  const set = (changes, replaces = false) => go(pipelineLink(run, { ...query, ...changes }), { replaces });
  const asked = /^\d+$/.test(query.at ?? "") ? Number(query.at) : 0;
  const current = told?.events.length ? Math.min(asked, told.events.length - 1) : -1;
  const onAt = (at) => {
    const next = Math.max(0, Math.min(told.events.length - 1, at));
    set({ at: next, step: told.events[next].step === told.asked_step ? query.step : told.events[next].step }, true);
  };
  const keyed = (event) => {
    if (!told?.events.length || event.ctrlKey || event.metaKey || event.altKey) return;
    const moves = { ArrowRight: current + 1, ArrowLeft: current - 1, Home: 0, End: told.events.length - 1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    onAt(moves[event.key]);
  };
  const known = incidents.data?.incidents ?? [];
  const own = known.find((one) => one.id === query.incident);
  return (
    <>
      <h1>{seen(run, 120)}</h1>
      <RunTabs run={run} current="Pipeline" query={query} />
      <div class="toolbar">
        <StepForm step={step ?? told?.asked_step ?? null} onStep={(chosen) => set({ step: chosen, at: "" })} />
        <label>incident <select value={query.incident ?? ""} onChange={(event) => set({ incident: event.currentTarget.value, step: "", at: "" })}>
          <option value="">what was found in the step</option>
          {query.incident && !own && <option value={query.incident}>{seen(query.incident, 40)}</option>}
          {known.slice(0, 100).map((one) => <option key={one.id} value={one.id}>{`step ${one.opened_step}: ${seen(one.title, 80)}`}</option>)}
        </select></label>
        {own && <a href={incidentLink(own)}>its story</a>}
      </div>
      {answer.error && <p class="problem" role="alert">{seen(answer.error.message)}</p>}
      {!told && !answer.error && <p class="muted">Looking the step up.</p>}
      {told && told.rows.length === 0 && told.events.length === 0 && <p class="muted">{told.step === null ? "No step of this run has been judged." : "No rank recorded anything of this step that is still there."}</p>}
      {told && (told.rows.length > 0 || told.events.length > 0) && (
        <>
          <div class="toolbar" role="group" aria-label="Along the causal order">
            <button type="button" disabled={current <= 0} onClick={() => onAt(0)}>First</button>
            <button type="button" disabled={current <= 0} onClick={() => onAt(current - 1)}>Previous</button>
            <button type="button" disabled={current < 0 || current >= told.events.length - 1} onClick={() => onAt(current + 1)}>Next</button>
            <span class="muted">{told.events.length ? `${grouped(current + 1)} of ${grouped(told.events.length)} in the causal order${told.num_events > told.events.length ? `, the first of ${grouped(told.num_events)}` : ""}; step ${grouped(told.step)}` : `step ${grouped(told.step)}: nothing was found in it`}</span>
            {told.num_rows > told.rows.length && <span class="muted">{grouped(told.rows.length)} of {grouped(told.num_rows)} rows</span>}
          </div>
          <Drawing told={told} plan={plan} current={current} onAt={onAt} onKey={keyed} />
          <Legend />
          <ul class="notes muted">{told.notes.map((one) => <li key={one}>{seen(one, 600)}</li>)}</ul>
          {told.way.length > 0 && <section><h2>The way it took</h2><ol>{told.way.map((one, at) => <li key={at}>{seen(one, 600)}</li>)}</ol></section>}
          <EventTable told={told} current={current} onAt={onAt} />
          <Waits waits={told.waits} />
          {told.is_recorded && <RankTable told={told} />}
        </>
      )}
    </>
  );
}
