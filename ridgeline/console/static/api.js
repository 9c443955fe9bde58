// Requests to the page's own host, with the key of this tab. The key leaves the tab in one header, and only there.

const root = document.getElementById("app");

export const info = JSON.parse(root.dataset.info);

// On a gateway the page has two keys: the administrator's, and a client's for Chat.
export const CHAT = info.kind === "gateway" ? "chat" : "host";
export const keyName = (which) => (which === "host" ? info.key_name : "API key");
export const needsKey = (which) => info.needs_key && !key(which);

const memory = {}; // where the browser refuses storage
const listeners = new Set();
const place = (which) => (which === "host" ? "ridgeline.key" : `ridgeline.key.${which}`);

export function key(which = "host") {
  try {
    return sessionStorage.getItem(place(which)) ?? memory[which] ?? "";
  } catch {
    return memory[which] ?? "";
  }
}

export function setKey(value, which = "host") {
  memory[which] = value;
  try {
    value ? sessionStorage.setItem(place(which), value) : sessionStorage.removeItem(place(which));
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

export function headers(more = {}, which = "host") {
  return key(which) ? { authorization: `Bearer ${key(which)}`, ...more } : more;
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

export async function ask(path, body, { method = body === undefined ? "GET" : "POST", signal, which } = {}) {
  const options = { method, signal, headers: headers({}, which), cache: "no-store", credentials: "omit" };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers = headers({ "content-type": "application/json" }, which);
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
