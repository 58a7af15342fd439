// The post-mortem of a run, or of one of its incidents, saved as a file; why there is none is said beside the link.
import { useState } from "preact/hooks";

import { reportLink } from "./route.js";
import { getFile } from "./server.js";
import { seen } from "./words.js";

const KEPT_MS = 60_000; // For the browser to take the file.

function save({ name, body }) {
  const at = URL.createObjectURL(body);
  Object.assign(document.createElement("a"), { href: at, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(at), KEPT_MS);
}

export function ReportLink({ run, incident, words }) {
  const [said, setSaid] = useState(null);
  const isAsking = said?.isAsking ?? false;
  const download = async (event) => {
    event.preventDefault();
    if (isAsking) return;
    setSaid({ words: "being written, which takes seconds", isAsking: true });
    try {
      save(await getFile(reportLink(run, incident)));
      setSaid(null);
    } catch (error) {
      setSaid({ words: `not written: ${error.message}`, isBad: true });
    }
  };
  return (
    <>
      <a href={reportLink(run, incident)} download onClick={download}>{words}</a>
      <span role="status" class={said?.isBad ? "critical" : "muted"}>{said && ` (${seen(said.words)})`}</span>
    </>
  );
}
