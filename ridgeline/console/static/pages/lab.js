// Lab: plans, benchmarks, tuning ledgers and evaluations in the operator's folder, shown as they were written.

import { useState } from "preact/hooks";
import { ask } from "console/api.js";
import { moment } from "console/format.js";
import { Badge, Empty, Notice, Tabs, html, icons, useLoad } from "console/ui.js";

export default function Lab() {
  const found = useLoad(() => ask("/console/reports"));
  const [open, setOpen] = useState(null);
  const [kind, setKind] = useState("all");
  const reports = found.value?.data ?? [];
  const kinds = ["all", ...new Set(reports.map((one) => one.kind))];
  if (open)
    return html`<div class="view">
      <div class="toolbar"><button type="button" class="quiet" onClick=${() => setOpen(null)}>${icons.close}Close</button><h1>${open.title}</h1><span class="spread"></span><a href=${open.url} target="_blank" rel="noopener">Open on its own</a></div>
      <iframe class="frame" src=${open.url} title=${open.title}></iframe>
    </div>`;
  return html`<div class="view">
    <div class="toolbar"><h1>Lab</h1><span class="spread"></span>${kinds.length > 2 && html`<${Tabs} names=${kinds} value=${kind} onChange=${setKind} label="Kind of report" />`}</div>
    ${found.error && html`<${Notice} tone="alarm">${found.error.message}<//>`}
    <section class="panel" aria-label="Reports">
      ${found.value && reports.length === 0
        ? html`<${Empty} title="No reports in this folder"><code>ridgeline bench</code>, <code>plan</code>, <code>tune</code> and <code>evaluate</code> write them; the folder is the one of --console-reports.<//>`
        : html`<div class="scroll" tabindex="0" role="group" aria-label="Reports"><table>
            <caption class="hidden">Reports, the newest first</caption>
            <thead><tr><th>Kind</th><th>Report</th><th>File</th><th>Written</th></tr></thead>
            <tbody>${reports.filter((one) => kind === "all" || one.kind === kind).map((one) => html`<tr key=${one.path}>
              <td><${Badge} tone="accent">${one.kind}<//></td>
              <td><button type="button" class="link" onClick=${() => setOpen(one)}>${one.title}</button></td>
              <td><code>${one.path}</code></td>
              <td>${moment(one.written * 1000)}</td>
            </tr>`)}</tbody>
          </table></div>`}
    </section>
  </div>`;
}
