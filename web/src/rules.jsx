// The rules in force of a run: what each watches, how often it spoke; and what it would have said with other numbers.
import { useEffect, useMemo, useState } from "preact/hooks";

import { go, incidentLink, rulesLink, runLink } from "./route.js";
import { RunTabs } from "./tabs.jsx";
import { address, ask, useAnswer } from "./server.js";
import { ago, grouped, number, plural, seen, severityClass } from "./words.js";

const AROUND = 60;
const MOST_SHOWN = 60;
const NUMBER = "n."; // In the address: what a number is to be, `n.k=9`.

const numbersOf = (query) => Object.fromEntries(Object.entries(query).filter(([name]) => name.startsWith(NUMBER)).map(([name, value]) => [name.slice(NUMBER.length), value]));
const around = (run, step) => runLink(run, { from: Math.max(0, step - AROUND), to: step + AROUND });
const shownNumber = (value) => (value === null || value === undefined ? "no limit" : String(value));

function LastOnset({ run, rule }) {
  const { last } = rule;
  if (!last) return <span class="muted">never</span>;
  const href = last.incident ? incidentLink({ id: last.incident, run }) : around(run, last.step);
  return (
    <>
      <a href={href}>step {grouped(last.step)}</a> <span class="muted">{ago(last.time)}</span>
      <div class="muted">{seen(last.tag_name, 100)}</div>
    </>
  );
}

function Numbers({ numbers }) {
  const moved = numbers.filter((one) => one.value !== one.default);
  const words = (one) => `${one.name} ${shownNumber(one.value)}`;
  return (
    <details class="inline">
      <summary>{moved.length ? moved.map(words).join(", ") : plural(numbers.length, "number")}</summary>
      <ul>{numbers.map((one) => <li key={one.name}><code>{one.name}</code> {shownNumber(one.value)}{one.value !== one.default && <span class="muted"> (default {shownNumber(one.default)})</span>}</li>)}</ul>
    </details>
  );
}

function RuleRow({ run, rule, isChosen }) {
  return (
    <tr>
      <td data-name="rule">
        <a href={rulesLink(run, { rule: rule.name })} aria-current={isChosen ? "true" : undefined}>{seen(rule.name, 80)}</a>
        <div>{seen(rule.description, 400)}</div>
        <div class="muted">{seen(rule.watched, 300)}</div>
        {rule.blind.map((one) => <div key={one} class="warning">blind: {seen(one, 300)}</div>)}
      </td>
      <td data-name="severity" class={severityClass(rule.severity)}>{seen(rule.severity)}</td>
      <td data-name="spoke" class="number">{rule.num_onsets ? `${grouped(rule.num_onsets)} x` : <span class="muted">0</span>}</td>
      <td data-name="last"><LastOnset run={run} rule={rule} /></td>
      <td data-name="numbers"><Numbers numbers={rule.numbers} /></td>
    </tr>
  );
}

// The form: a number is moved here, and asked about with what stands in the address, which leads back to the answer.
function WhatIf({ run, rule, query }) {
  const given = numbersOf(query);
  const [typed, setTyped] = useState(given);
  const key = JSON.stringify(given);
  useEffect(() => setTyped(JSON.parse(key)), [rule.name, key]);
  const isMoved = (one) => typed[one.name] !== undefined && typed[one.name] !== "" && Number(typed[one.name]) !== one.value;
  const moved = rule.numbers.filter(isMoved);
  const submit = (event) => {
    event.preventDefault();
    go(rulesLink(run, { rule: rule.name, ...Object.fromEntries(moved.map((one) => [NUMBER + one.name, typed[one.name]])) }));
  };
  const asked = Object.fromEntries(Object.entries(given).filter(([, text]) => text.trim() !== "" && Number.isFinite(Number(text))).map(([name, text]) => [name, Number(text)]));
  return (
    <section class="whatif" aria-label={`What if: ${seen(rule.name, 80)}`}>
      <h2>What if: {seen(rule.name, 80)}</h2>
      <p>{seen(rule.description, 400)} <span class="muted">{seen(rule.detector, 80)}; {seen(rule.watched, 300)}{rule.source && `; from ${seen(rule.source, 200)}`}</span></p>
      <form onSubmit={submit}>
        <div class="numbers">
          {rule.numbers.map((one) => (
            <div key={one.name}>
              <label>{one.name}
                <input
                  type="number" step={one.is_whole ? "1" : "any"} class={isMoved(one) ? "moved" : ""} placeholder={shownNumber(one.value)}
                  value={typed[one.name] ?? one.value ?? ""} onInput={(event) => setTyped({ ...typed, [one.name]: event.currentTarget.value })}
                />
              </label>
              <p class="muted">{isMoved(one) ? `was ${shownNumber(one.value)}. ` : ""}{seen(one.meaning, 400)}</p>
            </div>
          ))}
        </div>
        <button type="submit" disabled={!moved.length}>What would it have said?</button>{" "}
        <button type="button" onClick={() => go(rulesLink(run, {}))}>Close</button>
      </form>
      {Object.keys(asked).length > 0 && <Answer run={run} rule={rule} numbers={asked} />}
    </section>
  );
}

function Answer({ run, rule, numbers }) {
  const body = JSON.stringify({ run, rule: rule.name, numbers });
  const [state, setState] = useState({ body: "", data: null, error: null });
  useEffect(() => {
    const abort = new AbortController();
    ask("api/v1/rules/what-if", JSON.parse(body), abort.signal).then(
      (data) => !abort.signal.aborted && setState({ body, data, error: null }),
      (error) => !abort.signal.aborted && setState({ body, data: null, error }),
    );
    return () => abort.abort();
  }, [body]);
  if (state.body !== body) return <p role="status" class="muted">Judging what the run has recorded, with the numbers in force and with these.</p>;
  if (state.error) return <p role="alert" class="problem">{seen(state.error.message, 600)}</p>;
  return <Told run={run} told={state.data} />;
}

const WHY = {
  time: "time was up",
  memory: "memory was up",
  alarms: "it said so much that no further step was judged",
};
const WHAT = { comes: "comes", goes: "goes", stays: "stays" };

function notesOf(told) {
  const notes = [];
  const span = told.num_steps ? `steps ${grouped(told.first_step)} to ${grouped(told.last_step)}` : "no step";
  if (told.stopped) notes.push(`Not the whole run was asked: ${WHY[told.stopped] ?? told.stopped} behind ${grouped(told.num_steps)} of ${grouped(told.num_decided)} steps (${span}). sentinel rules backtest has no such limits.`);
  if (told.num_before) notes.push(`The journal begins behind decision ${grouped(told.num_before)}: what came before it is not asked.`);
  if (told.num_incomplete) notes.push(`Of ${plural(told.num_incomplete, "step")} rows are no longer in the spool: what is gone was not judged.`);
  const now = told.difference.onsets[1];
  if (told.num_recorded !== now || told.num_recorded_again !== told.num_recorded) notes.push(`While the run trained the rule said ${grouped(told.num_recorded)} of this; with the numbers in force it says ${grouped(now)} of these steps, ${grouped(told.num_recorded_again)} of them the same: the rules changed meanwhile, or rows are gone.`);
  if (told.others.num_new || told.others.num_lost) notes.push(`Of other rules ${plural(told.others.num_new, "alarm")} would come and ${grouped(told.others.num_lost)} go.`);
  return [...notes, ...told.lint.map((one) => `Probably not meant: ${one}`)];
}

// Where in the run alarms come, go and stay, one line each; the table says the same.
function Strip({ told }) {
  const span = Math.max(1, told.last_step - told.first_step);
  const lines = ["comes", "goes", "stays"];
  return (
    <svg class="strip" viewBox="0 0 1000 54" preserveAspectRatio="none" role="img" aria-label={`Alarms over steps ${grouped(told.first_step)} to ${grouped(told.last_step)}; the table below says the same`}>
      {lines.map((what, at) => <line key={what} class="axis" x1="0" x2="1000" y1={at * 18 + 17} y2={at * 18 + 17} />)}
      {told.alarms.map((one) => <rect key={`${one.what}/${one.id}`} class={one.what} x={Math.min(994, ((one.step - told.first_step) / span) * 994)} y={lines.indexOf(one.what) * 18 + 3} width="6" height="13" />)}
    </svg>
  );
}

function Told({ run, told }) {
  const [all, setAll] = useState(false);
  const count = (what) => told.alarms.filter((one) => one.what === what).length;
  const stays = told.difference.onsets[0] - told.difference.num_new;
  const changes = Object.entries(told.numbers).map(([name, [before, now]]) => `${name} ${shownNumber(before)} \u2192 ${shownNumber(now)}`).join(", ");
  return (
    <>
      <p role="status">
        <b>{seen(changes, 200)}</b>: {told.num_steps ? `over steps ${grouped(told.first_step)} to ${grouped(told.last_step)}` : "no step was judged"},{" "}
        <b>{plural(told.difference.num_new, "alarm")} come{told.difference.num_new === 1 ? "s" : ""}, {grouped(told.difference.num_lost)} go{told.difference.num_lost === 1 ? "es" : ""}, {grouped(stays)} stay{stays === 1 ? "s" : ""}</b>;{" "}
        in {plural(told.difference.incidents[0], "incident")}, now {grouped(told.difference.incidents[1])}; {plural(told.difference.pages[0], "page")}, now {grouped(told.difference.pages[1])}.
      </p>
      {notesOf(told).map((one) => <p key={one} class="notice">{seen(one, 600)}</p>)}
      {told.alarms.length > 0 && (
        <>
          <Strip told={told} />
          <p class="muted">upper line: comes, middle: goes, lower: stays{told.num_alarms > told.alarms.length ? `; the first ${grouped(told.alarms.length)} of ${grouped(told.num_alarms)} alarms (${count("comes")} come, ${count("goes")} go)` : ""}</p>
          <div class="wide"><table class="cards">
            <thead><tr><th>What</th><th class="number">Step</th><th>Tensor or value</th><th class="number">Rank</th><th>Severity</th><th class="number">Value</th><th class="number">Baseline</th><th>Incident</th></tr></thead>
            <tbody>{told.alarms.slice(0, all ? told.alarms.length : MOST_SHOWN).map((one) => (
              <tr key={`${one.what}/${one.id}`}>
                <td data-name="what"><b>{WHAT[one.what]}</b></td>
                <td data-name="step" class="number"><a href={around(run, one.step)}>{grouped(one.step)}</a></td>
                <td data-name="tensor or value">{seen(one.channel, 160)} <span class="muted">{seen(one.kind, 40)} {seen(one.statistic, 40)}</span></td>
                <td data-name="rank" class="number">{one.rank ?? ""}</td>
                <td data-name="severity" class={severityClass(one.severity)}>{seen(one.severity, 12)}</td>
                <td data-name="value" class="number">{one.value === null ? seen(one.value_text, 10) || "\u2013" : number(one.value)}</td>
                <td data-name="baseline" class="number">{one.baseline === null ? "" : number(one.baseline)}</td>
                <td data-name="incident">{one.is_recorded && one.incident ? <a href={incidentLink({ id: one.incident, run })}>{seen(one.incident, 40)}</a> : <span class="muted">{one.is_recorded ? "" : "not said while it trained"}</span>}</td>
              </tr>
            ))}</tbody>
          </table></div>
          {told.alarms.length > MOST_SHOWN && !all && <button type="button" onClick={() => setAll(true)}>{plural(told.alarms.length - MOST_SHOWN, "more row")}</button>}
        </>
      )}
      <Pack run={run} told={told} />
    </>
  );
}

function Pack({ told }) {
  const [isCopied, setIsCopied] = useState(false);
  const name = "what-if.yaml";
  const download = () => {
    const url = URL.createObjectURL(new Blob([told.pack], { type: "application/yaml" }));
    const link = Object.assign(document.createElement("a"), { href: url, download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  };
  const copy = () => navigator.clipboard?.writeText(told.pack).then(() => setIsCopied(true), () => setIsCopied(false));
  return (
    <>
      <h3>As a pack</h3>
      <p class="muted">
        {told.written_in ? <>This rule stands in <code>{seen(told.written_in, 200)}</code>: change it there, or give this file behind that one.</> : <>Read by the same reader as your packs. Put it beside them, give it with <code>--rules</code>, and have it read with <code>sentinel rules check {name}</code>.</>}
      </p>
      <pre tabIndex={0} aria-label="The pack">{seenLines(told.pack)}</pre>
      <button type="button" onClick={download}>Download {name}</button>{" "}
      <button type="button" onClick={copy}>{isCopied ? "Copied" : "Copy"}</button>
    </>
  );
}

const seenLines = (text) => text.split("\n").map((one) => seen(one, 1000)).join("\n");

const isBlind = (rule) => rule.blind.length > 0;

export function RulesView({ name: run, query }) {
  const answer = useAnswer(address("api/v1/rules", { run }), 10_000, true);
  const told = answer.data;
  const rules = useMemo(() => {
    // Who spoke last comes first, then who was silent, then who sees nothing.
    const order = (one) => (one.last ? 0 : isBlind(one) ? 2 : 1);
    return [...(told?.rules ?? [])].sort((a, b) => order(a) - order(b) || (b.last?.time ?? 0) - (a.last?.time ?? 0));
  }, [told]);
  if (!told) return <p class={answer.error ? "problem" : "muted"}>{answer.error ? seen(answer.error.message) : "Asking the daemon."}</p>;
  const chosen = query.rule !== undefined ? told.rules.find((one) => one.name === query.rule) : null;
  const spoke = told.rules.filter((one) => one.last).length;
  const blind = told.rules.filter(isBlind).length;
  return (
    <>
      <h1>{seen(run, 120)}</h1>
      <RunTabs run={run} current="Rules" query={{}} />
      {query.rule !== undefined && !chosen && <p class="problem">No rule of this name is in force: {seen(query.rule, 100)}</p>}
      {chosen && <WhatIf key={chosen.name} run={run} rule={chosen} query={query} />}
      <h2>Rules in force</h2>
      <p class="muted">
        {plural(told.rules.length, "rule")} of pack <code>{seen(told.pack_hash, 20)}</code> judged {plural(told.num_steps, "step")}: {grouped(spoke)} spoke, {grouped(told.rules.length - spoke - told.rules.filter((one) => isBlind(one) && !one.last).length)} had nothing to say, {grouped(blind)} {blind === 1 ? "is" : "are"} blind.
        {!told.is_counted && " Still counting."}{told.is_cut && " What is older than the journal is not counted."} A rule's name asks what it would have said with other numbers.
      </p>
      <table class="cards rules">
        <thead><tr><th>Rule, and what it watches</th><th>Severity</th><th class="number">Spoke</th><th>Last</th><th>Numbers</th></tr></thead>
        <tbody>{rules.map((one) => <RuleRow key={one.name} run={run} rule={one} isChosen={one === chosen} />)}</tbody>
      </table>
    </>
  );
}
