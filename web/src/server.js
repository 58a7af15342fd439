// The daemon: where it is, what it answers, and asking again that never has two requests for one thing under way.
import { useEffect, useState } from "preact/hooks";

import { isLive, listen } from "./live.js";

// The page may lie behind a proxy, under any path: everything is asked for beside the script.
export const root = new URL("..", import.meta.url);

export class Refused extends Error {
  constructor(status, reason) {
    super(reason);
    this.status = status;
  }
}

export function address(path, parameters = {}) {
  const url = new URL(path, root);
  for (const [name, value] of Object.entries(parameters)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== undefined && one !== null && one !== "") url.searchParams.append(name, one);
    }
  }
  return url.href;
}

// Resolves to the response; refused in the daemon's words where it has no answer.
async function accepted(request) {
  let response;
  try {
    response = await request;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "the daemon does not answer");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Refused(response.status, body?.error ?? `the daemon answered ${response.status}`);
}

const answered = async (request) => (await accepted(request)).json().catch(() => null);

// The daemon answers one question to the history at a time (503): it is asked again a moment later.
async function patiently(ask) {
  for (let times = 1; ; times += 1) {
    try {
      return await ask();
    } catch (error) {
      if (error.status !== 503 || times >= 8) throw error;
    }
    await new Promise((goOn) => setTimeout(goOn, 300 * times));
  }
}

export const get = (url, signal, options = {}) => patiently(() => answered(fetch(url, { signal, ...options })));

// A file that the daemon makes: {name, body}.
export async function getFile(url) {
  const response = await patiently(() => accepted(fetch(url)));
  const name = /filename="([^"]+)"/.exec(response.headers.get("content-disposition") ?? "")?.[1] ?? "sentinel";
  return { name, body: await response.blob() };
}

// A question that is too costly for a GET, which other pages may have a browser send: it changes nothing.
export function ask(path, body, signal) {
  return get(new URL(path, root), signal, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
}

export function post(path, token, body) {
  const headers = { "Content-Type": "application/json", Authorization: `Bearer ${token}` };
  return answered(fetch(new URL(path, root), { method: "POST", headers, body: JSON.stringify(body) }));
}

const FOUND = /\/api\/v1\/(incidents|anomalies)/;
const PROGRESS = /\/api\/v1\/(runs|series|history)/;
const SOON_MS = 1000;
const SELDOM = 20; // Times `everyMs` after which it is asked again though no event said so.

// Whether an event says that what a URL answers may be another now.
export function isAbout(url, event) {
  if (event.is_all) return true;
  const { pathname, searchParams } = new URL(url);
  const run = searchParams.get("run");
  const names = [...(event.found ?? []), ...(FOUND.test(pathname) ? [] : event.progress ?? [])];
  return run === null ? names.length > 0 : names.includes(run);
}

// Asks for a URL (null: for nothing), and again `everyMs` behind each answer while anybody looks; where the daemon says what
// changes, only behind an event that is about it, of incidents at once. Returns what came last: {data, error, isWaiting}; the
// data of another URL is never shown for this one unless `keeps` says so.
export function useAnswer(url, everyMs = 0, keeps = false) {
  const [state, setState] = useState({ url: null, data: null, error: null });
  useEffect(() => {
    if (!url) return undefined;
    const abort = new AbortController();
    const isTold = FOUND.test(url) || PROGRESS.test(url);
    let timer = 0;
    let failed = 0; // Times in a row.
    let isAsking = false;
    let isStale = false;
    let asked = 0;
    function plan() {
      clearTimeout(timer);
      if (!everyMs) return;
      const waits = isTold && isLive() && !failed && !isStale;
      const least = FOUND.test(url) && isStale ? Math.min(SOON_MS, everyMs) : everyMs;
      timer = setTimeout(ask, Math.max(0, asked + (waits ? SELDOM * everyMs : least * Math.min(1 + failed, 8)) - performance.now()));
    }
    async function ask() {
      asked = performance.now();
      if (document.hidden && everyMs) {
        plan();
        return;
      }
      isAsking = true;
      isStale = false;
      try {
        const data = await get(url, abort.signal);
        if (abort.signal.aborted) return;
        failed = 0;
        setState({ url, data, error: null });
      } catch (error) {
        if (abort.signal.aborted) return;
        failed += 1;
        setState((before) => ({ url, data: before.url === url ? before.data : null, error }));
      }
      isAsking = false;
      asked = performance.now();
      plan();
    }
    const leave = listen((event) => {
      if (!everyMs || !isTold || (event !== null && !isAbout(url, event))) return;
      isStale = true;
      if (!isAsking) plan();
    });
    ask();
    return () => {
      abort.abort();
      clearTimeout(timer);
      leave();
    };
  }, [url, everyMs]);
  const isOf = state.url === url;
  return { data: isOf || keeps ? state.data : null, error: isOf ? state.error : null, isWaiting: Boolean(url) && !isOf };
}
