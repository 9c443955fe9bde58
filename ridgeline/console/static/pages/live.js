// Live: each model's throughput beside the machine's limit, KV blocks, queue, hit rate and step times.

import { useEffect, useRef, useState } from "preact/hooks";
import { feed } from "console/events.js";
import { lineChart } from "console/charts.js";
import { count, ms, percent, rate } from "console/format.js";
import { Badge, Figure, Loading, Notice, html } from "console/ui.js";

const KEPT = 300; // seconds in the charts
const history = new Map(); // model → its frames with rates, oldest first; kept while other pages are open

const difference = (now, before, name) => Math.max(0, (now[name] ?? 0) - (before[name] ?? 0));

// Rates of one second, from the counters of two frames.
export function rates(now, before, seconds, limits = {}) {
  const recent = now.recent ?? {};
  const batch = recent.count ? (recent.decode_rows ?? 0) / recent.count : 0;
  const out = difference(now, before, "output_tokens") / seconds;
  const prompt = difference(now, before, "prompt_tokens") / seconds;
  const decode = limits.decode_tokens_per_s;
  const limit = decode && Math.min(decode * Math.max(batch, 1), limits.prefill_tokens_per_s ?? Infinity);
  const steps = (recent.count ?? 0) / seconds;
  return {
    out,
    prompt,
    computed: now.recent ? (recent.prefill_tokens ?? 0) / seconds : null,
    batch,
    limit: limit || null,
    share: limit ? out / limit : null,
    mbu: decode ? steps / decode : null,
    mfu: limits.prefill_tokens_per_s ? (((recent.prefill_tokens ?? 0) + (recent.decode_rows ?? 0)) / seconds) / limits.prefill_tokens_per_s : null,
    busy: now.recent ? Math.min((recent.busy_s ?? 0) / seconds, 1) : null,
  };
}

let about = { models: [], edges_ms: [] };
feed.on("metrics.snapshot", (snapshot) => {
  about = snapshot;
});
const note = (frame) => {
  for (const model of frame.models) {
    const frames = history.get(model.name) ?? [];
    const before = frames.at(-1);
    if (before && before.at >= frame.at) continue;
    const limits = about.models.find((one) => one.name === model.name)?.limits;
    // A counter that falls is a new engine: no rate is made of it.
    const usable = before && frame.at - before.at < 5 && (model.steps ?? 0) >= (before.model.steps ?? 0);
    frames.push({ at: frame.at, model, rates: usable ? rates(model, before.model, frame.at - before.at, limits) : null });
    history.set(model.name, frames.slice(-KEPT));
  }
};
for (const frame of feed.past.get("metrics.frame") ?? []) note(frame);
feed.on("metrics.frame", note);

// The limit is in the chart while the output comes near it; else the output's line would lie on the axis.
export function top([, out, limit]) {
  const output = Math.max(0, ...out.filter((one) => one != null));
  return Math.max(output, Math.min(Math.max(0, ...limit.filter((one) => one != null)), 3 * output));
}

export default function Live() {
  const [frame, setFrame] = useState(null);
  useEffect(() => feed.on("metrics.frame", setFrame), []);
  return html`<div class="view">
    <div class="toolbar"><h1>Live</h1><span class="spread"></span><span class="faint">One frame a second. Point at a figure for its formula.</span></div>
    ${frame ? frame.models.map((model) => html`<${ModelPanel} key=${model.name} model=${model} />`) : html`<section class="panel"><${Loading} lines=${6} label="Waiting for the first figures" /></section>`}
  </div>`;
}

function ModelPanel({ model }) {
  const frames = history.get(model.name) ?? [];
  const known = about.models.find((one) => one.name === model.name) ?? {};
  const now = frames.at(-1)?.rates ?? {};
  const hits = recentHits(frames);
  const { decode_tokens_per_s: decode, prefill_tokens_per_s: prefill } = known.limits ?? {};
  const nearly = (known.limits?.uncertainty ?? 0) > 0.05 ? "about " : "";
  const limitText = (share, limit) => (limit ? `${percent(share)} of the limit, ${nearly}${rate(limit)} tok/s` : "the machine's limit is not known");
  return html`<section class="panel" aria-label=${model.name}>
    <header>
      <h2>${model.name}</h2>
      <${Badge} tone=${model.ready ? "good" : "alarm"}>${model.ready ? "ready" : "not ready"}<//>
      <span class="faint">${known.backend}</span>
    </header>
    ${!model.ready && html`<${Notice} tone="alarm">${model.reason}<//>`}
    <div class="model-grid">
      <div class="heroes">
        <${Figure} name="Output" value=${rate(now.out)} unit="tok/s" share=${now.share} of=${limitText(now.share, now.limit)}
          formula=${`Δ generation_tokens_total ÷ Δ time, over the last two frames. Limit = min(decode limit of one stream × mean decode batch, prefill limit) = min(${rate(decode)} × ${rate(Math.max(now.batch ?? 0, 1))}, ${rate(prefill)}).`} />
        <${Figure} name="Prompt, computed" value=${rate(now.computed)} unit="tok/s" share=${prefill ? now.computed / prefill : null} of=${limitText(prefill ? now.computed / prefill : null, prefill)}
          formula=${`Σ prefill_tokens of the steps ÷ Δ time. Limit = prefill_tokens_per_s: peak arithmetic ÷ arithmetic of a token. With tokens found in the cache: ${rate(now.prompt)} tok/s.`} />
      </div>
      <${Throughput} name=${model.name} frames=${frames} limit=${now.limit} />
    </div>
    <div class="figures ruled">
      <${Figure} name="Running" value=${count(model.running ?? 0)} unit=${known.max_running ? `of ${count(known.max_running)}` : ""} formula="num_requests_running; max_running is the engine's setting." />
      <${Figure} name="Queue" value=${count(model.waiting ?? 0)} unit=${model.background ? `+ ${count(model.background)} background` : ""} formula="num_requests_waiting; background requests apart." />
      <${Figure} name="Cache hits, 5 min" value=${percent(hits.found)} unit=${hits.found === null || hits.found === 1 ? "" : `${percent(hits.evicted)} evicted, ${percent(1 - hits.found - hits.evicted)} new`} formula="Δ prefix_cache_hits_total ÷ Δ prefix_cache_queries_total, in prompt tokens, over the frames of the chart. Missed tokens: evicted ones were cached once (Δ prefix_cache_evicted_total); new ones were not seen before, or fill no whole block." />
      <${Figure} name="Preemptions" value=${count(model.preemptions ?? 0)} formula="num_preemptions_total since the engine started." tone=${model.preemptions ? "alarm" : ""} />
      <${Figure} name="Busy" value=${percent(now.busy)} formula="Σ busy_s of the steps since the last frame ÷ Δ time: the share of time in which a step ran." />
      <${Figure} name="Decode batch" value=${rate(now.batch)} formula="Σ decode_batch of the steps since the last frame ÷ their number." />
      <${Figure} name="MBU" value=${percent(now.mbu)} formula="steps per second ÷ decode limit of one stream: bytes of weights read ÷ read bandwidth. KV reads are not counted." />
      <${Figure} name="MFU" value=${percent(now.mfu)} formula="tokens computed per second ÷ prefill limit: arithmetic done ÷ peak arithmetic." />
    </div>
    <div class="split">
      <${Blocks} model=${model} known=${known} />
      <${StepTimes} frames=${frames} />
    </div>
  </section>`;
}

function Blocks({ model, known }) {
  const total = known.kv_blocks ?? 0;
  const held = model.held ?? 0;
  const cached = model.cached ?? 0;
  const free = Math.max(total - held - cached, 0);
  const part = (colour, blocks) => html`<span style=${{ width: `${(100 * blocks) / (total || 1)}%`, background: `var(${colour})` }}></span>`;
  return html`<div>
    <div class="row"><h3>KV blocks</h3><span class="faint">${count(total)} of ${known.block_size ?? "–"} tokens</span></div>
    <div class="blocks" role="img" aria-label=${`${count(held)} held, ${count(cached)} cached, ${count(free)} free`}>${part("--c-decode", held)}${part("--c-prefill", cached)}</div>
    <div class="figures three">
      <${Figure} name=${html`<i style="--swatch: var(--c-decode)"></i>Held`} label="Held" value=${count(held)} unit=${percent(total ? held / total : null)} formula="kv_blocks held by running sequences, and their share of kv_blocks_total." />
      <${Figure} name=${html`<i style="--swatch: var(--c-prefill)"></i>Cached`} label="Cached" value=${count(cached)} unit=${percent(total ? cached / total : null)} formula="kv_blocks_cached: free, but reusable by prefix." />
      <${Figure} name=${html`<i style="--swatch: color-mix(in srgb, var(--ink) 14%, var(--sunken))"></i>Free`} label="Free" value=${count(free)} unit=${percent(total ? free / total : null)} formula=${`kv_blocks_total − held − cached; ${count(total)} blocks in all.`} />
    </div>
  </div>`;
}

function recentHits(frames) {
  const [first, last] = [frames[0]?.model, frames.at(-1)?.model];
  const asked = last && first ? difference(last, first, "prefix_queries") : 0;
  const share = (name) => (asked ? difference(last, first, name) / asked : null);
  return { found: share("prefix_hits"), evicted: share("prefix_evicted") };
}

function Throughput({ name, frames, limit }) {
  const place = useRef();
  const chart = useRef();
  useEffect(() => {
    let current = true;
    lineChart(place.current, [
      { label: "output", colour: "--accent", fill: true },
      { label: "limit", colour: "--strong-line", dash: [4, 4] },
    ], { format: (value) => count(value), most: top }).then((made) => (current ? (chart.current = made) : made.destroy()), () => {});
    return () => ((current = false), chart.current?.destroy());
  }, []);
  useEffect(() => {
    // A frame without rates begins a new line: nothing is drawn over the time before it.
    const line = (name) => frames.map((one) => one.rates?.[name] ?? null);
    chart.current?.set([frames.map((one) => one.at), line("out"), line("limit")]);
  });
  return html`<div>
    <div class="legend"><span><i style="--swatch: var(--accent)"></i>output tok/s</span><span><i class="dashed"></i>limit at this batch${limit ? `, ${rate(limit)} tok/s` : ""}</span></div>
    <div class="chart" ref=${place} role="img" aria-label=${`Output tokens per second of ${name} over the last five minutes, with the limit`}></div>
  </div>`;
}

function StepTimes({ frames }) {
  const edges = about.edges_ms;
  const bins = new Array(edges.length + 1).fill(0);
  for (const { model } of frames.slice(-60)) for (const [bin, steps] of Object.entries(model.recent?.times ?? {})) bins[bin] += steps;
  const all = bins.reduce((sum, one) => sum + one, 0);
  const first = bins.findIndex(Boolean);
  const from = Math.max((first < 0 ? 0 : first) - 1, 0);
  const to = Math.min(bins.findLastIndex(Boolean) + 2, bins.length) || bins.length;
  const shown = bins.slice(from, to);
  const most = Math.max(...shown, 1);
  const edge = (index) => (index <= 0 ? "0" : ms(edges[index - 1]));
  return html`<div class="histogram">
    <div class="row"><h3>Step times, last minute</h3><span class="faint" title="wall_s of /debug/steps">${count(all)} steps</span></div>
    <div class="bars" role="img" aria-label=${`Histogram of ${count(all)} steps`}>
      ${all === 0 && html`<p class="faint">No step in the last minute.</p>`}
      ${all > 0 && shown.map((steps, index) => html`<span style=${{ height: `${Math.max((100 * steps) / most, steps ? 2 : 0)}%` }} title=${`${edge(from + index)} to ${from + index < edges.length ? ms(edges[from + index]) : "more"}: ${count(steps)} steps`}></span>`)}
    </div>
    <div class="bars-axis"><span>${edge(from)}</span><span>${to > edges.length ? `> ${edge(edges.length)}` : edge(to)}</span></div>
  </div>`;
}
