// One run: what it logs over steps, with what was found drawn on it.
import { useMemo, useState } from "preact/hooks";

import { joined, ofPoints } from "./columns.js";
import { IncidentTable } from "./incident_table.jsx";
import { EventKey, Plot } from "./plot.jsx";
import { ReportLink } from "./report_link.jsx";
import { go, runLink } from "./route.js";
import { address, useAnswer } from "./server.js";
import { RunTabs } from "./tabs.jsx";
import { ago, grouped, number, plural, seen, worstFirst } from "./words.js";

const WANTED = [/^loss$|(^|[^a-z])loss$/i, /grad.*norm/i, /^lr$|learning_rate/i, /^step time/i];
const STEP_TIME = "step time, s";
const MOST_PLOTS = 12;

function rank(name) {
  const at = WANTED.findIndex((one) => one.test(name));
  return at < 0 ? WANTED.length : at;
}

export function viewOf(query, extent) {
  const from = /^\d+$/.test(query.from ?? "") ? Number(query.from) : extent[0];
  const to = /^\d+$/.test(query.to ?? "") ? Number(query.to) : extent[1];
  return to > from ? [from, to] : extent;
}

// What the history holds; why there is none, in words; and the steps that there are.
export function useHistory(run) {
  const held = useAnswer(address("api/v1/history", { run }), 10_000);
  return { held: held.data, problem: held.error, isWaiting: !held.data && !held.error };
}

const HAS_NONE = [404, 501]; // There is no history, or nothing here that can ask one.

export function NoHistory({ problem }) {
  if (!HAS_NONE.includes(problem.status)) return <p class="problem" role="alert">The history gives no answer: {seen(problem.message)}</p>;
  return (
    <p class="notice">
      {seen(problem.message)}. Without a history the page shows what the daemon still has in memory: take{" "}
      <code>history: {"{enabled: false}"}</code> out of the daemon's configuration, and install <code>duckdb</code> beside it.
    </p>
  );
}

const TOO_LONG = 504;
const FEWER_STEPS = 10_000;

// Why a question to the history has no answer; where it was given up for its time, with what narrows it.
export function Unanswered({ error, extent, onView }) {
  const [first, last] = extent;
  return (
    <p class="problem" role="alert">
      {seen(error.message)}
      {error.status === TOO_LONG && last - first >= FEWER_STEPS && (
        <>{" "}<button type="button" onClick={() => onView([last - FEWER_STEPS + 1, last])}>The newest {grouped(FEWER_STEPS)} steps</button></>
      )}
    </p>
  );
}

export function Toolbar({ children, view, extent, onView }) {
  const isWhole = view[0] <= extent[0] && view[1] >= extent[1];
  return (
    <div class="toolbar">
      <span class="muted">steps {grouped(view[0])} to {grouped(view[1])}{isWhole ? "" : ` of ${grouped(extent[0])} to ${grouped(extent[1])}`}</span>
      <button type="button" disabled={isWhole} onClick={() => onView(null)}>Whole run</button>
      {children}
    </div>
  );
}

function Facts({ run }) {
  const ranks = run.ranks ?? {};
  const quiet = [ranks.late && `${ranks.late} late`, ranks.stale && `${ranks.stale} stale`, ranks.missing && `${ranks.missing} missing`].filter(Boolean);
  const facts = [
    ["step judged", `${grouped(run.judged_step)}${run.newest_step > run.judged_step ? ` (newest ${grouped(run.newest_step)})` : ""}`],
    ["attempt", run.attempt],
    ["ranks", `${ranks.live ?? 0} of ${ranks.expected ?? 0} write${quiet.length ? `, ${quiet.join(", ")}` : ""}`],
    ["last heard", ago(run.last_record_time)],
    ["step time", run.step_time_s ? `${number(run.step_time_s)} s` : null],
    ["anomalies", grouped(run.num_anomalies)],
    ["lost", run.is_complete ? null : `${plural(run.num_rows_lost, "row")}, ${plural(run.num_steps_lost, "step")}`],
    ["replicas", run.replicas],
  ];
  return (
    <dl class="facts">
      {facts.filter(([, words]) => words !== null && words !== undefined && words !== "").map(([name, words]) => (
        <div key={name}><dt>{name}</dt><dd>{seen(words, 300)}</dd></div>
      ))}
    </dl>
  );
}

export function RunView({ name: run, query }) {
  const runs = useAnswer(address("api/v1/runs"), 3000);
  const { held, problem, isWaiting } = useHistory(run);
  const recent = useAnswer(address("api/v1/series", { run, limit: held ? 400 : 2000 }), 3000, true);
  const incidents = useAnswer(address("api/v1/incidents", { run, limit: 300 }), 5000);
  const anomalies = useAnswer(address("api/v1/anomalies", { run, limit: 1000 }), 5000);
  const marks = useAnswer(address("api/v1/marks", { run }), 5000);
  const [more, setMore] = useState(4);
  const own = runs.data?.runs.find((one) => one.run === run);

  const fresh = recent.data?.series ?? [];
  const newest = Math.max(0, own?.judged_step ?? 0, ...fresh.map((one) => one.points.at(-1)?.[1] ?? 0));
  const oldest = Math.min(...fresh.map((one) => one.points[0]?.[1] ?? newest), newest);
  const extent = held && held.last_step >= 0 ? [held.first_step, Math.max(held.last_step, newest)] : [oldest, newest];
  const view = viewOf(query, extent);
  const onView = (chosen) => go(runLink(run, { ...query, from: chosen?.[0], to: chosen?.[1] }));

  const names = useMemo(() => {
    const ids = new Map((held?.scalars ?? []).map((one) => [one.name, one.series]));
    for (const one of fresh) if (!ids.has(one.name)) ids.set(one.name, null);
    if (held && held.last_step >= 0) ids.set(STEP_TIME, null);
    return [...ids].sort(([a], [b]) => rank(a) - rank(b) || (a < b ? -1 : 1));
  }, [held, recent.data]);
  const shown = names.slice(0, Math.min(more, MOST_PLOTS));
  const series = shown.map(([, id]) => id).filter((one) => one !== null);
  const columns = Math.min(1500, Math.max(200, Math.round((globalThis.innerWidth ?? 1000) - 80)));
  const span = { from: query.from, to: query.to, columns };
  const isLive = !query.to;
  const told = useAnswer(series.length ? address("api/v1/history/series", { run, kind: "scalar", series, ...span }) : null, isLive ? 5000 : 0, true);
  const times = useAnswer(held && held.last_step >= 0 ? address("api/v1/history/series", { run, kind: "steps", ...span }) : null, isLive ? 5000 : 0, true);

  if (!own) return <p class="muted">{runs.data ? `No run of this name is served here: ${seen(run, 100)}` : seen(runs.error?.message ?? "Asking the daemon.")}</p>;
  const open = incidents.data?.incidents ?? [];
  const happened = marks.data?.marks ?? [];
  const drawn = shown.map(([name, id]) => {
    const points = fresh.find((one) => one.name === name)?.points ?? [];
    const answer = name === STEP_TIME ? times.data : told.data;
    const found = name === STEP_TIME ? answer?.series[0] : answer?.series.find((one) => one.series === id);
    const all = found ? joined(found, answer.width, name === STEP_TIME ? [] : points, view) : ofPoints(points.filter(([, step]) => step >= view[0] && step <= view[1]));
    return [name, all];
  });
  return (
    <>
      <h1>{seen(run, 120)}</h1>
      <Facts run={own} />
      <p class="muted"><ReportLink run={run} words="Post-mortem as a file" /></p>
      {own.problems?.length > 0 && <ul class="problem">{own.problems.slice(0, 10).map((one) => <li key={one}>{seen(one)}</li>)}</ul>}
      {problem && <NoHistory problem={problem} />}
      {told.error && !problem && <Unanswered error={told.error} extent={extent} onView={onView} />}
      <RunTabs run={run} current="Values" query={query} />
      <Toolbar view={view} extent={extent} onView={onView}>
        <label><input type="checkbox" checked={query.log === "1"} onChange={(event) => go(runLink(run, { ...query, log: event.currentTarget.checked ? "1" : "" }))} /> log scale</label>
        <span class="muted keys">drag to zoom, double click for all; keys: arrows, + and -, 0</span>
      </Toolbar>
      {names.length === 0 && !isWaiting && <p class="muted">No step of this run has been judged, or it logs no values.</p>}
      <EventKey marks={happened} />
      {drawn.map(([name, all], at) => (
        <Plot
          key={name} title={name} marks={happened} isFirst={at === 0} columns={all} view={view} extent={extent} onView={onView} isLog={query.log === "1"} incidents={open}
          anomalies={(anomalies.data?.anomalies ?? []).filter((one) => one.tag_name === name && one.event === "onset")}
        />
      ))}
      {names.length > shown.length && shown.length < MOST_PLOTS && (
        <button type="button" onClick={() => setMore(MOST_PLOTS)}>{plural(Math.min(names.length, MOST_PLOTS) - shown.length, "more value")}</button>
      )}
      <section>
        <h2>Incidents</h2>
        {open.length ? <IncidentTable incidents={worstFirst(open).slice(0, 100)} hasRun={false} /> : <p class="ok">None.</p>}
      </section>
    </>
  );
}
