// Texts, numbers and times for people. Texts come from runs: whatever cannot be seen in them is shown as an escape.

const UNSEEN = /[\x00-\x1f\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb]/gu;

export function seen(value, most = 400) {
  const text = value === null || value === undefined ? "" : String(value);
  const cut = text.length > most ? `${text.slice(0, most - 1)}\u2026` : text;
  return cut.replace(UNSEEN, (one) => `\\u${one.codePointAt(0).toString(16).padStart(4, "0")}`);
}

// The end of a name says which one it is: `layers.11.mlp.w2`.
export function seenEnd(value, most) {
  const text = String(value);
  return seen(text.length > most ? `\u2026${text.slice(text.length - most + 1)}` : text, most + 1);
}

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "\u2013";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return grouped(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return Number(value.toPrecision(digits)).toExponential().replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}

export function grouped(value) {
  return value === null || value === undefined ? "\u2013" : Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, ",");
}

export function plural(count, word) {
  return `${grouped(count)} ${word}${count === 1 ? "" : "s"}`;
}

export function ago(seconds, now = Date.now() / 1000) {
  if (!seconds) return "never";
  const past = Math.max(0, now - seconds);
  if (past < 90) return `${Math.round(past)} s ago`;
  if (past < 5400) return `${Math.round(past / 60)} min ago`;
  if (past < 129600) return `${Math.round(past / 3600)} h ago`;
  return `${Math.round(past / 86400)} days ago`;
}

export function clock(seconds) {
  if (!(seconds > 0 && seconds < 4e9)) return "";
  return `${new Date(seconds * 1000).toISOString().slice(0, 19).replace("T", " ")} UTC`;
}

const LEVELS = { critical: 0, warning: 1, info: 2 };

export function worstFirst(incidents) {
  return [...incidents].sort((a, b) => (LEVELS[a.severity] ?? 3) - (LEVELS[b.severity] ?? 3) || b.time - a.time);
}

export function severityClass(severity) {
  return severity in LEVELS ? severity : "info";
}
