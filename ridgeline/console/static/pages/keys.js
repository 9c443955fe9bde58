// Keys: those of the gateway, with their limits and budgets. A new secret is shown once and kept nowhere.

import { useState } from "preact/hooks";
import { ask } from "console/api.js";
import { moment } from "console/format.js";
import { Badge, CopyButton, Dialog, Empty, Field, Notice, html, useLoad } from "console/ui.js";

const TONES = { live: "good", expired: "warn", revoked: "alarm" };

export default function Keys({ askKey }) {
  const [withRevoked, setWithRevoked] = useState(false);
  const [dialog, setDialog] = useState(null);
  const found = useLoad(() => allKeys(withRevoked), [withRevoked]);
  const keys = found.value ?? [];
  if (found.error?.status === 401) return html`<div class="view"><h1>Keys</h1><${Empty} title="The admin key is needed"><button type="button" class="primary" onClick=${askKey}>Enter the key</button><//></div>`;
  return html`<div class="view">
    <div class="toolbar"><h1>Keys</h1><span class="spread"></span>
      <label class="check"><input type="checkbox" checked=${withRevoked} onChange=${(event) => setWithRevoked(event.target.checked)} /> with revoked keys</label>
      <button type="button" class="primary" onClick=${() => setDialog({ kind: "create" })}>New key</button>
    </div>
    ${found.error && html`<${Notice} tone="alarm">${found.error.message}<//>`}
    <section class="panel" aria-label="Keys">
      ${found.value && keys.length === 0
        ? html`<${Empty} title="No keys yet">Clients of the gateway need one.<//>`
        : html`<div class="scroll" tabindex="0" role="group" aria-label="Keys"><table><caption class="hidden">Keys of the gateway</caption>
          <thead><tr><th>Name</th><th>State</th><th>Team</th><th>Limits and budgets</th><th>Created</th><th><span class="hidden">Actions</span></th></tr></thead>
          <tbody>${keys.map((one) => html`<tr key=${one.id}>
            <td>${one.name || "–"}<br /><small class="faint"><code>${one.id}</code></small></td>
            <td><${Badge} tone=${TONES[one.state]}>${one.state}<//></td>
            <td>${one.team || "–"}</td>
            <td class="wrap">${limitsOf(one)}</td>
            <td>${moment(one.created_at * 1000)}</td>
            <td>${one.state !== "revoked" && html`<button type="button" class="quiet" aria-label=${`Revoke ${one.name || one.id}`} onClick=${() => setDialog({ kind: "revoke", key: one })}>Revoke</button>`}</td>
          </tr>`)}</tbody></table></div>`}
    </section>
    ${dialog?.kind === "create" && html`<${CreateDialog} onClose=${() => (setDialog(null), found.again())} />`}
    ${dialog?.kind === "revoke" && html`<${RevokeDialog} given=${dialog.key} onClose=${() => (setDialog(null), found.again())} />`}
  </div>`;
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
  const parts = [];
  const add = (value, path) => {
    if (value == null || value === "" || (typeof value === "object" && !Object.keys(value).length)) return;
    if (typeof value === "object" && !Array.isArray(value)) for (const [name, inner] of Object.entries(value)) add(inner, path ? `${path}.${name}` : name);
    else parts.push(`${path} ${Array.isArray(value) ? value.map((one) => (typeof one === "object" ? JSON.stringify(one) : one)).join(", ") : value}`);
  };
  for (const name of ["limits", "budgets", "budget", "models", "endpoints", "expires_at"]) add(key[name], name);
  return parts.join(" · ") || "no limit of its own";
}

function CreateDialog({ onClose }) {
  const [name, setName] = useState("");
  const [made, setMade] = useState(null);
  const [error, setError] = useState("");
  const create = async (event) => {
    event.preventDefault();
    setError("");
    await ask("/admin/keys", { name }).then(setMade, (problem) => setError(problem.message));
  };
  return html`<${Dialog} title=${made ? "The new key" : "New key"} onClose=${onClose}>
    ${made
      ? html`<p>Copy the secret now: it is shown once and stored only as a digest.</p><pre class="code" tabindex="0">${made.secret}</pre><div class="actions"><${CopyButton} text=${made.secret} /><button type="button" class="primary" onClick=${onClose}>Done</button></div>`
      : html`<form onSubmit=${create}>
          <${Field} label="Name"><input type="text" required value=${name} onInput=${(event) => setName(event.target.value)} autofocus /><//>
          <p class="faint">Limits and budgets are set with <code>ridgeline gateway keys</code> or the admin API.</p>
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
