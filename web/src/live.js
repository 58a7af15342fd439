// What the daemon says has changed: one stream of a tab, while anybody looks at it. Where there is none the page polls.
//
// A browser has six connections to one server over HTTP/1, for all of its tabs: few of them may be streams. So a tab holds one
// of SLOTS locks while it has a stream; one that gets none, or whose browser has no locks (plain HTTP to another host), polls.
const SLOTS = 3;
const AGAIN_MS = 60_000; // Until a stream that was refused, or for which there was no slot, is tried again.

const listeners = new Set();
let url = null;
let stream = null;
let release = null;
let timer = 0;
let isTrying = false;

export function isLive() {
  return stream !== null && stream.readyState === EventSource.OPEN;
}

// listener: called with {is_all, progress, found} of each event, and with null when the stream is gone.
export function listen(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function tell(event) {
  for (const one of [...listeners]) one(event);
}

// Resolves to what lets go of the slot; null: all are held by other tabs.
function slot() {
  const one = (number) =>
    new Promise((done) => {
      navigator.locks
        .request(`sentinel-events-${number}`, { ifAvailable: true }, (lock) => (lock ? new Promise((free) => done(free)) : done(null)))
        .catch(() => done(null));
    });
  return Array.from({ length: SLOTS }, (_, at) => at).reduce(async (found, at) => (await found) ?? one(at), Promise.resolve(null));
}

function close() {
  clearTimeout(timer);
  stream?.close();
  stream = null;
  release?.();
  release = null;
}

async function open() {
  if (stream || isTrying || document.hidden || !navigator.locks || !globalThis.EventSource) return;
  isTrying = true;
  const free = await slot();
  isTrying = false;
  if (!free || document.hidden) {
    free?.();
    timer = setTimeout(open, AGAIN_MS);
    return;
  }
  release = free;
  stream = new EventSource(url);
  stream.addEventListener("changed", (event) => {
    try {
      tell(JSON.parse(event.data));
    } catch {
      tell({ is_all: true });
    }
  });
  stream.addEventListener("error", () => {
    // It ended in order, and the browser begins it anew; or it was refused, and nobody does.
    if (stream?.readyState !== EventSource.CLOSED) return;
    close();
    tell(null);
    timer = setTimeout(open, AGAIN_MS);
  });
}

// url: of the stream of events.
export function follow(at) {
  url = at;
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      close();
      tell(null);
    } else open();
  });
  addEventListener("pagehide", close);
  addEventListener("pageshow", (event) => event.persisted && open());
  open();
}
