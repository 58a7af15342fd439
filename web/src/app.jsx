import "uplot/dist/uPlot.min.css";

import "./app.css";
import { render } from "preact";
import { useEffect } from "preact/hooks";

import { CompareView } from "./compare.jsx";
import { useEdited } from "./edited.js";
import { ExpertsView } from "./experts.jsx";
import { IncidentView } from "./incident.jsx";
import { LayersView } from "./layers.jsx";
import { follow } from "./live.js";
import { Overview } from "./overview.jsx";
import { PipelineView } from "./pipeline.jsx";
import { go, link, useRoute } from "./route.js";
import { RulesView } from "./rules.jsx";
import { RunView } from "./run.jsx";
import { SearchView } from "./search.jsx";
import { address, useAnswer } from "./server.js";
import { TensorsView } from "./tensors.jsx";
import { seen } from "./words.js";

function SearchBox({ query }) {
  const [text, setText] = useEdited(query);
  const submit = (event) => {
    event.preventDefault();
    if (text.trim()) go(link(["search"], { q: text.trim() }));
  };
  return (
    <form class="search" role="search" onSubmit={submit}>
      <input
        type="search" value={text} placeholder="tensor, incident, run" aria-label="Search tensors, incidents and runs"
        onInput={(event) => setText(event.currentTarget.value)} maxLength={200}
      />
    </form>
  );
}

function Health({ health }) {
  if (!health) return null;
  const kind = health.status === "ok" ? "ok" : "warning";
  return (
    <span class="muted">
      <span class={kind}>{seen(health.status)}</span> <span class="version">{seen(health.version)}</span>
    </span>
  );
}

const VIEWS = { "": Overview, runs: RunView, incidents: IncidentView, search: SearchView, compare: CompareView };
const WITHIN = { layers: LayersView, pipeline: PipelineView, experts: ExpertsView, tensors: TensorsView, rules: RulesView }; // A run.

function App() {
  const { parts, query } = useRoute();
  const health = useAnswer(address("healthz"), 10_000);
  const [first = "", name, within] = parts;
  const View = first === "runs" && Object.hasOwn(WITHIN, within ?? "") ? WITHIN[within] : VIEWS[first];
  useEffect(() => {
    document.title = name ? `${seen(name, 60)} - Sentinel` : "Sentinel";
  }, [name]);
  return (
    <>
      <a class="skip" href="#content" onClick={(event) => { event.preventDefault(); document.getElementById("content").focus(); }}>
        To the content
      </a>
      <header>
        <nav aria-label="Where you are">
          <a class="home" href={link([])}>Sentinel</a>{" "}
          {first === "runs" && name && <><span class="muted">/</span> <a href={link(["runs", name])}>{seen(name, 60)}</a></>}
          {first === "runs" && Object.hasOwn(WITHIN, within ?? "") && <> <span class="muted">/</span> {within}</>}
          {first === "compare" && <><span class="muted">/</span> compare</>}
          {first === "incidents" && query.run && <><span class="muted">/</span> <a href={link(["runs", query.run])}>{seen(query.run, 60)}</a></>}
          {first === "incidents" && name && <> <span class="muted">/</span> <code>{seen(name, 40)}</code></>}
        </nav>
        <SearchBox query={first === "search" ? query.q ?? "" : ""} />
        <Health health={health.data} />
      </header>
      <main id="content" tabIndex={-1}>
        {health.error && <p class="problem" role="alert">{seen(health.error.message)}; what is shown may be old.</p>}
        {View ? <View key={`${first}/${name}`} name={name} query={query} health={health.data} /> : <p>There is nothing here. <a href={link([])}>All runs</a></p>}
      </main>
    </>
  );
}

const place = document.getElementById("app");
place.textContent = "";
follow(address("api/v1/events"));
render(<App />, place);
