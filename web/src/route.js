// Where one is: behind the # of the address, so that a link leads back to it whenever the daemon was started anew.
import { useEffect, useState } from "preact/hooks";

import { address, root } from "./server.js";

export function link(parts, query = {}) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== undefined && value !== null && value !== "") search.append(name, value);
  }
  const path = parts.map((one) => encodeURIComponent(one)).join("/");
  return `${root.pathname}#/${path}${search.size ? `?${search}` : ""}`;
}

export const runLink = (run, query) => link(["runs", run], query);
export const layersLink = (run, query) => link(["runs", run, "layers"], query);
export const pipelineLink = (run, query) => link(["runs", run, "pipeline"], query);
export const expertsLink = (run, query) => link(["runs", run, "experts"], query);
export const tensorsLink = (run, query) => link(["runs", run, "tensors"], query);
export const rulesLink = (run, query) => link(["runs", run, "rules"], query);
export const compareLink = (query) => link(["compare"], query);
export const incidentLink = (incident) => link(["incidents", incident.id], { run: incident.run });

// The address that messages carry, which says the same to a browser without scripts.
export function sharedLink(incident) {
  return new URL(`incidents/${encodeURIComponent(incident.id)}?run=${encodeURIComponent(incident.run)}`, root).href;
}

// The post-mortem of a run, or of one of its incidents, which the browser saves.
export const reportLink = (run, incident) => address("api/v1/report", { run, incident });

function current() {
  if (location.hash.length > 1) return location.hash.replace(/^#\/?/, "");
  const within = location.pathname.slice(root.pathname.length);
  return within.startsWith("incidents/") ? within + location.search : "";
}

function parsed(text) {
  const [path, search = ""] = text.split("?", 2);
  let parts;
  try {
    parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  } catch {
    parts = ["nowhere"];
  }
  return { parts, query: Object.fromEntries(new URLSearchParams(search)) };
}

export function useRoute() {
  const [text, setText] = useState(current);
  useEffect(() => {
    const moved = () => setText(current());
    addEventListener("hashchange", moved);
    addEventListener("popstate", moved);
    return () => {
      removeEventListener("hashchange", moved);
      removeEventListener("popstate", moved);
    };
  }, []);
  return parsed(text);
}

export function go(href, { replaces = false } = {}) {
  const url = new URL(href, location.href);
  if (url.pathname !== location.pathname) location.assign(url.href);
  else if (replaces) {
    history.replaceState(null, "", url.href);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else location.hash = url.hash;
}
