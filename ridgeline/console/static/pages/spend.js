// Spend: sums of the ledger by day, model, key and team, in this browser's time zone.

import { useState } from "preact/hooks";
import { ask, headers } from "console/api.js";
import { count, digitsOf, dollars, percent } from "console/format.js";
import { Empty, Figure, Loading, Meter, Notice, Table, Tabs, html, icons, useLoad } from "console/ui.js";

const RANGES = { "7 days": 7, "30 days": 30, "90 days": 90 };
const GROUPS = ["model", "key", "team"];
const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;

// A day before today as a date of this zone; the server counts days by the same zone.
function dayBefore(days) {
  const date = new Date();
  date.setHours(12, 0, 0, 0); // midnight may not exist where clocks change
  date.setDate(date.getDate() - days);
  const two = (value) => String(value).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
}

const firstDay = (days) => dayBefore(days - 1);

const path = (by, days) => `/admin/usage?by=${by}&since=${firstDay(days)}&zone=${encodeURIComponent(zone)}`;

export default function Spend({ askKey }) {
  const [range, setRange] = useState("30 days");
  const [group, setGroup] = useState("model");
  const days = RANGES[range];
  const byDay = useLoad(() => ask(path("day", days)), [days]);
  const byGroup = useLoad(() => ask(path(group, days)), [days, group]);
  const names = useLoad(async () => Object.fromEntries((await ask("/admin/keys?limit=1000&revoked=true")).data.map((one) => [one.id, one.name])));
  const error = byDay.error ?? byGroup.error;
  if (error?.status === 401) return html`<div class="view"><h1>Spend</h1><${Empty} title="The admin key is needed" icon=${icons.lock} actions=${html`<button type="button" class="primary" onClick=${askKey}>Enter the key</button>`} /></div>`;
  const total = byDay.value?.total;
  const download = async () => {
    const answer = await fetch(`${path(`day,${group}`, days)}&format=csv`, { headers: headers(), credentials: "omit" });
    const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(await answer.blob()), download: "usage.csv" });
    link.click();
    URL.revokeObjectURL(link.href);
  };
  return html`<div class="view">
    <div class="toolbar"><h1>Spend</h1><span class="spread"></span><${Tabs} names=${Object.keys(RANGES)} value=${range} onChange=${setRange} label="Time" /><button type="button" class="quiet" onClick=${download}>${icons.download}Export CSV</button></div>
    ${error && html`<${Notice} tone="alarm">${error.message}<//>`}
    ${!total && !error && html`<section class="panel"><${Loading} lines=${6} /></section>`}
    ${total && html`<section class="panel" aria-label="Total">
      <div class="spend-head">
        <div class="heroes"><${Figure} name="Cost" value=${html`<span data-total=${total.cost_usd}>${dollars(total.cost_usd)}</span>`} formula=${`SUM(cost_pusd) of the ledger's rows since ${firstDay(days)}, ${zone}: exactly $${total.cost_usd}.`} /></div>
        <div class="figures">
          <${Figure} name="Requests" value=${count(total.requests)} formula="COUNT(*) + SUM(repeats) of the same rows." />
          <${Figure} name="Prompt" value=${count(total.tokens_in)} unit="tok" formula="SUM(tokens_in)." />
          <${Figure} name="Cached" value=${percent(total.tokens_in ? total.tokens_cached / total.tokens_in : null)} formula="SUM(tokens_cached) ÷ SUM(tokens_in)." />
          <${Figure} name="Output" value=${count(total.tokens_out)} unit="tok" formula="SUM(tokens_out)." />
          <${Figure} name="Estimated" value=${count(total.estimated)} formula="Requests whose tokens no upstream reported." />
        </div>
      </div>
      ${byDay.value.waiting_rows > 0 && html`<p class="faint spaced">${count(byDay.value.waiting_rows)} rows are still in write-ahead files and are not counted.</p>`}
      <${Days} lines=${byDay.value.data} days=${days} />
    </section>`}
    ${byGroup.value && html`<section class="panel" aria-label=${`By ${group}`}>
      <header><h2>By</h2><${Tabs} names=${GROUPS} value=${group} onChange=${setGroup} label="Group" /></header>
      ${byGroup.value.data.length === 0 ? html`<${Empty} title="No requests in this time" icon=${icons.spend}>The ledger has a row for each request that a key of the gateway makes.<//>` : html`<${Lines} report=${byGroup.value} group=${group} names=${group === "key" ? names.value ?? {} : {}} />`}
    </section>`}
  </div>`;
}

// A column for each day, also for those without a request; below, the same figures as a table.
function Days({ lines, days }) {
  const known = new Map(lines.map((one) => [one.group.day, one]));
  const all = Array.from({ length: days }, (_, n) => dayBefore(days - 1 - n));
  const most = lines.reduce((high, one) => (Number(one.cost_usd) > Number(high) ? one.cost_usd : high), "0");
  const digits = digitsOf(most);
  const short = (day) => new Date(`${day}T12:00`).toLocaleDateString("en", { month: "short", day: "numeric" });
  const columns = [
    { name: "Day", cell: (one) => one.group.day },
    { name: "Requests", number: true, cell: (one) => count(one.requests) },
    { name: "Tokens", number: true, cell: (one) => count(one.tokens_in + one.tokens_out) },
    { name: "Cost", number: true, cell: (one) => html`<span title=${`$${one.cost_usd}`}>${dollars(one.cost_usd, digits)}</span>` },
  ];
  return html`<div class="spaced">
    <div class="row"><h2>By day</h2><span class="faint">days of ${zone}, the largest ${dollars(most)}</span></div>
    <div class="bars tall" role="img" aria-label="Cost of each day; the table has the same figures">${all.map((day) => {
      const one = known.get(day);
      const share = one && Number(most) ? Number(one.cost_usd) / Number(most) : 0;
      return html`<span class="column" title=${`${day}: ${one ? `$${one.cost_usd}, ${count(one.requests)} requests` : "no requests"}`}><i style=${{ height: `${one ? Math.max(100 * share, 1) : 0}%` }}></i></span>`;
    })}</div>
    <div class="bars-axis"><span>${short(all[0])}</span><span>${short(all[Math.floor(days / 2)])}</span><span>${short(all.at(-1))}</span></div>
    <details class="spaced"><summary>The days as a table</summary>
      <${Table} caption="Spend by day" columns=${columns} rows=${[...lines].sort((one, other) => (one.group.day < other.group.day ? 1 : -1))} keyOf=${(one) => one.group.day} attrs=${(one) => ({ "data-day": one.group.day, "data-cost": one.cost_usd })} />
    </details>
  </div>`;
}

function Lines({ report, group, names }) {
  const lines = [...report.data].sort((one, other) => Number(other.cost_usd) - Number(one.cost_usd));
  const whole = Number(report.total.cost_usd);
  const digits = digitsOf(report.total.cost_usd);
  const share = (one) => (whole ? Number(one.cost_usd) / whole : null);
  const total = { ...report.total, isTotal: true };
  const columns = [
    { name: group[0].toUpperCase() + group.slice(1), cell: (one) => (one.isTotal ? "Total" : names[one.group[group]] || one.group[group] || "none") },
    { name: "Requests", number: true, cell: (one) => count(one.requests) },
    { name: "Prompt", number: true, cell: (one) => count(one.tokens_in) },
    { name: "Cached", number: true, cell: (one) => percent(one.tokens_in ? one.tokens_cached / one.tokens_in : null) },
    { name: "Output", number: true, cell: (one) => count(one.tokens_out) },
    { name: "Cost", number: true, cell: (one) => html`<span data-total=${one.isTotal ? one.cost_usd : null} title=${`$${one.cost_usd}`}>${dollars(one.cost_usd, digits)}</span>` },
    { name: "Share", className: "share", cell: (one) => !one.isTotal && html`<span class="with-bar"><${Meter} share=${share(one)} label="Share of the cost" /><span>${percent(share(one))}</span></span>` },
  ];
  return html`<${Table} caption=${`Spend by ${group}`} columns=${columns} rows=${lines} keyOf=${(one) => one.group[group]} foot=${total} />
  ${report.is_cut && html`<${Notice}>Only the first ${count(report.data.length)} groups are shown and summed. Choose a shorter time.<//>`}`;
}
