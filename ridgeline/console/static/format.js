// Numbers and times as text. Pure functions.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const one = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

export const count = (value) => (value == null ? "–" : whole.format(value));

export const rate = (value) => (value == null ? "–" : value < 100 ? one.format(value) : whole.format(value));

export const percent = (share) =>
  share == null || !isFinite(share) ? "–" : `${share < 0.1 ? one.format(100 * share) : whole.format(100 * share)} %`;

export function ms(value) {
  if (value == null) return "–";
  if (value < 10) return `${value.toFixed(1)} ms`;
  if (value < 1000) return `${Math.round(value)} ms`;
  return value < 60_000 ? `${(value / 1000).toFixed(2)} s` : `${(value / 60_000).toFixed(1)} min`;
}

export function bytes(value) {
  if (value == null) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let step = 0;
  while (value >= 1000 && step < units.length - 1) (value /= 1000), step++;
  return `${step && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[step]}`;
}

// From the ledger's exact text; digits after the sixth are left out, never rounded up.
export function dollars(text, digits = 2) {
  if (text == null) return "–";
  const [before, after = ""] = text.replace("-", "").split(".");
  const part = after.slice(0, Math.max(digits, 6)).replace(/0+$/, "").padEnd(digits, "0");
  return `${text.startsWith("-") ? "-" : ""}$${whole.format(BigInt(before))}.${part}`;
}

// Digits for a column of amounts whose largest is this one, so that their points stand below each other.
export const digitsOf = (text) => (Number(text) >= 100 ? 2 : Number(text) >= 1 ? 4 : 6);

// A picodollar integer as dollars, exactly: 1e-12 each.
export function pusd(value) {
  const digits = String(BigInt(value)).padStart(13, "0");
  return `${digits.slice(0, -12)}.${digits.slice(-12).replace(/0+$/, "").padEnd(2, "0")}`;
}

export const clock = (at) => new Date(at).toLocaleTimeString([], { hour12: false });

export const moment = (at) =>
  new Date(at).toLocaleString([], { dateStyle: "medium", timeStyle: "short", hour12: false });

export function since(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172_800 ? `${(seconds / 3600).toFixed(1)} h` : `${Math.round(seconds / 86_400)} d`;
}
