// The views of one run, each with an address of its own; what is in view in steps goes along.
import { compareLink, layersLink, rulesLink, runLink } from "./route.js";

const TABS = [
  ["values", "Values", (run, steps) => runLink(run, steps)],
  ["layers", "Layers x steps", (run, steps) => layersLink(run, steps)],
  ["rules", "Rules", (run) => rulesLink(run)],
  ["compare", "Compare", (run) => compareLink({ a: run })],
];

export function RunTabs({ run, query, here }) {
  const steps = { from: query.from, to: query.to };
  return (
    <nav class="tabs" aria-label="Views of this run">
      {TABS.map(([name, words, href]) => <a key={name} aria-current={name === here ? "page" : undefined} href={href(run, steps)}>{words}</a>)}
    </nav>
  );
}
