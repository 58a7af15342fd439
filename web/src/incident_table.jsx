import { incidentLink } from "./route.js";
import { ago, plural, seen, severityClass } from "./words.js";

function ranksOf(ranks = []) {
  if (!ranks.length) return "";
  const named = ranks.slice(0, 6).join(", ");
  return `rank${ranks.length === 1 ? "" : "s"} ${named}${ranks.length > 6 ? ` and ${ranks.length - 6} more` : ""}`;
}

function newestAct(incident) {
  const act = incident.acts?.at(-1);
  if (!act) return null;
  const did = { ack: "acknowledged", resolve: "closed", reopen: "reopened" }[act.act] ?? act.act;
  return <div class="ok">{seen(did)} by {seen(act.who, 60)}</div>;
}

export function IncidentTable({ incidents, since = 0, hasRun = true }) {
  return (
    <ul class="incidents">
      {incidents.map((one) => (
        <li key={`${one.run}/${one.id}`} class={severityClass(one.severity)}>
          <div class="badge">{seen(one.severity, 12)}{since > 0 && one.time > since && <span class="new"> new</span>}</div>
          <div>
            <a href={incidentLink(one)}>{seen(one.title, 240)}</a>
            <div class="muted">
              {hasRun && <>{seen(one.run, 80)} · </>}
              {one.root_name && <>began with {seen(one.root_name, 160)} · </>}
              steps {one.opened_step} to {Math.max(one.last_step, one.active_step ?? -1)}
              {one.ranks?.length > 0 && <> · {ranksOf(one.ranks)}</>} · {plural(one.num_members, "anomaly").replace("anomalys", "anomalies")}
            </div>
          </div>
          <div class="side">
            {one.verdict && one.verdict !== "unknown" && <div>suspected: <b>{seen(one.verdict, 60)}</b></div>}
            {one.state !== "open" && <div>{seen(one.state, 20)}</div>}
            {newestAct(one)}
            <div class="muted">{ago(one.time)}</div>
          </div>
        </li>
      ))}
    </ul>
  );
}
