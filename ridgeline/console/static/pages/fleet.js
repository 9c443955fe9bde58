// Fleet: models with their targets and rollouts, replicas with their states, and the controller's decisions.

import { useEffect, useState } from "preact/hooks";
import { feed } from "console/events.js";
import { clock, count, percent, rate, since } from "console/format.js";
import { Badge, Figure, Loading, Meter, Notice, Table, html } from "console/ui.js";

const TONES = { ready: "good", ramping: "accent", starting: "accent", draining: "warn", lost: "alarm" };
const KEPT = 500;
const events = new Map();
const put = (found) => {
  for (const one of found) events.set(one.id, one);
  for (const id of events.keys()) {
    if (events.size <= KEPT) break;
    events.delete(id);
  }
};
feed.on("fleet.snapshot", (snapshot) => put(snapshot.events));
feed.on("fleet", put);

export default function Fleet() {
  const [status, setStatus] = useState(feed.last.get("fleet.frame") ?? feed.last.get("fleet.snapshot")?.status);
  const [, redraw] = useState(0);
  useEffect(() => {
    const ways = [
      feed.on("fleet.snapshot", (snapshot) => setStatus(snapshot.status)),
      feed.on("fleet.frame", setStatus),
      feed.on("fleet", () => redraw((turn) => turn + 1)),
    ];
    return () => ways.forEach((leave) => leave());
  }, []);
  if (!status) return html`<div class="view"><div class="toolbar"><h1>Fleet</h1></div><section class="panel"><${Loading} lines=${6} label="Waiting for the controller" /></section></div>`;
  return html`<div class="view">
    <div class="toolbar"><h1>Fleet</h1>${status.fleet && html`<${Badge}>${status.fleet}<//>`}${status.stopping && html`<${Badge} tone="warn">stopping<//>`}<span class="spread"></span><span class="faint">${status.url} · up ${since(status.up_s)} · ${count(status.routers_reporting)} of ${count(status.routers)} routers report</span></div>
    ${status.models.map((model) => html`<${Model} key=${model.name} model=${model} replicas=${status.replicas.filter((one) => one.model === model.name)} />`)}
    ${status.left_out > 0 && html`<p class="faint">${count(status.left_out)} ready replicas are not shown; <code>ridgeline fleet status</code> lists all.</p>`}
    <${Decisions} />
  </div>`;
}

function Model({ model, replicas }) {
  const out = replicas.reduce((sum, one) => sum + one.output_tokens_per_s, 0);
  const limits = replicas.map((one) => one.limit_tokens_per_s);
  const limit = limits.length && limits.every((one) => one != null) ? limits.reduce((sum, one) => sum + one, 0) : null;
  const sum = (name) => replicas.reduce((all, one) => all + one[name], 0);
  return html`<section class="panel" aria-label=${model.name}>
    <header><h2>${model.name}</h2>
      <${Badge} tone=${model.serving >= model.target ? "good" : "warn"}>${count(model.serving)} of ${count(model.target)} replicas serve<//>
      ${model.rollout && html`<${Badge} tone="accent">rollout: ${model.rollout} to ${model.rollout_to.slice(0, 12)}<//>`}
      ${model.crash_loop && html`<${Badge} tone="alarm">crash loop<//>`}
      <span class="faint">version ${model.version.slice(0, 12)}</span>
    </header>
    ${model.blocked && html`<${Notice} tone="alarm">${model.blocked}<//>`}
    <div class="fleet-head">
      <div class="heroes"><${Figure} name="Output" value=${rate(out)} unit="tok/s" share=${limit ? out / limit : null} of=${limit ? `${percent(out / limit)} of the limit, ${rate(limit)} tok/s` : "the limit is not known"} formula="Σ output_tokens_per_s of the model's replicas ÷ Σ limit_tokens_per_s: for each replica the machine's limit for the requests that run now." /></div>
      <div class="figures">
        <${Figure} name="Running" value=${count(sum("running"))} unit=${`of ${count(sum("max_running"))}`} formula="Σ running of the replicas' feeds, of Σ max_running." />
        <${Figure} name="Queue" value=${count(sum("waiting"))} formula="Σ waiting of the replicas' feeds." />
        <${Figure} name="KV held" value=${percent(sum("kv_blocks") ? sum("kv_blocks_held") / sum("kv_blocks") : null)} formula="Σ kv_blocks_held ÷ Σ kv_blocks of the replicas' feeds." />
        <${Figure} name="Cache hits" value=${percent(sum("prefix_queries") ? sum("prefix_hits") / sum("prefix_queries") : null)} formula="Σ prefix_hits ÷ Σ prefix_queries since the replicas started, in tokens." />
      </div>
    </div>
    ${model.explained && html`<p class="faint spaced"><strong>Scaling:</strong> ${model.explained}</p>`}
    ${model.last_rollout && html`<p class="faint spaced"><strong>Last rollout:</strong> ${model.last_rollout}</p>`}
    ${(model.warnings ?? []).map((text) => html`<${Notice}>${text}<//>`)}
    <div class="spaced"><${Table} caption=${`Replicas of ${model.name}`} columns=${[...REPLICA, ...(replicas.some((one) => one.region || one.pool) ? [PLACE] : []), ...(replicas.some((one) => one.reason) ? [WHY] : [])]} rows=${replicas} keyOf=${(one) => one.id} /></div>
  </section>`;
}

const share = (one) => (one.limit_tokens_per_s ? one.output_tokens_per_s / one.limit_tokens_per_s : null);
const REPLICA = [
  { name: "Replica", cell: (one) => html`<code>${one.id}</code>` },
  { name: "State", cell: (one) => html`<${Badge} tone=${TONES[one.state]}>${one.state}<//>` },
  { name: "In this state", number: true, cell: (one) => since(one.in_state_s) },
  { name: "Running", number: true, cell: (one) => `${count(one.running)} of ${count(one.max_running)}` },
  { name: "Queue", number: true, cell: (one) => count(one.waiting) },
  { name: "tok/s", number: true, cell: (one) => rate(one.output_tokens_per_s) },
  { name: "Of limit", className: "share", cell: (one) => html`<span class="with-bar"><${Meter} share=${share(one)} label="Share of the limit" /><span title=${`output of the last report ÷ limit for the requests that run now, ${rate(one.limit_tokens_per_s)} tok/s; above 100 % while requests end`}>${percent(share(one))}</span></span>` },
  { name: "KV held", number: true, cell: (one) => percent(one.kv_blocks ? one.kv_blocks_held / one.kv_blocks : null) },
];
const PLACE = { name: "Place", cell: (one) => [one.region, one.pool].filter(Boolean).join(" ") || "–" };
const WHY = { name: "Why", wide: true, cell: (one) => one.reason || "–" };

const EVENT = [
  { name: "At", cell: (one) => clock(one.at * 1000) },
  { name: "Kind", cell: (one) => html`<${Badge}>${one.kind}<//>` },
  { name: "Model", cell: (one) => one.model || "–" },
  { name: "Replica", cell: (one) => (one.replica ? html`<code>${one.replica}</code>` : "–") },
  { name: "What and why", wide: true, cell: (one) => one.text },
];

function Decisions() {
  const shown = [...events.values()].sort((one, other) => other.id - one.id).slice(0, 100);
  return html`<section class="panel" aria-label="Decisions and events"><header><h2>Decisions and events</h2></header>
    ${shown.length === 0 ? html`<p class="faint">None yet.</p>` : html`<${Table} caption="Decisions and events, the newest first" columns=${EVENT} rows=${shown} keyOf=${(one) => one.id} />`}
  </section>`;
}
