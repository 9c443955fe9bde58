// Keys: those of the gateway, with their limits and budgets. A new secret is shown once and kept nowhere.

import { useState } from "preact/hooks";
import { ask } from "console/api.js";
import { count, dollars, moment, percent } from "console/format.js";
import { Badge, CopyButton, Dialog, Empty, Field, Loading, Meter, Notice, Table, html, icons, useLoad } from "console/ui.js";

const TONES = { live: "good", expired: "warn", revoked: "alarm" };

export default function Keys({ askKey }) {
  const [withRevoked, setWithRevoked] = useState(false);
  const [dialog, setDialog] = useState(null);
  const found = useLoad(() => allKeys(withRevoked), [withRevoked]);
  const spent = useLoad(spentByKey);
  const keys = found.value ?? [];
  if (found.error?.status === 401) return html`<div class="view"><h1>Keys</h1><${Empty} title="The admin key is needed" icon=${icons.lock} actions=${html`<button type="button" class="primary" onClick=${askKey}>Enter the key</button>`} /></div>`;
  const create = html`<button type="button" class="primary" onClick=${() => setDialog({ kind: "create" })}>${icons.plus}New key</button>`;
  const columns = [
    { name: "Name", cell: (one) => html`<strong>${one.name || "–"}</strong><br /><small class="faint"><code>${one.id}</code></small>` },
    { name: "State", cell: (one) => html`<${Badge} tone=${TONES[one.state]}>${one.state}<//>` },
    { name: "Team", cell: (one) => one.team || "–" },
    { name: "Spent today", cell: (one) => html`<${Budget} spent=${spent.value?.day[one.id]} limit=${one.limits?.daily_usd} isKnown=${!!spent.value} />` },
    { name: "This month", cell: (one) => html`<${Budget} spent=${spent.value?.month[one.id]} limit=${one.limits?.monthly_usd} isKnown=${!!spent.value} />` },
    { name: "Other limits", wide: true, cell: (one) => html`<span class="chips">${limitsOf(one).map((text) => html`<${Badge}>${text}<//>`)}${limitsOf(one).length === 0 && "–"}</span>` },
    { name: "Created", cell: (one) => moment(one.created_at * 1000) },
    { name: "Actions", isHidden: true, number: true, cell: (one) => one.state !== "revoked" && html`<button type="button" class="quiet" aria-label=${`Revoke ${one.name || one.id}`} onClick=${() => setDialog({ kind: "revoke", key: one })}>Revoke</button>` },
  ];
  return html`<div class="view">
    <div class="toolbar"><h1>Keys</h1><span class="spread"></span>
      <label class="check"><input type="checkbox" checked=${withRevoked} onChange=${(event) => setWithRevoked(event.target.checked)} /> with revoked keys</label>
      ${create}
    </div>
    ${found.error && html`<${Notice} tone="alarm">${found.error.message}<//>`}
    <section class="panel" aria-label="Keys">
      ${!found.value && !found.error && html`<${Loading} />`}
      ${found.value && keys.length === 0 && html`<${Empty} title="No keys yet" icon=${icons.keys}>A client of the gateway needs a key. Limits and budgets bind every way of spending with it.<//>`}
      ${keys.length > 0 && html`<${Table} caption="Keys of the gateway" columns=${columns} rows=${keys} keyOf=${(one) => one.id} />
        <p class="faint spaced"><small>Spent: SUM(cost_pusd) of the ledger's rows of the key since 00:00 UTC today, and since the first of the month; budgets count in UTC too.</small></p>`}
    </section>
    ${dialog?.kind === "create" && html`<${CreateDialog} onClose=${() => (setDialog(null), found.again())} />`}
    ${dialog?.kind === "revoke" && html`<${RevokeDialog} given=${dialog.key} onClose=${() => (setDialog(null), found.again())} />`}
  </div>`;
}

// Sums of the ledger by key, for the UTC day and month that budgets count.
async function spentByKey() {
  const today = new Date().toISOString().slice(0, 10);
  const sums = async (since) => {
    const report = await ask(`/admin/usage?by=key&zone=UTC&since=${since}`);
    return Object.fromEntries(report.data.map((one) => [one.group.key, one.cost_usd]));
  };
  const [day, month] = await Promise.all([sums(today), sums(`${today.slice(0, 8)}01`)]);
  return { day, month };
}

function Budget({ spent = "0", limit, isKnown }) {
  if (!isKnown) return "–";
  const share = limit ? Number(spent) / limit : null;
  return html`<span class="budget" title=${`$${spent}`}>${dollars(spent)}${limit ? html` <span class="faint">of ${dollars(String(limit))}, ${percent(share)}</span><${Meter} share=${share} label="Share of the budget" />` : ""}</span>`;
}

// Every page of the list: a total over the first page alone would be wrong.
async function allKeys(withRevoked) {
  const keys = [];
  for (let after = ""; ; ) {
    const page = await ask(`/admin/keys?limit=1000&revoked=${withRevoked}${after && `&after=${encodeURIComponent(after)}`}`);
    keys.push(...page.data);
    if (!page.next) return keys;
    after = page.next;
  }
}

function limitsOf(key) {
  const { requests_per_minute: rpm, tokens_per_minute: tpm, concurrent } = key.limits ?? {};
  const parts = [
    rpm != null && `${count(rpm)} requests/min`,
    tpm != null && `${count(tpm)} tokens/min`,
    concurrent != null && `${count(concurrent)} at once`,
    key.models?.length && `models: ${key.models.join(", ")}`,
    key.endpoints?.length && `endpoints: ${key.endpoints.join(", ")}`,
    key.residency?.length && `regions: ${key.residency.join(", ")}`,
    key.guard && `guard: ${key.guard}`,
    key.cache && key.cache !== "off" && `${key.cache} cache`,
    key.priority != null && key.priority !== 1 && `priority ${key.priority}`,
    key.expires_at && `expires ${moment(key.expires_at * 1000)}`,
  ].filter(Boolean);
  return parts;
}

const NO_LIMITS = { requests_per_minute: "", daily_usd: "", monthly_usd: "" };

function CreateDialog({ onClose }) {
  const [name, setName] = useState("");
  const [limits, setLimits] = useState(NO_LIMITS);
  const [models, setModels] = useState("");
  const [days, setDays] = useState("");
  const [made, setMade] = useState(null);
  const [error, setError] = useState("");
  const create = async (event) => {
    event.preventDefault();
    setError("");
    const given = Object.entries(limits).filter(([, value]) => value !== "");
    const body = { name };
    if (given.length) body.limits = Object.fromEntries(given.map(([field, value]) => [field, Number(value)]));
    if (models.trim()) body.models = models.split(",").map((one) => one.trim()).filter(Boolean);
    if (days) body.expires_in_s = Number(days) * 86_400;
    await ask("/admin/keys", body).then(setMade, (problem) => setError(problem.message));
  };
  const limit = (field, label, step) => html`<${Field} label=${label} hint="none"><input type="number" min="0" step=${step} value=${limits[field]} onInput=${(event) => setLimits({ ...limits, [field]: event.target.value })} /><//>`;
  return html`<${Dialog} title=${made ? "The new key" : "New key"} onClose=${onClose}>
    ${made
      ? html`<p>Copy the secret now: it is shown once and stored only as a digest.</p><pre class="code" tabindex="0">${made.secret}</pre><div class="actions"><${CopyButton} text=${made.secret} /><button type="button" class="primary" onClick=${onClose}>Done</button></div>`
      : html`<form onSubmit=${create}>
          <${Field} label="Name"><input type="text" required value=${name} onInput=${(event) => setName(event.target.value)} autofocus /><//>
          <div class="pair">${limit("daily_usd", "US dollars per day", "any")}${limit("monthly_usd", "US dollars per month", "any")}</div>
          <div class="pair">${limit("requests_per_minute", "Requests per minute", 1)}<${Field} label="Expires after days" hint="never"><input type="number" min="1" step="1" value=${days} onInput=${(event) => setDays(event.target.value)} /><//></div>
          <${Field} label="Models" hint="all; comma-separated, gpt-* allowed"><input type="text" value=${models} onInput=${(event) => setModels(event.target.value)} /><//>
          <p class="faint"><small>More limits: <code>ridgeline gateway keys</code> or the admin API.</small></p>
          ${error && html`<${Notice} tone="alarm">${error}<//>`}
          <div class="actions"><button class="primary">Create</button></div>
        </form>`}
  <//>`;
}

function RevokeDialog({ given, onClose }) {
  const [error, setError] = useState("");
  const revoke = () => ask(`/admin/keys/${encodeURIComponent(given.id)}/revoke`, {}).then(onClose, (problem) => setError(problem.message));
  return html`<${Dialog} title=${`Revoke ${given.name || given.id}?`} onClose=${onClose}>
    <p>Requests with this key are refused from now on. This cannot be undone.</p>
    ${error && html`<${Notice} tone="alarm">${error}<//>`}
    <div class="actions"><button type="button" class="quiet" onClick=${onClose}>Keep it</button><button type="button" class="danger" onClick=${revoke}>Revoke</button></div>
  <//>`;
}
