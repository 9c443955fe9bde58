// Images and audio of a message: read in this browser, sent inside the request, kept nowhere else.

import { bytes } from "console/format.js";
import { html, icons } from "console/ui.js";

const MOST = 8_000_000;
const AUDIO = { "audio/wav": "wav", "audio/x-wav": "wav", "audio/wave": "wav", "audio/mpeg": "mp3", "audio/mp3": "mp3" };

export async function read(file) {
  const { name, type, size } = file;
  if (!type.startsWith("image/") && !AUDIO[type]) return { problem: `${name}: an image, WAV or MP3 is expected` };
  if (size > MOST) return { problem: `${name} has ${bytes(size)}; at most ${bytes(MOST)} can be sent` };
  const url = await new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(file);
  }).catch(() => null);
  return url ? { name, type, size, url } : { problem: `${name} could not be read` };
}

// The content of a user message, as in OpenAI's API: text alone stays a string.
export function partsOf(text, files = []) {
  if (!files.length) return text;
  const part = ({ type, url }) =>
    AUDIO[type] ? { type: "input_audio", input_audio: { data: url.slice(url.indexOf(",") + 1), format: AUDIO[type] } } : { type: "image_url", image_url: { url } };
  return [{ type: "text", text }, ...files.map(part)];
}

export function Attached({ files = [], remove }) {
  if (!files.length) return null;
  return html`<ul class="attached" aria-label="Attached files">${files.map((file) => html`<li>
    ${AUDIO[file.type] ? html`<audio controls src=${file.url} aria-label=${file.name}></audio>` : html`<img src=${file.url} alt=${file.name} />`}
    ${remove && html`<button type="button" class="quiet square" aria-label=${`Remove ${file.name}`} onClick=${() => remove(file)}>${icons.close}</button>`}
  </li>`)}</ul>`;
}
