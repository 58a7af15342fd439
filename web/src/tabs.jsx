// The views of one run.
import { compareLink, expertsLink, layersLink, pipelineLink, rulesLink, runLink, tensorsLink } from "./route.js";

const TABS = [
  ["Values", runLink], ["Layers x steps", layersLink], ["Pipeline", pipelineLink], ["Experts and heads", expertsLink], ["Live tensors", tensorsLink],
  ["Rules", (run) => rulesLink(run)], ["Compare", (run) => compareLink({ a: run })],
];

// query: of the view that is shown; the steps in view are taken along.
export function RunTabs({ run, current, query }) {
  const around = { from: query.from, to: query.to };
  return (
    <nav class="tabs" aria-label="Views of this run">
      {TABS.map(([name, linkOf]) => (
        <a key={name} aria-current={name === current ? "page" : undefined} href={linkOf(run, name === current ? query : around)}>{name}</a>
      ))}
    </nav>
  );
}
