// Requests: each as a bar of queue, prefill chunks and decode, on one time axis; the record on a click.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { feed } from "console/events.js";
import { clock, count, ms, percent } from "console/format.js";
import { drawTimeline, hitTest, layout } from "console/pages/timeline.js";
import { Badge, CopyButton, Empty, Table, Tabs, html, icons } from "console/ui.js";

const KEPT = 2000;
const LISTED = 25;
const SPANS = { "30 s": 30_000, "2 min": 120_000, "10 min": 600_000 };
const TONES = { done: "good", aborted: "alarm", failed: "alarm", decode: "accent", queued: "plain" };

// Every record replaces the one of the same id, so an event that comes twice shows nothing twice.
const requests = new Map();
const put = (records) => {
  for (const record of records) {
    requests.delete(record.id);
    requests.set(record.id, record);
  }
  for (const id of requests.keys()) {
    if (requests.size <= KEPT) break;
    requests.delete(id);
  }
};
feed.on("requests.snapshot", (records) => (requests.clear(), put(records)));
feed.on("requests", put);

export default function Requests() {
  const [turn, redraw] = useState(0);
  const [span, setSpan] = useState("2 min");
  const [model, setModel] = useState("");
  const [isPaused, setPaused] = useState(false);
  const [chosen, setChosen] = useState(null);
  useEffect(() => {
    const heard = () => redraw((old) => old + 1);
    const ways = [feed.on("requests.snapshot", heard), feed.on("requests", heard)];
    return () => ways.forEach((leave) => leave());
  }, []);
  const all = useMemo(() => [...requests.values()].filter((one) => !model || one.model === model), [turn, model]);
  const models = [...new Set([...requests.values()].map((one) => one.model))];
  const record = chosen && (requests.get(chosen.id) ?? chosen);
  return html`<div class="view">
    <div class="toolbar">
      <h1>Requests</h1>
      <span class="spread"></span>
      ${models.length > 1 && html`<select aria-label="Model" value=${model} onChange=${(event) => setModel(event.target.value)}><option value="">all models</option>${models.map((name) => html`<option>${name}</option>`)}</select>`}
      <${Tabs} names=${Object.keys(SPANS)} value=${span} onChange=${setSpan} label="Time shown" />
      <button type="button" class="quiet" aria-pressed=${isPaused} onClick=${() => setPaused(!isPaused)}>${isPaused ? "Follow" : "Hold"}</button>
    </div>
    <section class="panel" aria-label="Timeline">
      <${Timeline} records=${all} spanMs=${SPANS[span]} isPaused=${isPaused} chosen=${record} choose=${setChosen} />
      <div class="legend">
        ${[["--c-queue", "queue"], ["--c-prefill", "prefill chunks"], ["--c-decode", "decode"], ["--c-cached", "cache hit"], ["--alarm", "aborted or failed"], ["--warn", "preempted"]].map(([colour, name]) => html`<span><i style=${{ "--swatch": `var(${colour})` }}></i>${name}</span>`)}
      </div>
    </section>
    <div class="with-detail" data-open=${!!record}>
      <section class="panel" aria-label="Last requests">
        ${all.length === 0 ? html`<${Empty} title="No requests yet" icon=${icons.requests}>Each request appears here when it is accepted.<//>` : html`<${List} records=${all} chosen=${record} choose=${setChosen} />`}
      </section>
      ${record && html`<${Detail} record=${record} onClose=${() => setChosen(null)} />`}
    </div>
  </div>`;
}

function Timeline({ records, spanMs, isPaused, chosen, choose }) {
  const canvas = useRef();
  const state = useRef({});
  state.current = { ...state.current, records, spanMs, chosen };
  if (!isPaused) state.current.heldAt = null;
  else state.current.heldAt ??= Date.now();
  useEffect(() => {
    let frame;
    let last = {};
    const draw = () => {
      if (!canvas.current) return; // the page was left within this frame
      frame = requestAnimationFrame(draw);
      const { heldAt, records, spanMs, chosen } = state.current;
      const now = heldAt ?? Date.now();
      const { clientWidth: width, clientHeight: height } = canvas.current;
      const isSame = last.records === records && last.spanMs === spanMs && last.chosen === chosen && last.width === width && last.height === height;
      // Nothing is drawn for less than half a pixel of movement.
      if (isSame && now - last.now < spanMs / width / 2 && performance.now() - last.at < 500) return;
      const isLaidOut = last.records === records && last.spanMs === spanMs && now - last.laidOut < 500;
      if (!isLaidOut) state.current.rows = layout(records, now - spanMs, now);
      drawTimeline(canvas.current, state.current.rows, now - spanMs, now, chosen?.id);
      last = { records, spanMs, chosen, width, height, now, at: performance.now(), laidOut: isLaidOut ? last.laidOut : now };
    };
    draw();
    return () => cancelAnimationFrame(frame);
  }, []);
  const click = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const now = state.current.heldAt ?? Date.now();
    const found = hitTest(state.current.rows, event.clientX - box.left, event.clientY - box.top, box, now - spanMs, now);
    if (found) choose(found);
  };
  const most = layout(records, Date.now() - spanMs, Date.now()).count;
  const height = Math.min(380, Math.max(120, most * 13 + 40));
  return html`<div class="timeline" style=${{ height: `${height}px` }}><canvas ref=${canvas} onClick=${click} role="img" aria-label=${`Timeline of ${count(records.length)} requests; the list below has the same records`}></canvas></div>`;
}

const LIST = [
  { name: "Arrived", cell: (one) => clock(one.at) },
  { name: "State", cell: (one) => html`<${Badge} tone=${TONES[one.state]}>${one.state}<//>${one.preemptions ? html` <${Badge} tone="warn">preempted ${one.preemptions}×<//>` : ""}` },
  { name: "Prompt", number: true, cell: (one) => count(one.prompt ?? 0) },
  { name: "Cached", number: true, cell: (one) => percent(one.prompt ? (one.cached ?? 0) / one.prompt : 0) },
  { name: "Output", number: true, cell: (one) => count(one.out ?? 0) },
  { name: "Queue", number: true, cell: (one) => ms(one.admitted) },
  { name: "TTFT", number: true, cell: (one) => ms(one.first) },
  { name: "TPOT", number: true, cell: (one) => ms(one.tpot) },
];
const MODEL = { name: "Model", cell: (one) => one.model };

function List({ records, chosen, choose }) {
  const shown = [...records].sort((one, other) => other.at - one.at).slice(0, LISTED);
  const several = new Set(records.map((one) => one.model)).size > 1;
  const open = { name: "Record", isHidden: true, number: true, cell: (one) => html`<button type="button" class="quiet" aria-label=${`Record of ${one.id}`} onClick=${() => choose(one)}>Record</button>` };
  const columns = [...LIST.slice(0, 2), ...(several ? [MODEL] : []), ...LIST.slice(2), open];
  return html`<${Table} caption=${`The last ${count(shown.length)} of ${count(records.length)} requests`} columns=${columns} rows=${shown} keyOf=${(one) => one.id} isDense
    attrs=${(one) => ({ class: "clickable", "aria-selected": chosen?.id === one.id, onClick: () => choose(one) })} />`;
}

// The spans that the server exports for a request (docs/telemetry.md), on the request's own time axis.
export function spansOf(record, now = Date.now()) {
  const end = record.sent ?? record.end ?? now - record.at;
  const admitted = record.admitted ?? end;
  const first = record.first ?? end;
  return [
    { name: "request", from: 0, to: end, colour: "--strong-line" },
    { name: "engine.queue", from: 0, to: admitted, colour: "--c-queue" },
    ...(record.admitted == null ? [] : [{ name: "engine.prefill", from: admitted, to: first, colour: "--c-prefill", marks: (record.chunks ?? []).filter((at) => at <= first) }]),
    ...(record.first == null ? [] : [{ name: "engine.decode", from: first, to: record.last ?? end, colour: "--c-decode", marks: (record.chunks ?? []).filter((at) => at > first) }]),
  ];
}

function Trace({ record }) {
  const spans = spansOf(record);
  const all = Math.max(spans[0].to, 0.001);
  const at = (value) => `${Math.min(100, (100 * value) / all)}%`;
  return html`<div class="trace" role="img" aria-label=${spans.map(({ name, from, to }) => `${name}: ${ms(to - from)}`).join(", ")}>
    ${spans.map(({ name, from, to, colour, marks = [] }) => html`<span>${name}</span><span class="track">
      <i style=${{ left: at(from), width: `max(2px, ${at(to - from)})`, background: `var(${colour})` }}></i>
      ${marks.slice(1, 200).map((mark) => html`<b style=${{ left: at(mark) }}></b>`)}</span><span class="number">${ms(to - from)}</span>`)}
  </div>`;
}

function Detail({ record, onClose }) {
  const after = (from, to) => (record[to] == null || record[from] == null ? null : record[to] - record[from]);
  const facts = [
    ["request id", html`<code>${record.id}</code>`],
    ["state", record.reason && record.reason !== record.state ? `${record.state}, ${record.reason}` : record.state],
    ["path", record.path],
    ["arrived", new Date(record.at).toISOString().replace("T", " ")],
    ["queue_s", ms(record.admitted)],
    ["prefill_s", ms(after("admitted", "first"))],
    ["prefill chunks", (record.chunks ?? []).length || "–"],
    ["ttft_s", ms(record.first)],
    ["decode_s", ms(after("first", "last"))],
    ["tpot_s", ms(record.tpot)],
    ["longest gap", ms(record.longest_gap)],
    ["inference_s", ms(after("admitted", "end"))],
    ["e2e_s", ms(record.sent ?? record.end)],
    ["prompt tokens", count(record.prompt ?? 0)],
    ["cached tokens", count(record.cached ?? 0)],
    ["output tokens", count(record.out ?? 0)],
    ["preemptions", count(record.preemptions ?? 0)],
    ["recomputed tokens", count(record.recomputed ?? 0)],
    ["drafted / accepted", `${count(record.drafted ?? 0)} / ${count(record.accepted ?? 0)}`],
    ...(record.status ? [["HTTP status", record.status]] : []),
  ];
  return html`<aside class="panel detail" aria-label="TimingRecord">
    <div class="toolbar"><h2>TimingRecord</h2><span class="spread"></span><${CopyButton} text=${() => JSON.stringify(record, null, 2)} label="JSON" /><button type="button" class="quiet square" aria-label="Close the record" onClick=${onClose}>${icons.close}</button></div>
    <h3>Trace</h3>
    <${Trace} record=${record} />
    <p class="faint">${record.trace ? html`trace id <code>${record.trace}</code>` : "No trace id: the request came without a traceparent header and was not sampled."}</p>
    <h3>Times and counts</h3>
    <dl class="facts">${facts.map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl>
  </aside>`;
}
