// Parts that every page uses.

import { Fragment, h } from "preact";
import { useEffect, useId, useRef, useState } from "preact/hooks";
import htm from "htm";

export const html = htm.bind(h);
export { Fragment };

const icon = (paths) => html`<svg class="icon" viewBox="0 0 24 24" aria-hidden="true">${paths.map((d) => html`<path d=${d} />`)}</svg>`;
export const icons = {
  chat: icon(["M4 5h16v11H9l-5 4z"]),
  live: icon(["M3 13h4l3-8 4 14 3-6h4"]),
  requests: icon(["M4 6h8", "M8 12h11", "M6 18h9"]),
  lab: icon(["M9 3h6", "M10 3v6l-6 11h16l-6-11V3", "M7 15h10"]),
  keys: icon(["M8 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8", "M12 12h9v3", "M17 12v3"]),
  spend: icon(["M4 20V10", "M10 20V4", "M16 20v-8", "M21 20H3"]),
  fleet: icon(["M4 5h16v5H4z", "M4 14h16v5H4z", "M8 7.5h.01", "M8 16.5h.01"]),
  sun: icon(["M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8", "M12 2v2", "M12 20v2", "M2 12h2", "M20 12h2", "M5 5l1.4 1.4", "M17.6 17.6 19 19", "M19 5l-1.4 1.4", "M6.4 17.6 5 19"]),
  moon: icon(["M20 14A8 8 0 1 1 10 4a7 7 0 0 0 10 10z"]),
  lock: icon(["M6 11h12v9H6z", "M9 11V8a3 3 0 0 1 6 0v3"]),
  send: icon(["M12 19V5", "M6 11l6-6 6 6"]),
  stop: icon(["M7 7h10v10H7z"]),
  copy: icon(["M9 9h10v11H9z", "M6 15H5V4h10v2"]),
  close: icon(["M6 6l12 12", "M18 6 6 18"]),
  sliders: icon(["M4 7h10", "M18 7h2", "M16 5v4", "M4 17h4", "M12 17h8", "M10 15v4"]),
  columns: icon(["M4 5h7v14H4z", "M13 5h7v14h-7z"]),
  attach: icon(["M20 11.5 12 19a5 5 0 0 1-7-7l8-8a3.3 3.3 0 0 1 4.7 4.7l-8 8a1.6 1.6 0 0 1-2.3-2.3l7.3-7.2"]),
  download: icon(["M12 4v11", "M7 11l5 5 5-5", "M5 20h14"]),
  plus: icon(["M12 5v14", "M5 12h14"]),
  back: icon(["M19 12H5", "M11 6l-6 6 6 6"]),
  retry: icon(["M5 12a7 7 0 1 1 2 5", "M5 20v-4h4"]),
};

// A number with its name; the formula is shown on hover and focus, and read by screen readers.
// `share` of a limit is a bar, with the limit in words (`of`) below it.
export function Figure({ name, label = name, value, unit, formula, tone, share, of, children }) {
  const id = useId();
  const fit = ({ currentTarget: shown }) => shown.toggleAttribute("data-flip", shown.getBoundingClientRect().left + 310 > innerWidth);
  return html`<div class="figure" tabindex="0" role="group" aria-label=${label} aria-describedby=${id} data-tone=${tone} onMouseEnter=${fit} onFocus=${fit}>
    <div class="figure-name">${name}</div>
    <div class="figure-value">${value}${unit && html`<span class="unit">${unit}</span>`}</div>
    ${of && html`<div class="figure-of"><${Meter} share=${share} label=${`${label}: share of the limit`} /><span>${of}</span></div>`}
    ${children}
    <div class="tip" role="tooltip" id=${id}>${formula}</div>
  </div>`;
}

// A measured value beside its limit.
export function Meter({ share, label }) {
  const full = share == null || !isFinite(share) ? 0 : Math.max(0, Math.min(1, share));
  return html`<div class="meter" role="meter" aria-label=${label} aria-valuemin="0" aria-valuemax="100" aria-valuenow=${Math.round(full * 100)}>
    <span style=${{ width: `${full * 100}%` }}></span>
  </div>`;
}

export function Badge({ tone = "plain", children }) {
  return html`<span class="badge" data-tone=${tone}>${children}</span>`;
}

export function Notice({ tone = "note", children }) {
  return html`<div class="notice" data-tone=${tone} role=${tone === "alarm" ? "alert" : "status"}>${children}</div>`;
}

export function Empty({ title, icon, children, actions }) {
  return html`<div class="empty">${icon && html`<span class="empty-icon">${icon}</span>`}<h2>${title}</h2><p>${children}</p>${actions}</div>`;
}

// Grey bars where lines will be, so that nothing jumps when they come.
export function Loading({ lines = 4, label = "Loading" }) {
  return html`<div class="loading" role="status" aria-label=${label}>${Array.from({ length: lines }, (_, n) => html`<span key=${n} style=${{ width: `${[92, 74, 84, 60][n % 4]}%` }}></span>`)}</div>`;
}

// columns: [{name, cell(row), isHidden, number, wide, className}]. On a phone each row is a card whose lines have
// the columns' names, with `isDense` two of them in a line. The roles keep the table's meaning where its display changes.
export function Table({ caption, columns, rows, keyOf, attrs, foot, isBare, isDense }) {
  const look = ({ number, wide, className = "" }) => [number && "number", wide && "wide", className].filter(Boolean).join(" ") || null;
  const line = (row, index) => html`<tr role="row" key=${keyOf ? keyOf(row) : index} ...${attrs?.(row)}>
    ${columns.map((one) => html`<td role="cell" class=${look(one)} data-label=${one.isHidden ? null : one.name}>${one.cell(row)}</td>`)}
  </tr>`;
  const table = html`<table role="table" class=${isDense ? "stacks dense" : "stacks"}>
    <caption class="hidden">${caption}</caption>
    <thead role="rowgroup"><tr role="row">${columns.map((one) => html`<th role="columnheader" class=${look(one)}>${one.isHidden ? html`<span class="hidden">${one.name}</span>` : one.name}</th>`)}</tr></thead>
    <tbody role="rowgroup">${rows.map(line)}</tbody>
    ${foot && html`<tfoot role="rowgroup">${line(foot, "foot")}</tfoot>`}
  </table>`;
  return isBare ? table : html`<div class="scroll" tabindex="0" role="group" aria-label=${caption}>${table}</div>`;
}

export function Field({ label, hint, children }) {
  return html`<label class="field"><span class="field-label">${label}${hint && html`<span class="hint">${hint}</span>`}</span>${children}</label>`;
}

export function CopyButton({ text, label = "Copy" }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    await navigator.clipboard?.writeText(typeof text === "function" ? text() : text).catch(() => {});
    setDone(true);
    setTimeout(() => setDone(false), 1200);
  };
  return html`<button type="button" class="quiet" onClick=${copy}>${icons.copy}${done ? "Copied" : label}</button>`;
}

// A modal dialog of the browser: focus stays inside, Escape closes it.
export function Dialog({ title, onClose, children }) {
  const ref = useRef();
  const id = useId();
  useEffect(() => {
    if (ref.current && !ref.current.open) ref.current.showModal();
  }, []);
  const outside = (event) => event.target === ref.current && onClose();
  return html`<dialog ref=${ref} aria-labelledby=${id} onClose=${onClose} onClick=${outside}>
    <div class="dialog-head">
      <h2 id=${id}>${title}</h2>
      <button type="button" class="quiet square" aria-label="Close" onClick=${onClose}>${icons.close}</button>
    </div>
    ${children}
  </dialog>`;
}

export function Tabs({ names, value, onChange, label }) {
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = names[(names.indexOf(value) + step + names.length) % names.length];
    onChange(next);
    event.currentTarget.querySelectorAll("button")[names.indexOf(next)].focus();
  };
  return html`<div class="tabs" role="tablist" aria-label=${label} onKeyDown=${move}>
    ${names.map((name) => html`<button type="button" role="tab" aria-selected=${name === value} tabindex=${name === value ? 0 : -1} onClick=${() => onChange(name)}>${name}</button>`)}
  </div>`;
}

// Runs an async load on mount and when `deps` change: {value, error, again}.
export function useLoad(load, deps = []) {
  const [state, setState] = useState({});
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    let current = true;
    load().then(
      (value) => current && setState({ value }),
      (error) => current && setState((old) => ({ value: old.value, error })),
    );
    return () => (current = false);
  }, [...deps, turn]);
  return { ...state, again: () => setTurn((old) => old + 1) };
}

export function useStored(name, initial) {
  const [value, setValue] = useState(() => {
    try {
      return JSON.parse(sessionStorage.getItem(`ridgeline.${name}`)) ?? initial;
    } catch {
      return initial;
    }
  });
  const store = (next) => {
    setValue(next);
    try {
      sessionStorage.setItem(`ridgeline.${name}`, JSON.stringify(next));
    } catch {}
  };
  return [value, store];
}
