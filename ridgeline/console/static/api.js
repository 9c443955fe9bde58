// Requests to the page's own host, with the key of this tab. The key leaves the tab in one header, and only there.

const KEY = "ridgeline.key";
const root = document.getElementById("app");

export const info = JSON.parse(root.dataset.info);

let memory = null; // where the browser refuses storage
const listeners = new Set();

export function key() {
  try {
    return sessionStorage.getItem(KEY) ?? memory ?? "";
  } catch {
    return memory ?? "";
  }
}

export function setKey(value) {
  memory = value;
  try {
    value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY);
  } catch {}
  for (const told of listeners) told();
}

export function onKey(told) {
  listeners.add(told);
  return () => listeners.delete(told);
}

export class ApiError extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

export function headers(more = {}) {
  return key() ? { authorization: `Bearer ${key()}`, ...more } : more;
}

export async function refusal(answer) {
  const text = await answer.text().catch(() => "");
  let message = text.slice(0, 500);
  try {
    const body = JSON.parse(text);
    message = body.error?.message ?? body.message ?? message;
  } catch {}
  return new ApiError(answer.status, message || `the server answered ${answer.status}`, answer.headers.get("retry-after"));
}

export async function ask(path, body, { method = body === undefined ? "GET" : "POST", signal } = {}) {
  const options = { method, signal, headers: headers(), cache: "no-store", credentials: "omit" };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers = headers({ "content-type": "application/json" });
  }
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "the server cannot be reached");
  }
  if (!answer.ok) throw await refusal(answer);
  return answer.json();
}
