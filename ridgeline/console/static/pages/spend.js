// Spend: sums of the ledger by day, model, key and team, in this browser's time zone.

import { useState } from "preact/hooks";
import { ask, headers } from "console/api.js";
import { count, dollars, percent } from "console/format.js";
import { Empty, Figure, Notice, Tabs, html, useLoad } from "console/ui.js";

const RANGES = { "7 days": 7, "30 days": 30, "90 days": 90 };
const GROUPS = ["model", "key", "team"];
const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;

// The first day of the range as a date of this zone; the server counts days by the same zone.
function firstDay(days) {
  const date = new Date();
  date.setDate(date.getDate() - (days - 1));
  const two = (value) => String(value).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
}

const path = (by, days) => `/admin/usage?by=${by}&since=${firstDay(days)}&zone=${encodeURIComponent(zone)}`;

export default function Spend({ askKey }) {
  const [range, setRange] = useState("30 days");
  const [group, setGroup] = useState("model");
  const days = RANGES[range];
  const byDay = useLoad(() => ask(path("day", days)), [days]);
  const byGroup = useLoad(() => ask(path(group, days)), [days, group]);
  const names = useLoad(async () => Object.fromEntries((await ask("/admin/keys?limit=1000&revoked=true")).data.map((one) => [one.id, one.name])));
  const error = byDay.error ?? byGroup.error;
  if (error?.status === 401) return html`<div class="view"><h1>Spend</h1><${Empty} title="The admin key is needed"><button type="button" class="primary" onClick=${askKey}>Enter the key</button><//></div>`;
  const total = byDay.value?.total;
  const download = async () => {
    const answer = await fetch(`${path(`day,${group}`, days)}&format=csv`, { headers: headers(), credentials: "omit" });
    const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(await answer.blob()), download: "usage.csv" });
    link.click();
    URL.revokeObjectURL(link.href);
  };
  return html`<div class="view">
    <div class="toolbar"><h1>Spend</h1><span class="spread"></span><${Tabs} names=${Object.keys(RANGES)} value=${range} onChange=${setRange} label="Time" /><button type="button" class="quiet" onClick=${download}>Export CSV</button></div>
    ${error && html`<${Notice} tone="alarm">${error.message}<//>`}
    ${total && html`<section class="panel" aria-label="Total">
      <div class="figures">
        <${Figure} name="Cost" value=${html`<span data-total=${total.cost_usd}>${dollars(total.cost_usd)}</span>`} formula=${`SUM(cost_pusd) of the ledger's rows since ${firstDay(days)}, ${zone}: exactly $${total.cost_usd}.`} />
        <${Figure} name="Requests" value=${count(total.requests)} formula="COUNT(*) + SUM(repeats) of the same rows." />
        <${Figure} name="Prompt" value=${count(total.tokens_in)} unit="tok" formula="SUM(tokens_in)." />
        <${Figure} name="Cached" value=${percent(total.tokens_in ? total.tokens_cached / total.tokens_in : null)} formula="SUM(tokens_cached) ÷ SUM(tokens_in)." />
        <${Figure} name="Output" value=${count(total.tokens_out)} unit="tok" formula="SUM(tokens_out)." />
        <${Figure} name="Estimated" value=${count(total.estimated)} formula="Requests whose tokens no upstream reported." />
      </div>
      ${byDay.value.waiting_rows > 0 && html`<p class="faint">${count(byDay.value.waiting_rows)} rows are still in write-ahead files and are not counted.</p>`}
    </section>
    <section class="panel" aria-label="By day"><header><h2>By day</h2><span class="faint">days of ${zone}</span></header><${Days} lines=${byDay.value.data} /></section>`}
    ${byGroup.value && html`<section class="panel" aria-label=${`By ${group}`}>
      <header><h2>By</h2><${Tabs} names=${GROUPS} value=${group} onChange=${setGroup} label="Group" /></header>
      <${Lines} report=${byGroup.value} group=${group} names=${group === "key" ? names.value ?? {} : {}} />
    </section>`}
  </div>`;
}

function Days({ lines }) {
  const most = Math.max(...lines.map((one) => Number(one.cost_usd)), 1e-12);
  if (!lines.length) return html`<p class="faint">No requests in this time.</p>`;
  return html`<div class="scroll" tabindex="0" role="group" aria-label="By day"><table><caption class="hidden">Spend by day</caption>
    <thead><tr><th>Day</th><th class="number">Requests</th><th class="number">Tokens</th><th class="number">Cost</th><th><span class="hidden">Share of the largest day</span></th></tr></thead>
    <tbody>${lines.map((one) => html`<tr data-day=${one.group.day} data-cost=${one.cost_usd} key=${one.group.day}>
      <td>${one.group.day}</td><td class="number">${count(one.requests)}</td><td class="number">${count(one.tokens_in + one.tokens_out)}</td><td class="number" title=${`$${one.cost_usd}`}>${dollars(one.cost_usd)}</td>
      <td class="share"><span class="meter"><span style=${{ width: `${(100 * Number(one.cost_usd)) / most}%` }}></span></span></td>
    </tr>`)}</tbody></table></div>`;
}

function Lines({ report, group, names }) {
  const lines = [...report.data].sort((one, other) => Number(other.cost_usd) - Number(one.cost_usd));
  return html`<div class="scroll" tabindex="0" role="group" aria-label=${`By ${group}`}><table><caption class="hidden">Spend by ${group}</caption>
    <thead><tr><th>${group}</th><th class="number">Requests</th><th class="number">Prompt</th><th class="number">Cached</th><th class="number">Output</th><th class="number">Cost</th></tr></thead>
    <tbody>${lines.map((one) => html`<tr key=${one.group[group]}><td>${names[one.group[group]] || one.group[group] || "none"}</td><td class="number">${count(one.requests)}</td><td class="number">${count(one.tokens_in)}</td><td class="number">${count(one.tokens_cached)}</td><td class="number">${count(one.tokens_out)}</td><td class="number" title=${`$${one.cost_usd}`}>${dollars(one.cost_usd)}</td></tr>`)}</tbody>
    <tfoot><tr><td>Total</td><td class="number">${count(report.total.requests)}</td><td class="number">${count(report.total.tokens_in)}</td><td class="number">${count(report.total.tokens_cached)}</td><td class="number">${count(report.total.tokens_out)}</td><td class="number" data-total=${report.total.cost_usd}>${dollars(report.total.cost_usd)}</td></tr></tfoot>
  </table></div>
  ${report.is_cut && html`<${Notice}>Only the first ${count(report.data.length)} groups are shown and summed. Choose a shorter time.<//>`}`;
}
