// One box: runs, incidents and tensors whose texts have what was typed in them.
import { useEffect, useState } from "preact/hooks";

import { IncidentTable } from "./incident_table.jsx";
import { layersLink, runLink } from "./route.js";
import { address, get, useAnswer } from "./server.js";
import { plural, seen, worstFirst } from "./words.js";

const MOST_RUNS = 20;

// The daemon answers one question to its histories at a time, so they are asked one behind the other.
function useTensors(runs, text) {
  const [found, setFound] = useState({ text: "", tensors: [], isDone: false });
  const names = runs.slice(0, MOST_RUNS).map((one) => one.run);
  useEffect(() => {
    if (!text || !names.length) return undefined;
    const abort = new AbortController();
    (async () => {
      const tensors = [];
      for (const run of names) {
        try {
          const held = await get(address("api/v1/history", { run, find: text }), abort.signal);
          tensors.push(...held.tensors.map((one) => ({ ...one, run })));
        } catch {
          if (abort.signal.aborted) return;
        }
        setFound({ text, tensors: [...tensors], isDone: run === names.at(-1) });
      }
    })();
    return () => abort.abort();
  }, [text, names.join("\n")]);
  return found.text === text ? found : { tensors: [], isDone: names.length === 0 };
}

export function SearchView({ query }) {
  const text = (query.q ?? "").trim();
  const runs = useAnswer(address("api/v1/runs"));
  const incidents = useAnswer(address("api/v1/incidents", { limit: 1000 }));
  const has = (one) => String(one ?? "").toLowerCase().includes(text.toLowerCase());
  const all = runs.data?.runs ?? [];
  const ownRuns = all.filter((one) => has(one.run));
  const own = (incidents.data?.incidents ?? []).filter((one) => [one.id, one.title, one.root_name, one.module, one.run].some(has));
  const tensors = useTensors(all, text);
  if (!text) return <p class="muted">Type part of the name of a tensor, an incident or a run.</p>;
  const nothing = tensors.isDone && !ownRuns.length && !own.length && !tensors.tensors.length;
  return (
    <>
      <h1>What has "{seen(text, 80)}" in it</h1>
      {nothing && <p class="muted">Nothing: no run, no incident, and no tensor of a history.</p>}
      {ownRuns.length > 0 && <section><h2>{plural(ownRuns.length, "run")}</h2><ul>{ownRuns.slice(0, 100).map((one) => <li key={one.run}><a href={runLink(one.run)}>{seen(one.run, 200)}</a></li>)}</ul></section>}
      {own.length > 0 && <section><h2>{plural(own.length, "incident")}</h2><IncidentTable incidents={worstFirst(own).slice(0, 100)} /></section>}
      {tensors.tensors.length > 0 && (
        <section>
          <h2>Tensors{tensors.isDone ? "" : ", so far"}</h2>
          <ul class="tensors">{tensors.tensors.slice(0, 200).map((one) => (
            <li key={`${one.run}/${one.series}`}><a href={layersLink(one.run, { kind: one.kind, series: one.series })}>{seen(one.name, 200)}</a> <span class="muted">{one.kind}{one.place ? ` (${seen(one.place, 40)})` : ""} · {seen(one.run, 80)}</span></li>
          ))}</ul>
        </section>
      )}
    </>
  );
}
