// Live tensors: the small pictures that ranks make of chosen tensors, and ordering them. All of it needs a token.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { colours, scaleOf } from "./colours.js";
import { Choice, Legend, NAN, INF, VALUE, paint, unpacked } from "./heat.jsx";
import { go, tensorsLink } from "./route.js";
import { address, get, post } from "./server.js";
import { RunTabs } from "./tabs.jsx";
import { ago, grouped, number, plural, seen } from "./words.js";

const EVERY_MS = 1000;
const KEPT = 120; // Steps that the page remembers of a rank.
const SHOWN = 24; // Tensors that are drawn at a time.
const APART = 8; // Steps by which one rank's traces may come behind another's.
const MOST_RANKS = 8; // Ranks whose tensors are drawn beside each other.
const NONE = { steps: [], ranks: [], numNotShown: 0, error: null, attempt: null, hint: "" };
const ARRAYS = { F32: Float32Array, I32: Int32Array, I64: BigInt64Array };
const KINDS = [
  ["activation", "what modules give"], ["activation_in", "what modules are given"], ["attention", "what queries attend to"], ["dgrad", "gradients of outputs"],
  ["param", "weights"], ["wgrad", "gradients of weights"],
];
const COMPRESSORS = [
  ["tile", "tiles"], ["top_k", "the largest (logits)"], ["pca", "principal directions"], ["projection", "projection"], ["histogram", "histogram"], ["none", "the whole tensor"],
];

// Rising numbers as people write them: 0-7, 64.
function rankWords(ranks) {
  const parts = [];
  for (const one of ranks) {
    const last = parts.at(-1);
    if (last && last[1] === one - 1) last[1] = one;
    else parts.push([one, one]);
  }
  return parts.map(([a, b]) => (a === b ? `${a}` : `${a}-${b}`)).join(", ");
}

function numbersOf(picture) {
  const found = unpacked(picture.data, ARRAYS[picture.dtype]);
  return picture.dtype === "I64" ? Float64Array.from(found, Number) : found;
}

// Asks for what came behind the newest step that is known, once a second while somebody looks. Thousands of ranks may trace:
// only those that are shown are read. ranks: as the daemon takes them, `0,8-15`.
function useTraces(run, token, ranks) {
  const [state, setState] = useState(NONE);
  useEffect(() => {
    setState((before) => ({ ...NONE, ranks: token ? before.ranks : [], numNotShown: token ? before.numNotShown : 0 }));
    if (!token) return undefined;
    const abort = new AbortController();
    let timer = 0;
    let known = { attempt: null, newest: null, isFirst: true, numShown: 1 };
    async function look() {
      if (!document.hidden) {
        try {
          // Behind the newest step come those before it that the ring still has.
          const back = known.isFirst ? Math.floor(KEPT / known.numShown) : known.numShown > 1 ? APART : 1;
          const after = known.newest === null ? undefined : Math.max(-1, known.newest - back);
          const found = await get(address("api/v1/traces", { run, rank: ranks, after }), abort.signal, { headers: { Authorization: `Bearer ${token}` } });
          const isNew = found.attempt !== known.attempt;
          const steps = found.steps.map((one) => one.step);
          const newest = steps.length || !isNew ? Math.max(isNew ? -1 : known.newest ?? -1, ...steps) : null;
          const numShown = Math.max(1, found.ranks.length - found.num_ranks_not_shown);
          known = { attempt: found.attempt, newest, isFirst: isNew, numShown };
          setState((before) => {
            const all = new Map((isNew ? [] : before.steps).map((one) => [`${one.step}/${one.rank}`, one]));
            for (const one of found.steps) all.set(`${one.step}/${one.rank}`, one);
            const steps = [...all.values()].sort((a, b) => a.step - b.step).filter((one) => one.step > known.newest - KEPT);
            return { steps, ranks: found.ranks, numNotShown: found.num_ranks_not_shown, attempt: found.attempt, hint: found.hint, error: found.problems[0] ? new Error(found.problems[0]) : null };
          });
        } catch (error) {
          if (abort.signal.aborted) return;
          setState((before) => ({ ...before, error }));
        }
      }
      timer = setTimeout(look, EVERY_MS);
    }
    look();
    return () => {
      abort.abort();
      clearTimeout(timer);
    };
  }, [run, token, ranks]);
  return state;
}

function Image({ values, rows, columns, scale, label }) {
  const canvas = useRef(null);
  const height = Math.max(40, Math.min(240, rows * Math.max(1, Math.floor(240 / rows))));
  useEffect(() => {
    const states = Uint8Array.from(values, (one) => (Number.isNaN(one) ? NAN : Number.isFinite(one) ? VALUE : INF));
    paint(canvas.current, { num_columns: columns, values, states }, rows, scale);
  }, [values, rows, columns, scale]);
  return <canvas ref={canvas} class="picture" style={{ height: `${height}px` }} role="img" aria-label={label} />;
}

function Images({ picture, name }) {
  const values = useMemo(() => numbersOf(picture), [picture]);
  const scale = useMemo(() => scaleOf(Array.from(values).filter(Number.isFinite)), [values]);
  const columns = picture.shape.at(-1) ?? 1;
  const rows = picture.shape.at(-2) ?? 1;
  const number_ = Math.min(8, Math.floor(values.length / (rows * columns)));
  return (
    <>
      <div class="pictures">
        {Array.from({ length: number_ }, (_, at) => (
          <Image key={at} values={values.subarray(at * rows * columns, (at + 1) * rows * columns)} rows={rows} columns={columns} scale={scale} label={`${seen(name, 80)}, picture ${at + 1} of ${number_}, ${rows} by ${columns}`} />
        ))}
      </div>
      <Legend scale={scale} unit="" />
    </>
  );
}

function Scatter({ picture, name }) {
  const canvas = useRef(null);
  const values = useMemo(() => numbersOf(picture), [picture]);
  const width = picture.shape[1];
  useEffect(() => {
    const context = canvas.current.getContext("2d");
    const tones = colours();
    const of = (column) => Array.from({ length: picture.shape[0] }, (_, at) => values[at * width + Math.min(column, width - 1)]);
    const [x, y] = [of(0), of(1)];
    const most = Math.max(1e-30, ...[...x, ...y].filter(Number.isFinite).map(Math.abs));
    const place = (value) => 160 + (150 * value) / most;
    context.clearRect(0, 0, 320, 320);
    context.fillStyle = tones.line;
    x.forEach((one, at) => Number.isFinite(one + y[at]) && context.fillRect(place(one) - 1.5, 320 - place(y[at]) - 1.5, 3, 3));
  }, [values]);
  return <canvas ref={canvas} class="scatter" width={320} height={320} role="img" aria-label={`${plural(picture.shape[0], "token")} of ${seen(name, 80)} along two directions`} />;
}

function Largest({ tensor }) {
  const values = numbersOf(tensor.pictures[""]);
  const indices = numbersOf(tensor.pictures.indices);
  const [rows, most] = tensor.pictures[""].shape;
  const first = Math.max(0, rows - 8);
  const shown = Math.min(most, 6);
  return (
    <div class="wide"><table>
      <caption>Of the last {rows - first} rows the {shown} largest: which, and {tensor.compressor.softmax ? "how likely" : "how large"}</caption>
      <tbody>
        {Array.from({ length: rows - first }, (_, at) => (
          <tr key={at}><th scope="row" class="number">{first + at}</th>{Array.from({ length: shown }, (_, one) => {
            const place = (first + at) * most + one;
            return <td key={one} class="number">{indices[place]}: {number(values[place], 3)}</td>;
          })}</tr>
        ))}
      </tbody>
    </table></div>
  );
}

function Bars({ tensor }) {
  const canvas = useRef(null);
  const counts = useMemo(() => numbersOf(tensor.pictures[""]), [tensor]);
  const [least, most] = numbersOf(tensor.pictures.range);
  const bad = numbersOf(tensor.pictures.nonfinite).reduce((sum, one) => sum + one, 0);
  useEffect(() => {
    const context = canvas.current.getContext("2d");
    const top = Math.max(1, ...counts);
    const each = 480 / counts.length;
    context.clearRect(0, 0, 480, 120);
    context.fillStyle = colours().line;
    counts.forEach((one, at) => context.fillRect(at * each, 120 - (118 * one) / top, Math.max(1, each - 1), (118 * one) / top));
  }, [counts]);
  return (
    <>
      <canvas ref={canvas} class="bars" width={480} height={120} role="img" aria-label={`Counts in ${counts.length} bins between ${number(least)} and ${number(most)}`} />
      <p class="muted">{number(least)} to {number(most)}{bad > 0 && <span class="critical">, {grouped(bad)} not finite</span>}</p>
    </>
  );
}

function Picture({ tensor }) {
  const kind = tensor.compressor.name;
  const picture = tensor.pictures[""];
  if (!picture) return <p class="muted">It has no picture.</p>;
  if (tensor.kind !== "tokens" && (kind === "projection" || kind === "pca")) return <Scatter picture={picture} name={tensor.name} />;
  if (kind === "top_k") return <Largest tensor={tensor} />;
  if (kind === "histogram") return <Bars tensor={tensor} />;
  return <Images picture={picture} name={tensor.name || tensor.kind} />;
}

function Order({ run, token, onToken }) {
  const [asked, setAsked] = useState({ kind: "activation", targets: "", compressor: "tile", softmax: false, tokens: false, steps: "100", interval: "1" });
  const [command, setCommand] = useState(null);
  const [said, setSaid] = useState(null);
  const set = (change) => setAsked((before) => ({ ...before, ...change }));
  const done = async (words, request) => {
    setSaid({ words: "Asking the daemon." });
    try {
      const answer = await request();
      setSaid({ words });
      return answer;
    } catch (error) {
      setSaid({ words: `Not done: ${error.message}`, isBad: true });
      return null;
    }
  };
  const order = async () => {
    const answer = await done("Ordered; the ranks obey at the step that the order names, where their config allows it.", () => post("api/v1/control", token, {
      run, action: "trace", kinds: [asked.kind], targets: asked.targets.split(",").map((one) => one.trim()).filter(Boolean), for_steps: Math.max(1, Number(asked.steps) || 1),
      step_interval: Math.max(1, Number(asked.interval) || 1), trace: { compressor: { name: asked.compressor, softmax: asked.softmax }, tokens: asked.tokens },
    }));
    if (answer) setCommand(answer.command);
  };
  const stop = async () => {
    if (await done("Withdrawn.", () => post("api/v1/control", token, { run, action: "withdraw", command: command.id, reason: "nobody looks any more" }))) setCommand(null);
  };
  return (
    <form class="acts" aria-label="What is traced" onSubmit={(event) => { event.preventDefault(); order(); }}>
      <label>token <input type="password" autocomplete="off" value={token} onInput={(event) => onToken(event.currentTarget.value)} placeholder="reads; to order: control" /></label>
      <Choice label="what" value={asked.kind} options={KINDS} onChange={(kind) => set({ kind })} />
      <label class="why">modules <input value={asked.targets} maxLength={1000} placeholder="layers.3.attn, lm_head" onInput={(event) => set({ targets: event.currentTarget.value })} /></label>
      <Choice label="as" value={asked.compressor} options={COMPRESSORS} onChange={(compressor) => set({ compressor })} />
      <label>steps <input inputMode="numeric" size={6} value={asked.steps} onInput={(event) => set({ steps: event.currentTarget.value })} /></label>
      <label>every <input inputMode="numeric" size={4} value={asked.interval} onInput={(event) => set({ interval: event.currentTarget.value })} /></label>
      {asked.compressor === "top_k" && <label><input type="checkbox" checked={asked.softmax} onChange={(event) => set({ softmax: event.currentTarget.checked })} /> probabilities</label>}
      <label><input type="checkbox" checked={asked.tokens} onChange={(event) => set({ tokens: event.currentTarget.checked })} /> tokens</label>
      <div class="buttons">
        <button type="submit" disabled={!token}>Order</button>
        <button type="button" disabled={!token || !command} onClick={stop}>Stop</button>
      </div>
      {said && <p role="status" class={said.isBad ? "critical" : "ok"}>{seen(said.words)}</p>}
    </form>
  );
}

// The token is kept for this page alone: nothing of the browser stores it.
let typed = "";

function RankTensors({ step, isAlone }) {
  const Heading = isAlone ? "h2" : "h3";
  return (
    <>
      {!isAlone && <h2>Rank {step.rank}, step {grouped(step.step)}</h2>}
      {Object.entries(step.left_out).map(([key, why]) => <p key={key} class="warning">{seen(key, 120)} is not shown: {seen(why, 300)}</p>)}
      {step.tensors.slice(0, SHOWN).map((tensor) => (
        <section key={tensor.key} class="traced">
          <Heading>{seen(tensor.name || (tensor.kind === "tokens" ? "tokens" : "the model"), 120)} <span class="muted">{tensor.kind}, {tensor.shape.join(" x ") || "one number"}, {tensor.dtype}{tensor.micro_step >= 0 ? `, micro-batch ${tensor.micro_step}` : ""}</span></Heading>
          <Picture tensor={tensor} />
        </section>
      ))}
      {step.tensors.length > SHOWN && <p class="muted">and {plural(step.tensors.length - SHOWN, "more tensor")}: name fewer modules to see them.</p>}
    </>
  );
}

export function TensorsView({ name: run, query }) {
  const [token, setToken] = useState(typed);
  const [usable, setUsable] = useState(typed);
  const [first, setFirst] = useState(0);
  const [held, setHeld] = useState(null);
  const asked = query.ranks ?? String(first);
  const traces = useTraces(run, usable, asked);
  useEffect(() => {
    // Rank 0 need not be among those that trace.
    if (traces.ranks.length && !traces.ranks.includes(first)) setFirst(traces.ranks[0]);
  }, [traces.ranks, first]);
  useEffect(() => {
    typed = token;
    const timer = setTimeout(() => setUsable(token), 400); // Not at every key.
    return () => clearTimeout(timer);
  }, [token]);
  const choose = (text) => go(tensorsLink(run, { ...query, ranks: text.trim() }));
  const ranks = [...new Set(traces.steps.map((one) => one.rank))].sort((a, b) => a - b);
  const drawn = ranks.slice(0, MOST_RANKS);
  const numbers = [...new Set(traces.steps.map((one) => one.step))];
  const number_ = held !== null && numbers.includes(held) ? held : numbers.at(-1);
  // Ranks write a step one after the other: of one that has not come to the newest yet its own newest is shown.
  const shown = drawn.map((rank) => traces.steps.findLast((one) => one.rank === rank && (held === null ? one.step <= number_ : one.step === number_))).filter(Boolean);
  const newest = shown.reduce((most, one) => (most === null || one.time > most.time ? one : most), null);
  const numDropped = Math.max(0, ...shown.map((one) => one.num_dropped));
  const numNotShown = traces.numNotShown + ranks.length - drawn.length;
  return (
    <>
      <h1>{seen(run, 120)}</h1>
      <RunTabs run={run} current="Live tensors" query={query} />
      <Order run={run} token={token} onToken={setToken} />
      {!usable && <p class="notice">What a picture shows is the training data: a token is needed to see it too. One is in <code>tokens.json</code> of the daemon's state directory; it is kept for this page alone.</p>}
      {usable && traces.hint && <p class="notice">{seen(traces.hint)}</p>}
      {usable && traces.error && <p class={traces.steps.length ? "muted" : "notice"} role="status">{seen(traces.error.message)}</p>}
      {traces.ranks.length > 0 && (
        <form class="toolbar" onSubmit={(event) => { event.preventDefault(); choose(new FormData(event.currentTarget).get("ranks")); }}>
          <label>ranks <input key={asked} name="ranks" size={12} maxLength={400} defaultValue={asked} placeholder="0, 8-11" onChange={(event) => choose(event.currentTarget.value)} /></label>
          <span class="muted">{grouped(drawn.length)} of {plural(traces.ranks.length, "rank")} that trace{traces.ranks.length === 1 ? "s" : ""}{numNotShown > 0 ? `; ${grouped(numNotShown)} are not shown, at most ${MOST_RANKS} are at a time` : ""}</span>
          {newest && <label>step {grouped(number_)} <input type="range" min={0} max={Math.max(0, numbers.length - 1)} value={numbers.indexOf(number_)} aria-label="step" onInput={(event) => { const place = Number(event.currentTarget.value); setHeld(place === numbers.length - 1 ? null : numbers[place]); }} /></label>}
          {newest && <span class="muted">{held === null ? "the newest" : "held"}, {ago(newest.time, Date.now() / 1000)}{numDropped > 0 && <span class="warning">, {plural(numDropped, "step")} dropped: the disk was slow</span>}</span>}
        </form>
      )}
      {usable && traces.ranks.length > 0 && !traces.error && ranks.length === 0 && <p class="notice">None of these ranks traces. Those that do: {seen(rankWords(traces.ranks), 200)}</p>}
      {shown.map((one) => <RankTensors key={one.rank} step={one} isAlone={drawn.length === 1} />)}
    </>
  );
}
