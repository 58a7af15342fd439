// All runs, and what is wrong with them, the worst first.
import { useEffect, useState } from "preact/hooks";

import { IncidentTable } from "./incident_table.jsx";
import { compareLink, layersLink, runLink } from "./route.js";
import { address, useAnswer } from "./server.js";
import { Sparkline } from "./sparkline.jsx";
import { ago, clock, grouped, number, plural, seen, worstFirst } from "./words.js";

const LOOKED = "sentinel.looked";

// Seconds since the epoch at which this browser last left the page; what opened since is marked.
function useLastLook() {
  const [before] = useState(() => Number(localStorage.getItem(LOOKED) ?? 0));
  useEffect(() => {
    const leave = () => localStorage.setItem(LOOKED, String(Date.now() / 1000));
    addEventListener("pagehide", leave);
    return () => {
      removeEventListener("pagehide", leave);
      leave();
    };
  }, []);
  return before;
}

function healthOf(run, now) {
  const open = run.open_incidents ?? {};
  const count = Object.values(open).reduce((sum, one) => sum + one, 0);
  const worst = ["critical", "warning", "info"].find((one) => open[one] > 0);
  if (worst) return { kind: worst, words: `${plural(count, "open incident")}, ${worst}` };
  if (run.problems?.length) return { kind: "warning", words: plural(run.problems.length, "problem") };
  const ranks = run.ranks ?? {};
  if (ranks.stale || ranks.late) return { kind: "warning", words: `${grouped((ranks.stale ?? 0) + (ranks.late ?? 0))} ranks late` };
  if (!ranks.live) return { kind: "info", words: "no rank writes" };
  return { kind: "ok", words: "healthy" };
}

const isLoss = (name) => /loss/i.test(name);

function lossOf(series = []) {
  return series.find((one) => one.name === "loss") ?? series.find((one) => isLoss(one.name));
}

// The newest steps that the daemon has in memory; of a run that it has none of, the whole run out of its history.
function Loss({ run, recent }) {
  const isKept = recent?.points.length > 0;
  const held = useAnswer(isKept ? null : address("api/v1/history", { run: run.run }));
  const loss = lossOf(held.data?.scalars);
  const kept = useAnswer(loss ? address("api/v1/history/series", { run: run.run, kind: "scalar", series: loss.series, columns: 180 }) : null);
  if (isKept) return <Sparkline points={recent.points} name={recent.name} />;
  const found = kept.data?.series[0];
  if (!found) return <span class="muted">{held.isWaiting || kept.isWaiting ? "" : "no loss is known"}</span>;
  const points = found.steps.map((step, at) => [0, step, found.nans[at] + found.infs[at] ? null : found.greatest[at]]);
  return <Sparkline points={points} name={found.name} />;
}

function RunRow({ run, loss, now }) {
  const health = healthOf(run, now);
  const ranks = run.ranks ?? {};
  const there = (ranks.expected ?? 0) - (ranks.missing ?? 0);
  return (
    <tr>
      <td class="run" data-name="run"><a href={runLink(run.run)}>{seen(run.run, 80)}</a>
        <div class="muted"><a href={layersLink(run.run)}>layers</a>{run.attempt ? ` · attempt ${run.attempt}` : ""}</div>
      </td>
      <td data-name="health"><span class={`dot ${health.kind}`} aria-hidden="true" /> <span class={health.kind}>{health.words}</span></td>
      <td class="number" data-name="step judged">{grouped(run.judged_step)}<div class="muted">{run.step_time_s ? `${number(run.step_time_s, 3)} s a step` : ""}</div></td>
      <td class="number" data-name="ranks">{there} of {ranks.expected ?? 0}</td>
      <td class="spark" data-name="loss"><Loss run={run} recent={loss} /></td>
      <td class="muted" data-name="last heard">{ago(run.last_record_time, now)}</td>
    </tr>
  );
}

function Problems({ health, runs }) {
  const words = [...(health?.problems ?? [])];
  for (const one of health?.standby_of ?? []) words.push(`standby of process ${one}: runs that it serves are shown there`);
  return words.length > 0 && (
    <section class="problem" aria-label="Problems of the daemon">
      <ul>{words.slice(0, 20).map((one) => <li key={one}>{seen(one)}</li>)}</ul>
    </section>
  );
}

export function Overview({ health }) {
  const runs = useAnswer(address("api/v1/runs"), 3000);
  const incidents = useAnswer(address("api/v1/incidents", { limit: 500 }), 3000);
  const isLogged = runs.data?.runs.some((one) => Object.keys(one.scalars ?? {}).some(isLoss));
  const losses = useAnswer(isLogged ? address("api/v1/series", { name: "*[lL][oO][sS][sS]*", limit: 300 }) : null, 5000);
  const silences = useAnswer(address("api/v1/silences"), 15_000);
  const before = useLastLook();
  if (!runs.data) return <p class="muted">{runs.error ? seen(runs.error.message) : "Asking the daemon."}</p>;
  const now = Date.now() / 1000;
  const all = incidents.data?.incidents ?? [];
  const open = worstFirst(all.filter((one) => one.state === "open"));
  const over = all.filter((one) => one.state !== "open").slice(0, 30);
  const news = before ? all.filter((one) => one.time > before).length : 0;
  return (
    <>
      <h1 class="hidden">Runs and incidents</h1>
      <Problems health={health} />
      <section>
        <h2>Open incidents {before > 0 && <span class="muted">{news ? `${plural(news, "incident")} moved` : "nothing moved"} since you last looked, {ago(before, now)}</span>}</h2>
        {open.length ? <IncidentTable incidents={open} since={before} /> : <p class="ok">None.</p>}
      </section>
      <section>
        <h2>Runs {runs.data.runs.length > 1 && <span class="muted"><a href={compareLink()}>compare them</a></span>}</h2>
        {runs.data.runs.length === 0 ? <p class="muted">No run has written anything here yet.</p> : (
          <div class="wide">
            <table class="runs cards">
              <thead><tr><th>Run</th><th>Health</th><th class="number">Step judged</th><th class="number">Ranks</th><th>Loss</th><th>Last heard</th></tr></thead>
              <tbody>{runs.data.runs.map((one) => <RunRow key={one.run} run={one} loss={lossOf(losses.data?.series.filter((series) => series.run === one.run))} now={now} />)}</tbody>
            </table>
          </div>
        )}
      </section>
      {silences.data?.silences.length > 0 && (
        <section>
          <h2>Silences</h2>
          <ul>{silences.data.silences.map((one) => (
            <li key={one.id}>{one.matchers.map((text) => <code key={text}>{seen(text)} </code>)} until {clock(one.until)}, by {seen(one.who)}: {seen(one.why)}</li>
          ))}</ul>
        </section>
      )}
      {over.length > 0 && (
        <details>
          <summary>Incidents that are over: the {over.length} that changed last</summary>
          <IncidentTable incidents={over} since={before} />
        </details>
      )}
    </>
  );
}
