// Lab: plans, benchmarks, tuning ledgers and evaluations in the operator's folder, shown as they were written.

import { useState } from "preact/hooks";
import { ask } from "console/api.js";
import { moment } from "console/format.js";
import { Badge, Empty, Loading, Notice, Table, Tabs, html, icons, useLoad } from "console/ui.js";

export default function Lab() {
  const found = useLoad(() => ask("/console/reports"));
  const [open, setOpen] = useState(null);
  const [kind, setKind] = useState("all");
  const reports = found.value?.data ?? [];
  const kinds = ["all", ...new Set(reports.map((one) => one.kind))];
  if (open)
    return html`<div class="view">
      <div class="toolbar"><button type="button" class="quiet square" aria-label="Back to the list" title="Back to the list" onClick=${() => setOpen(null)}>${icons.back}</button><h1>Lab</h1><${Badge} tone="accent">${open.kind}<//><code class="faint">${open.path}</code><span class="spread"></span><a href=${open.url} target="_blank" rel="noopener">Open on its own</a></div>
      <iframe class="frame" src=${open.url} title=${open.title}></iframe>
    </div>`;
  return html`<div class="view">
    <div class="toolbar"><h1>Lab</h1><span class="spread"></span>${kinds.length > 2 && html`<${Tabs} names=${kinds} value=${kind} onChange=${setKind} label="Kind of report" />`}</div>
    ${found.error && html`<${Notice} tone="alarm">${found.error.message}<//>`}
    <section class="panel" aria-label="Reports">
      ${!found.value && !found.error && html`<${Loading} />`}
      ${found.value && reports.length === 0 && html`<${Empty} title="No reports in this folder" icon=${icons.lab}><code>ridgeline bench</code>, <code>plan</code>, <code>tune</code> and <code>evaluate</code> write reports; this page lists what is below the folder of <code>--console-reports</code>.<//>`}
      ${reports.length > 0 && html`<${Table} caption="Reports, the newest first" keyOf=${(one) => one.path} rows=${reports.filter((one) => kind === "all" || one.kind === kind)} columns=${[
        { name: "Report", wide: true, cell: (one) => html`<button type="button" class="link" onClick=${() => setOpen(one)}>${one.title}</button><br /><small class="faint"><code>${one.path}</code></small>` },
        { name: "Kind", cell: (one) => html`<${Badge} tone="accent">${one.kind}<//>` },
        { name: "Written", cell: (one) => moment(one.written * 1000) },
      ]} />`}
    </section>
  </div>`;
}
