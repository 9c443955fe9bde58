// Fleet: models with their targets and rollouts, replicas with their states, and the controller's decisions.

import { useEffect, useState } from "preact/hooks";
import { feed } from "console/events.js";
import { clock, count, percent, rate, since } from "console/format.js";
import { Badge, Empty, Figure, Meter, Notice, html } from "console/ui.js";

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
  if (!status) return html`<div class="view"><h1>Fleet</h1><${Empty} title="Waiting for the controller">Its state comes once a second.<//></div>`;
  return html`<div class="view">
    <div class="toolbar"><h1>${status.fleet || "Fleet"}</h1>${status.stopping && html`<${Badge} tone="warn">stopping<//>`}<span class="spread"></span><span class="faint">${status.url} · up ${since(status.up_s)} · ${count(status.routers_reporting)} of ${count(status.routers)} routers report</span></div>
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
    <div class="figures">
      <${Figure} name="Output" value=${rate(out)} unit="tok/s" formula="Σ output_tokens_per_s of the model's replicas."><${Meter} share=${limit ? out / limit : null} label="Share of the limit" /><//>
      <${Figure} name="Of the limit" value=${percent(limit ? out / limit : null)} unit=${limit ? `of ${rate(limit)}` : ""} formula="Output ÷ Σ limit_tokens_per_s: for each replica the machine's limit for the requests that run now." />
      <${Figure} name="Running" value=${count(sum("running"))} formula="Σ running of the replicas' feeds." />
      <${Figure} name="Queue" value=${count(sum("waiting"))} formula="Σ waiting of the replicas' feeds." />
      <${Figure} name="Cache hits" value=${percent(sum("prefix_queries") ? sum("prefix_hits") / sum("prefix_queries") : null)} formula="Σ prefix_hits ÷ Σ prefix_queries since the replicas started, in tokens." />
    </div>
    ${model.explained && html`<p class="faint spaced"><strong>Scaling:</strong> ${model.explained}</p>`}
    ${model.last_rollout && html`<p class="faint spaced"><strong>Last rollout:</strong> ${model.last_rollout}</p>`}
    ${(model.warnings ?? []).map((text) => html`<${Notice}>${text}<//>`)}
    <div class="scroll spaced" tabindex="0" role="group" aria-label=${`Replicas of ${model.name}`}><table><caption class="hidden">Replicas of ${model.name}</caption>
      <thead><tr><th>Replica</th><th>State</th><th class="number">For</th><th class="number">Running</th><th class="number">Queue</th><th class="number">tok/s</th><th class="number">Of limit</th><th class="number">KV held</th><th>Place</th><th>Why</th></tr></thead>
      <tbody>${replicas.map((one) => html`<tr key=${one.id}>
        <td><code>${one.id}</code></td><td><${Badge} tone=${TONES[one.state]}>${one.state}<//></td><td class="number">${since(one.in_state_s)}</td>
        <td class="number">${count(one.running)} of ${count(one.max_running)}</td><td class="number">${count(one.waiting)}</td><td class="number">${rate(one.output_tokens_per_s)}</td>
        <td class="number">${percent(one.limit_tokens_per_s ? one.output_tokens_per_s / one.limit_tokens_per_s : null)}</td><td class="number">${percent(one.kv_blocks ? one.kv_blocks_held / one.kv_blocks : null)}</td>
        <td>${[one.region, one.pool].filter(Boolean).join(" ") || "–"}</td><td class="wrap">${one.reason}</td>
      </tr>`)}</tbody></table></div>
  </section>`;
}

function Decisions() {
  const shown = [...events.values()].sort((one, other) => other.id - one.id).slice(0, 100);
  return html`<section class="panel" aria-label="Decisions and events"><header><h2>Decisions and events</h2></header>
    ${shown.length === 0 ? html`<p class="faint">None yet.</p>` : html`<div class="scroll" tabindex="0" role="group" aria-label="Decisions and events"><table><caption class="hidden">The newest first</caption>
      <thead><tr><th>At</th><th>Kind</th><th>Model</th><th>Replica</th><th>What and why</th></tr></thead>
      <tbody>${shown.map((one) => html`<tr key=${one.id}><td>${clock(one.at * 1000)}</td><td><${Badge}>${one.kind}<//></td><td>${one.model || "–"}</td><td>${one.replica ? html`<code>${one.replica}</code>` : "–"}</td><td class="wrap">${one.text}</td></tr>`)}</tbody></table></div>`}
  </section>`;
}
