// uPlot, loaded with the first chart; colours come from the page's own values.

import { clock } from "console/format.js";

let loading;

function library() {
  loading ??= new Promise((resolve, reject) => {
    const script = Object.assign(document.createElement("script"), { src: import.meta.resolve("uplot") });
    script.onload = () => resolve(globalThis.uPlot);
    script.onerror = () => ((loading = undefined), reject(new Error("the chart library could not be loaded")));
    document.head.append(script);
  });
  return loading;
}

const value = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// The points of the last `seconds`: older ones are left of the chart.
function shown(data, seconds) {
  const from = data[0].findIndex((at) => at >= data[0][data[0].length - 1] - seconds);
  return data.map((values) => values.slice(Math.max(from, 0)));
}

// series: [{label, colour (name of a value), fill, dash}]. `most` gives the top of the axis for the shown data; lines
// above it are cut off. Returns {set(data), destroy()}.
export async function lineChart(element, series, { format = String, height = 200, seconds = 300, most } = {}) {
  const uPlot = await library();
  let plot;
  let data = [[], ...series.map(() => [])];
  const build = () => {
    plot?.destroy();
    const axis = { stroke: value("--faint"), grid: { stroke: value("--line"), width: 1 }, ticks: { show: false }, font: `12px ${value("--sans")}` };
    const options = {
      width: Math.max(element.clientWidth, 200),
      height,
      cursor: { y: false, points: { size: 6 } },
      legend: { show: false },
      scales: { x: { range: (_, __, high) => ((high ||= Date.now() / 1000), [high - seconds, high]) }, y: { range: (plot, _, high) => [0, Math.max((most?.(shown(plot.data, seconds)) ?? high) * 1.1, 10)] } },
      axes: [{ ...axis, size: 30, grid: { show: false }, space: 90, values: (_, ticks) => ticks.map((at) => clock(at * 1000)) }, { ...axis, size: 58, space: 42, values: (_, ticks) => ticks.map(format) }],
      series: [
        {},
        ...series.map(({ label, colour, fill, dash }) => ({
          label,
          stroke: value(colour),
          width: 1.6,
          dash,
          fill: fill && `color-mix(in srgb, ${value(colour)} 12%, transparent)`,
          points: { show: false },
        })),
      ],
    };
    plot = new uPlot(options, data, element);
  };
  build();
  const resized = new ResizeObserver(() => plot.setSize({ width: Math.max(element.clientWidth, 200), height }));
  resized.observe(element);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  addEventListener("themechange", build);
  dark.addEventListener("change", build);
  return {
    set: (next) => plot.setData((data = next)),
    destroy: () => (resized.disconnect(), removeEventListener("themechange", build), dark.removeEventListener("change", build), plot.destroy()),
  };
}
