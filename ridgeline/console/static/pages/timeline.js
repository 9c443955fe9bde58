// The timeline's geometry and drawing. 2,000 bars are drawn in one pass over a canvas; no DOM node per request.

const ROW = 10;
const GAP = 3;
const AXIS = 22;
const LEAST = 1.5; // px of the shortest part that is drawn

const endOf = (record, now) => record.at + (record.sent ?? record.end ?? now - record.at);

// Places each record of [from, to] in the first row that is free at its arrival.
export function layout(records, from, to) {
  const rows = [];
  const placed = [];
  for (const record of records) {
    const end = endOf(record, to);
    if (end < from || record.at > to) continue;
    placed.push({ record, end, row: 0 });
  }
  placed.sort((one, other) => one.record.at - other.record.at);
  const pause = (to - from) / 400;
  const free = new FreeRows();
  for (const bar of placed) {
    bar.row = free.take(bar.record.at);
    rows[bar.row] = free.until(bar.row, bar.end + pause);
  }
  return { placed, count: rows.length };
}

// The lowest row that is free: a heap of free rows, and one of the ends of taken ones.
class FreeRows {
  constructor() {
    this.open = [];
    this.taken = [];
    this.count = 0;
  }

  take(at) {
    while (this.taken.length && this.taken[0][0] <= at) push(this.open, [pop(this.taken)[1]]);
    return this.open.length ? pop(this.open)[0] : this.count++;
  }

  until(row, end) {
    push(this.taken, [end, row]);
    return end;
  }
}

function push(heap, item) {
  let at = heap.push(item) - 1;
  while (at > 0) {
    const above = (at - 1) >> 1;
    if (heap[above][0] <= heap[at][0]) break;
    [heap[above], heap[at]] = [heap[at], heap[above]];
    at = above;
  }
}

function pop(heap) {
  const top = heap[0];
  const last = heap.pop();
  if (heap.length) {
    heap[0] = last;
    for (let at = 0, least; ; at = least) {
      least = at;
      for (const below of [2 * at + 1, 2 * at + 2]) if (below < heap.length && heap[below][0] < heap[least][0]) least = below;
      if (least === at) break;
      [heap[at], heap[least]] = [heap[least], heap[at]];
    }
  }
  return top;
}

const rowHeight = (count, height) => Math.max(2, Math.min(ROW + GAP, (height - AXIS) / Math.max(count, 1)));

let palette = null;
const forget = () => (palette = null);
addEventListener("themechange", forget);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", forget);

function colours() {
  if (palette) return palette;
  const style = getComputedStyle(document.documentElement);
  const value = (name) => style.getPropertyValue(name).trim();
  palette = { queue: value("--c-queue"), prefill: value("--c-prefill"), decode: value("--c-decode"), alarm: value("--alarm"), warn: value("--warn"), cached: value("--c-cached"), ink: value("--ink"), faint: value("--faint"), line: value("--line"), font: `12px ${value("--sans")}` };
  return palette;
}

export function drawTimeline(canvas, rows, from, to, chosen) {
  const scale = devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext("2d");
  const ink = colours();
  const x = (at) => ((at - from) / (to - from)) * width;
  const step = rowHeight(rows.count, height);
  const bar = Math.max(step - (step > 6 ? GAP : step > 3 ? 1 : 0), 1);
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  axis(pen, ink, x, from, to, width, height);
  // One path per colour: a few fills for thousands of bars.
  const parts = { queue: [], prefill: [], decode: [], cached: [], alarm: [], warn: [] };
  const add = (name, begin, end, y) => parts[name].push(Math.max(begin, 0), y, Math.max(end - Math.max(begin, 0), LEAST));
  for (const { record, row } of rows.placed) {
    const y = row * step + 4;
    if (y > height - AXIS) continue;
    const at = (after) => x(record.at + after);
    const admitted = record.admitted ?? record.first ?? null;
    const last = x(endOf(record, to));
    if (admitted == null) add("queue", x(record.at), last, y);
    else {
      add("queue", x(record.at), at(admitted), y);
      const first = record.first ?? null;
      add("prefill", at(admitted), first == null ? last : at(first), y);
      if (first != null) {
        add("decode", at(first), last, y);
        for (const chunk of record.chunks ?? []) if (chunk > first) add("warn", at(chunk), at(chunk) + 3, y);
      }
      if (record.cached && bar >= 3 && last - x(record.at) > 10) add("cached", at(admitted), at(admitted) + 3, y);
      if (bar >= 6) for (const chunk of (record.chunks ?? []).slice(1)) if (first == null || chunk < first) add("queue", at(chunk), at(chunk) + 1, y);
    }
    if (record.state === "aborted" || record.state === "failed") add("alarm", last - 3, last, y);
  }
  for (const [name, places] of Object.entries(parts)) {
    pen.fillStyle = ink[name];
    pen.beginPath();
    for (let index = 0; index < places.length; index += 3) pen.rect(places[index], places[index + 1], places[index + 2], bar);
    pen.fill();
  }
  const marked = chosen && rows.placed.find(({ record }) => record.id === chosen);
  if (marked) {
    pen.strokeStyle = ink.ink;
    pen.lineWidth = 1.5;
    const begin = Math.max(x(marked.record.at), 1);
    pen.strokeRect(begin - 1.5, marked.row * step + 2.5, Math.max(x(endOf(marked.record, to)) - begin, 2) + 3, bar + 3);
  }
}

function axis(pen, ink, x, from, to, width, height) {
  const every = [1, 2, 5, 10, 15, 30, 60, 120, 300].map((seconds) => seconds * 1000).find((size) => (width * size) / (to - from) > 70) ?? 600_000;
  pen.font = ink.font;
  pen.strokeStyle = ink.line;
  pen.fillStyle = ink.faint;
  pen.lineWidth = 1;
  for (let at = Math.ceil(from / every) * every; at <= to; at += every) {
    pen.beginPath();
    pen.moveTo(x(at), 0);
    pen.lineTo(x(at), height - AXIS);
    pen.stroke();
    const label = new Date(at).toLocaleTimeString([], { hour12: false });
    if (x(at) + 4 + pen.measureText(label).width < width) pen.fillText(label, x(at) + 4, height - 7);
  }
}

export function hitTest(rows, left, top, box, from, to) {
  const step = rowHeight(rows.count, box.height);
  const at = from + (left / box.width) * (to - from);
  const slack = ((to - from) / box.width) * 4;
  const row = Math.floor((top - 4) / step);
  return rows.placed.find((bar) => bar.row === row && bar.record.at - slack <= at && at <= bar.end + slack)?.record ?? null;
}
