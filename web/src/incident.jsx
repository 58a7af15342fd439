// One incident: what happened, in sentences; what it looked like before and after; and what people do about it.
import { useState } from "preact/hooks";

import { ofPoints } from "./columns.js";
import { Plot } from "./plot.jsx";
import { ReportLink } from "./report_link.jsx";
import { layersLink, pipelineLink, runLink, sharedLink } from "./route.js";
import { address, post, useAnswer } from "./server.js";
import { clock, grouped, number, plural, seen, severityClass } from "./words.js";

const AROUND = 60;
const MOST_SHOWN = 40;

function anomalyValue(one) {
  return one.value === null ? one.value_text || "\u2013" : number(one.value);
}

// Statistics that a history has under the name that rules give them; of others its standard deviation is shown.
function statisticOf(cause, held) {
  if (cause.kind === "scalar") return "value";
  return held.statistics.includes(cause.statistic) ? cause.statistic : "std";
}

function Evidence({ incident, causes }) {
  const { run } = incident;
  const held = useAnswer(address("api/v1/history", { run }));
  // Of the first causes, the first whose tensor or value the history has.
  const cause = held.data && causes.find((one) => one.kind === "scalar" || one.kind in held.data.kinds);
  const end = Math.max(incident.last_step, incident.active_step ?? -1);
  const asked = [Math.max(0, incident.opened_step - AROUND), end + AROUND];
  const [view, setView] = useState(asked);
  const statistic = cause && statisticOf(cause, held.data);
  const url = cause ? address("api/v1/history/series", { run, kind: cause.kind, name: cause.tag_name, statistic, from: view[0], to: view[1], columns: 1000 }) : null;
  const answer = useAnswer(url, 0, true);
  // Where there is no history, what is still in memory.
  const isLogged = held.error && causes.some((one) => one.kind === "scalar");
  const logged = isLogged ? causes.find((one) => one.kind === "scalar") : null;
  const recent = useAnswer(logged ? address("api/v1/series", { run, name: logged.tag_name, from: view[0], to: view[1], limit: 2000 }) : null);
  const found = answer.data?.series[0];
  const columns = found ? { ...found, width: answer.data.width } : recent.data?.series[0] ? ofPoints(recent.data.series[0].points) : null;
  const shown = cause ?? logged;
  if (!columns || !shown) return held.error && !logged ? <p class="notice">No plot before and after: {seen(held.error.message)}</p> : null;
  const title = shown.kind === "scalar" ? shown.tag_name : `${statistic} of ${shown.tag_name} (${shown.kind})`;
  return (
    <>
      <h2>Before and after</h2>
      <Plot
        title={title} columns={columns} view={view} extent={asked} onView={(next) => setView(next ?? asked)} incidents={[incident]}
        anomalies={causes.filter((one) => one.tag_name === shown.tag_name && one.kind === shown.kind && (one.kind === "scalar" || one.statistic === statistic))}
      />
    </>
  );
}

function AnomalyTable({ anomalies, caption }) {
  return (
    <div class="wide">
      <table>
        <caption>{caption}</caption>
        <thead><tr><th class="number">Step</th><th>Tensor or value</th><th>Kind</th><th class="number">Rank</th><th class="number">Micro-step</th><th>Rule</th><th class="number">Value</th><th class="number">Baseline</th></tr></thead>
        <tbody>
          {anomalies.map((one) => (
            <tr key={one.id}>
              <td class="number">{grouped(one.step)}</td><td>{seen(one.tag_name, 160)}</td><td>{seen(one.kind, 40)} {seen(one.statistic, 40)}</td>
              <td class="number">{one.rank ?? (one.ranks?.length ? plural(one.ranks.length, "rank") : "")}</td><td class="number">{one.micro_step ?? ""}</td>
              <td class={severityClass(one.severity)}>{seen(one.rule, 60)}</td><td class="number">{anomalyValue(one)}</td><td class="number">{one.baseline === null || one.baseline === undefined ? "" : number(one.baseline)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

// The token is kept for this page alone: nothing of the browser stores it.
let typed = { token: "", who: "" };

function Acts({ incident, onDone }) {
  const [token, setToken] = useState(typed.token);
  const [who, setWho] = useState(typed.who);
  const [why, setWhy] = useState("");
  const [hours, setHours] = useState("2");
  const [said, setSaid] = useState(null);
  const isOpen = incident.state === "open";
  const acted = async (words, request) => {
    typed = { token, who };
    setSaid({ words: "Asking the daemon." });
    try {
      await request();
      setSaid({ words });
      onDone();
    } catch (error) {
      setSaid({ words: `Not done: ${error.message}`, isBad: true });
    }
  };
  const act = (name, words) => acted(words, () => post("api/v1/incidents", token, { run: incident.run, incident: incident.id, act: name, who, why }));
  const silence = () => acted(`Silenced for ${hours} h.`, () => post("api/v1/silences", token, { matchers: [`run=${incident.run}`, `incident=${incident.id}`], for_s: Number(hours) * 3600, why, who }));
  const isReady = token.length > 0 && who.trim().length > 0;
  return (
    <section>
      <h2>Do something about it</h2>
      <form class="acts" onSubmit={(event) => event.preventDefault()}>
        <label>token <input type="password" autocomplete="off" value={token} onInput={(event) => setToken(event.currentTarget.value)} placeholder="with the silence scope" /></label>
        <label>your name <input value={who} maxLength={200} autocomplete="username" onInput={(event) => setWho(event.currentTarget.value)} /></label>
        <label class="why">why <input value={why} maxLength={500} onInput={(event) => setWhy(event.currentTarget.value)} /></label>
        <div class="buttons">
          <button type="button" disabled={!isReady || !isOpen} onClick={() => act("ack", "Acknowledged; the run's judge takes it with its next turn.")}>Acknowledge</button>
          <button type="button" disabled={!isReady || !isOpen} onClick={() => act("resolve", "Closed; the run's judge takes it with its next turn.")}>Close</button>
          {!isOpen && <button type="button" disabled={!isReady} onClick={() => act("reopen", "Reopened; the run's judge takes it with its next turn.")}>Reopen</button>}
          <button type="button" disabled={!isReady || !why.trim()} onClick={silence}>Silence for</button>
          <select aria-label="Hours of silence" value={hours} onChange={(event) => setHours(event.currentTarget.value)}>{["1", "2", "8", "24"].map((one) => <option key={one} value={one}>{one} h</option>)}</select>
        </div>
        <p class="muted">A token is in <code>tokens.json</code> of the daemon's state directory; it is kept for this page alone. A silence needs a reason.</p>
        {said && <p role="status" class={said.isBad ? "critical" : "ok"}>{seen(said.words)}</p>}
      </form>
    </section>
  );
}

function Revisions({ revisions }) {
  return (
    <details>
      <summary>How it went on: {plural(revisions.length, "revision")}</summary>
      <div class="wide"><table>
        <thead><tr><th class="number">Revision</th><th>Time</th><th>State</th><th /><th>What</th><th>First cause</th><th>Suspected</th><th>Steps</th><th class="number">Anomalies</th></tr></thead>
        <tbody>{revisions.map((one) => (
          <tr key={one.revision}><td class="number">{one.revision}</td><td>{clock(one.time)}</td><td>{seen(one.state)}</td><td class={severityClass(one.severity)}>{seen(one.severity)}</td><td>{seen(one.title)}</td><td>{seen(one.root_name)}</td><td>{seen(one.suspected)}</td><td>{seen(one.steps)}</td><td class="number">{grouped(one.num_members)}</td></tr>
        ))}</tbody>
      </table></div>
    </details>
  );
}

export function IncidentView({ name, query }) {
  const [looks, setLooks] = useState(0);
  const url = address(`api/v1/incidents/${encodeURIComponent(name ?? "")}`, { run: query.run });
  const answer = useAnswer(url, looks ? 1500 : 5000);
  const [isCopied, setIsCopied] = useState(false);
  if (!answer.data) return <p class={answer.error ? "problem" : "muted"}>{answer.error ? seen(answer.error.message) : "Asking the daemon."}</p>;
  const { incident, headline, fields, links, revisions, anomalies } = answer.data;
  const onsets = anomalies.filter((one) => one.event === "onset");
  const causes = onsets.filter((one) => incident.first_causes.includes(one.id));
  const others = onsets.filter((one) => !incident.first_causes.includes(one.id));
  const around = { from: Math.max(0, incident.opened_step - AROUND), to: Math.max(incident.last_step, incident.active_step ?? -1) + AROUND };
  const copy = () => navigator.clipboard?.writeText(sharedLink(incident)).then(() => setIsCopied(true), () => setIsCopied(false));
  return (
    <article>
      <h1 class={severityClass(incident.severity)}>{seen(headline, 500)}</h1>
      <p class="muted">
        <code>{seen(incident.id)}</code>, {seen(incident.state)}, revision {incident.revision} · <a href={runLink(incident.run, around)}>values around it</a> · <a href={layersLink(incident.run, { ...around, kind: causes[0]?.kind !== "scalar" ? causes[0]?.kind : "" })}>layers around it</a> · <a href={pipelineLink(incident.run, { incident: incident.id })}>how it spread</a> · <ReportLink run={incident.run} incident={incident.id} words="post-mortem" />
        {links.filter((one) => one.name !== "incident" && /^https?:/.test(one.url)).map((one) => <> · <a key={one.url} href={one.url} rel="noreferrer">{seen(one.name)}</a></>)}
        {" "}· <button type="button" class="plain" onClick={copy}>{isCopied ? "link copied" : "copy link"}</button>
      </p>
      <dl class="story">
        {fields.map(([field, words]) => <div key={field}><dt>{seen(field, 40)}</dt><dd>{seen(words, 700)}</dd></div>)}
      </dl>
      <Evidence incident={incident} causes={causes.length ? causes : onsets.slice(0, 1)} />
      <h2>What it is made of</h2>
      {causes.length > 0 && <AnomalyTable anomalies={causes.slice(0, MOST_SHOWN)} caption={plural(causes.length, "first cause")} />}
      {others.length > 0 && (
        <details><summary>{plural(others.length, "anomaly").replace("anomalys", "anomalies")} that followed{incident.num_members > onsets.length ? `, of ${grouped(incident.num_members)} in all` : ""}</summary>
          <AnomalyTable anomalies={others.slice(0, 200)} caption="What followed" />
        </details>
      )}
      <Revisions revisions={revisions} />
      <Acts incident={incident} onDone={() => setLooks(looks + 1)} />
    </article>
  );
}
