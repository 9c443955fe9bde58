// Chat: the public API with the user's own key. The page has no powers beyond it.

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { CHAT, ask, info, needsKey } from "console/api.js";
import { Attached, partsOf, read } from "console/pages/chat_files.js";
import { keep, kept, messagesOf } from "console/pages/chat_history.js";
import { Reply } from "console/reply.js";
import { ReplyCard } from "console/pages/chat_reply.js";
import { ChatSettings, DEFAULTS, bodyOf } from "console/pages/chat_settings.js";
import { Empty, Notice, html, icons, useLoad, useStored } from "console/ui.js";

// The conversation outlives the page's component: another page may be opened while an answer streams.
const chat = { turns: kept(), draft: "", files: [] };
const STARTERS = [
  "Explain in three sentences why decoding is limited by memory bandwidth.",
  "Write a Python function that merges two sorted lists.",
  "List five questions to ask before choosing a GPU.",
];

export default function Chat({ askKey }) {
  const [settings, setSettings] = useStored("chat", DEFAULTS);
  const [isOpen, setOpen] = useState(false);
  const [, redraw] = useState(0);
  const changed = () => (keep(chat.turns), redraw((turn) => turn + 1));
  const log = useRef();
  const models = useLoad(async () => (needsKey(CHAT) ? { data: [] } : ask("/v1/models", undefined, { which: CHAT })));
  const cards = (models.value?.data ?? []).filter((card) => card.task !== "embed");
  const chosen = [0, 1]
    .slice(0, settings.compare ? 2 : 1)
    .map((column) => (cards.some((card) => card.id === settings.models[column]) ? settings.models[column] : cards[column]?.id ?? cards[0]?.id));
  const isBusy = chat.turns.some((turn) => turn.replies.some((reply) => reply.isOpen));

  useLayoutEffect(() => followEnd(log.current), []);
  useEffect(() => {
    if (models.error?.status === 401) askKey();
  }, [models.error]);

  const run = (text, files = chat.files) => {
    if (needsKey(CHAT)) return askKey();
    const isResults = text === null; // of the last reply's calls
    if (!(isResults || text.trim()) || isBusy || !chosen[0]) return;
    const base = bodyOf(settings);
    const replies = chosen.map((model, column) => {
      const said = isResults ? [] : [{ role: "user", content: partsOf(text, files) }];
      const history = [...messagesOf(chat.turns, column), ...said];
      const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
      return new Reply({ ...base, messages: [...system, ...history] }, model);
    });
    chat.turns = [...chat.turns, { text, files: isResults ? [] : files, replies }];
    if (!isResults) [chat.draft, chat.files] = ["", []];
    for (const reply of replies) reply.start(info.kind === "server").then(changed);
    changed();
  };
  const stop = () => chat.turns.forEach((turn) => turn.replies.forEach((reply) => reply.isOpen && reply.stop()));
  const again = () => {
    const last = chat.turns.at(-1);
    chat.turns = chat.turns.slice(0, -1);
    run(last.text, last.files);
  };
  const fresh = () => {
    stop();
    chat.turns = [];
    chat.files = [];
    changed();
    document.getElementById("prompt").focus();
  };

  return html`<div class="chat" data-settings=${isOpen}>
    <section class="conversation" aria-label="Conversation">
      <div class="toolbar">
        <h1>Chat</h1>
        <span class="spread"></span>
        <button type="button" class="quiet" onClick=${fresh} disabled=${!chat.turns.length}>New chat</button>
        <button type="button" class="quiet" aria-expanded=${isOpen} aria-controls="settings" onClick=${() => setOpen(!isOpen)}>${icons.sliders}Settings</button>
      </div>
      ${models.error && models.error.status !== 401 && html`<${Notice} tone="alarm">The models could not be read: ${models.error.message}. <button type="button" class="link" onClick=${models.again}>Try again</button><//>`}
      <div class="log" ref=${log} tabindex="0" role="log" aria-label="Messages">
        ${chat.turns.length === 0 && (needsKey(CHAT) ? html`<${Empty} title="An API key is needed" icon=${icons.lock} actions=${html`<button type="button" class="primary" onClick=${askKey}>Enter the key</button>`}>Chat uses the public API like any other client${CHAT === "chat" ? ", with the key's limits and budget" : ""}.<//>` : html`<${Starters} run=${run} canRun=${!!chosen[0]} />`)}
        ${chat.turns.map((turn, index) => {
          const earlier = chat.turns.slice(0, index + 1);
          return html`<article class="turn" key=${index}>
            ${turn.text !== null && html`<div class="said"><${Attached} files=${turn.files} /><p>${turn.text}</p></div>`}
            <div class="replies" data-count=${turn.replies.length}>
              ${turn.replies.map((reply, column) => html`<${ReplyCard} reply=${reply} card=${cards.find((card) => card.id === reply.model)} earlier=${earlier.map((one) => (one.replies[column] ?? one.replies[0]).body)} isLast=${index === chat.turns.length - 1} onRetry=${again} canRetry=${!isBusy} onResults=${turn.replies.length === 1 && chosen.length === 1 && index === chat.turns.length - 1 ? () => run(null) : null} />`)}
            </div>
          </article>`;
        })}
      </div>
      <${Composer} run=${run} stop=${stop} isBusy=${isBusy} models=${chosen} cards=${cards} settings=${settings} setSettings=${setSettings} />
    </section>
    ${isOpen && html`<${ChatSettings} settings=${settings} setSettings=${setSettings} cards=${cards} chosen=${chosen} onClose=${() => setOpen(false)} />`}
  </div>`;
}

function Starters({ run, canRun }) {
  const prompts = html`<div class="starters">${STARTERS.map((text) => html`<button type="button" disabled=${!canRun} onClick=${() => run(text)}>${text}</button>`)}</div>`;
  return html`<${Empty} title="Ask the model something" icon=${icons.chat} actions=${prompts}>Each reply shows its times, tokens, cached tokens${CHAT === "chat" ? " and cost" : ""}, and the request as curl and Python.<//>`;
}

function Composer({ run, stop, isBusy, models, cards, settings, setSettings }) {
  const [text, setText] = useState(chat.draft);
  const [problem, setProblem] = useState("");
  const [, redraw] = useState(0);
  const canAttach = CHAT === "chat"; // a server of ours reads text alone; behind a gateway a model may read more
  const add = async (given) => {
    const found = await Promise.all([...given].map(read));
    chat.files = [...chat.files, ...found.filter((file) => !file.problem)];
    setProblem(found.find((file) => file.problem)?.problem ?? "");
    redraw((turn) => turn + 1);
  };
  const remove = (file) => {
    chat.files = chat.files.filter((one) => one !== file);
    redraw((turn) => turn + 1);
  };
  const input = useRef();
  const send = () => {
    if (isBusy || !text.trim()) return;
    run(text);
    if (chat.draft === "") setText("");
  };
  const typed = (event) => {
    chat.draft = event.target.value;
    setText(chat.draft);
  };
  const pressed = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
    if (event.key === "Escape" && isBusy) stop();
  };
  useEffect(() => {
    input.current.style.height = "auto";
    input.current.style.height = `${Math.min(input.current.scrollHeight, 220)}px`;
  }, [text]);
  const pick = (column) => (event) => {
    const next = [...settings.models];
    next[column] = event.target.value;
    setSettings({ ...settings, models: next });
  };
  return html`<form class="composer" onSubmit=${(event) => (event.preventDefault(), send())}>
    ${problem && html`<p class="wrong" role="alert">${problem}</p>`}
    <${Attached} files=${chat.files} remove=${remove} />
    <label class="hidden" for="prompt">Message</label>
    <textarea id="prompt" ref=${input} rows="1" placeholder="Message the model" value=${text} onInput=${typed} onKeyDown=${pressed} onPaste=${(event) => canAttach && event.clipboardData.files.length && add(event.clipboardData.files)}></textarea>
    <div class="composer-row">
      ${cards.length > 0 && models.map((model, column) => html`<select aria-label=${column ? "Second model" : "Model"} value=${model} onChange=${pick(column)}>${cards.map((card) => html`<option value=${card.id} selected=${card.id === model}>${card.id}</option>`)}</select>`)}
      ${canAttach && html`<label class="quiet square attach" title="Attach images or audio, for a model that takes them">${icons.attach}<span class="hidden">Attach images or audio</span><input type="file" class="hidden" multiple accept="image/*,audio/wav,audio/mpeg" onChange=${(event) => (add(event.target.files), (event.target.value = ""))} /></label>`}
      <button type="button" class="quiet" aria-pressed=${settings.compare} title="Two models side by side" onClick=${() => setSettings({ ...settings, compare: !settings.compare })}>${icons.columns}<span>Compare</span></button>
      <span class="spread"></span>
      ${isBusy
        ? html`<button type="button" class="primary square" aria-label="Stop" title="Stop (Escape)" onClick=${stop}>${icons.stop}</button>`
        : html`<button class="primary square" aria-label="Send" title="Send (Enter)" disabled=${!text.trim() || !models[0]}>${icons.send}</button>`}
    </div>
  </form>`;
}

// Keeps the end in view while text grows, unless the reader has scrolled up.
function followEnd(element) {
  let follows = true;
  let frame = 0;
  const scroll = () => ((frame = 0), (element.scrollTop = element.scrollHeight));
  const scrolled = () => (follows = element.scrollHeight - element.scrollTop - element.clientHeight < 60);
  const grown = new MutationObserver(() => follows && (frame ||= requestAnimationFrame(scroll)));
  element.addEventListener("scroll", scrolled, { passive: true });
  grown.observe(element, { childList: true, subtree: true, characterData: true });
  element.scrollTop = element.scrollHeight;
  return () => (cancelAnimationFrame(frame), grown.disconnect(), element.removeEventListener("scroll", scrolled));
}
