// Settings of Chat: parameters, system prompt, tools, JSON schema. Kept in this tab.

import { info } from "console/api.js";
import { Field, html, icons } from "console/ui.js";

export const DEFAULTS = {
  models: ["", ""],
  compare: false,
  system: "",
  temperature: "",
  top_p: "",
  max_tokens: "512",
  seed: "",
  stop: "",
  tools: "",
  schema: "",
  logprobs: false,
};

const parsed = (text) => {
  try {
    return { value: text.trim() ? JSON.parse(text) : undefined };
  } catch (error) {
    return { error: error.message };
  }
};

export function bodyOf(settings) {
  const body = {};
  for (const name of ["temperature", "top_p", "max_tokens", "seed"])
    if (String(settings[name]).trim() !== "") body[name] = Number(settings[name]);
  if (settings.stop) body.stop = settings.stop.split(",").map((text) => text.trim());
  const tools = parsed(settings.tools).value;
  if (Array.isArray(tools) && tools.length) body.tools = tools;
  const schema = parsed(settings.schema).value;
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  return body;
}

export function ChatSettings({ settings, setSettings, cards, chosen, onClose }) {
  const set = (name) => (event) => setSettings({ ...settings, [name]: event.target.type === "checkbox" ? event.target.checked : event.target.value });
  const number = (name, label, hint, step, low, high) => html`<${Field} label=${label} hint=${hint}>
    <input type="number" inputmode="decimal" step=${step} min=${low} max=${high} value=${settings[name]} placeholder="default" onInput=${set(name)} /><//>`;
  const json = (name, label, hint, example) => {
    const { error, value } = parsed(settings[name]);
    const wrong = error ?? (name === "tools" && value !== undefined && !Array.isArray(value) ? "a list of tools is expected" : "");
    return html`<${Field} label=${label} hint=${hint}>
      <textarea class="mono" rows="4" spellcheck="false" value=${settings[name]} placeholder=${example} aria-invalid=${!!wrong} onInput=${set(name)}></textarea>
      ${wrong && html`<span class="wrong" role="alert">${wrong}</span>`}<//>`;
  };
  const card = cards.find((one) => one.id === chosen[0]);
  return html`<aside class="settings" id="settings" aria-label="Settings">
    <div class="toolbar"><h2>Settings</h2><span class="spread"></span><button type="button" class="quiet square" aria-label="Close settings" onClick=${onClose}>${icons.close}</button></div>
    ${card?.max_model_len && html`<p class="faint">${card.id}: context of ${card.max_model_len.toLocaleString("en")} tokens.</p>`}
    <p class="faint"><small>${info.kind === "server" ? "Text only: no model of this server takes images or audio." : "Images and audio can be attached; a model that takes none refuses them."}</small></p>
    <${Field} label="System prompt"><textarea rows="3" value=${settings.system} onInput=${set("system")}></textarea><//>
    <div class="pair">
      ${number("temperature", "Temperature", "0–2", 0.1, 0, 2)}
      ${number("top_p", "Top p", "0–1", 0.05, 0, 1)}
      ${number("max_tokens", "Max tokens", "", 1, 1, 1_000_000)}
      ${number("seed", "Seed", "", 1, 0, 2 ** 53)}
    </div>
    <${Field} label="Stop" hint="comma-separated"><input type="text" value=${settings.stop} onInput=${set("stop")} /><//>
    ${json("tools", "Tools", "JSON list", '[{"type": "function", "function": {…}}]')}
    ${json("schema", "Answer schema", "JSON schema", '{"type": "object", "properties": {…}}')}
    <label class="check"><input type="checkbox" checked=${settings.logprobs} onChange=${set("logprobs")} /> Log-probability of each token</label>
    <button type="button" class="quiet" onClick=${() => setSettings({ ...DEFAULTS, models: settings.models, compare: settings.compare })}>Reset to defaults</button>
  </aside>`;
}
