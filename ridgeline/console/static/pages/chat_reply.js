// One reply: its text as it grows, its figures, the request behind it, and what broke the prefix cache.

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { ask, info, key } from "console/api.js";
import { count, ms, percent, pusd, rate } from "console/format.js";
import { markdownInto } from "console/markdown.js";
import { curl, python } from "console/snippets.js";
import { Badge, CopyButton, Dialog, Figure, Loading, Notice, Table, Tabs, html, icons, useLoad } from "console/ui.js";

export function ReplyCard({ reply, card, earlier, isLast, canRetry, onRetry, onResults }) {
  const [, redraw] = useState(0);
  const [dialog, setDialog] = useState("");
  useEffect(() => {
    // Figures and buttons change with the state; the text writes itself.
    let seen = `${reply.state}${reply.isBooked}`;
    return reply.on(() => {
      const now = `${reply.state}${reply.isBooked}`;
      if (now !== seen) redraw((turn) => turn + 1);
      seen = now;
    });
  }, [reply]);
  const finished = { length: "cut at the token limit", tool_calls: "tool call", content_filter: "filtered" }[reply.finish];
  return html`<section class="reply" aria-label=${`Reply of ${reply.model}`} aria-busy=${reply.isOpen} data-state=${reply.state}>
    <header class="reply-head">
      <span class="reply-model">${reply.model}</span>
      ${reply.state === "waiting" && html`<span class="pulse" role="status">waiting for the first token</span>`}
      ${reply.state === "stopped" && html`<${Badge}>stopped<//>`}
      ${reply.state === "done" && finished && html`<${Badge} tone="warn">${finished}<//>`}
    </header>
    <${Reasoning} reply=${reply} />
    <${ReplyText} reply=${reply} />
    ${reply.calls.length > 0 && html`<${Calls} reply=${reply} onResults=${onResults} />`}
    ${reply.error && html`<${Notice} tone="alarm">${reply.error.message}${reply.error.retryAfter ? ` Retry after ${reply.error.retryAfter} s.` : ""}<//>`}
    ${!reply.isOpen && html`<footer class="reply-foot">
      <${ReplyFigures} reply=${reply} card=${card} />
      <div class="reply-actions">
        <${CopyButton} text=${() => reply.text} />
        <button type="button" class="quiet" onClick=${() => setDialog("request")}>Request</button>
        ${reply.tokens.length > 0 && html`<button type="button" class="quiet" onClick=${() => setDialog("tokens")}>Tokens</button>`}
        ${info.kind === "server" && html`<button type="button" class="quiet" onClick=${() => setDialog("cache")}>Prefix cache</button>`}
        ${isLast && html`<button type="button" class="quiet" disabled=${!canRetry} onClick=${onRetry}>${icons.retry}Retry</button>`}
      </div>
    </footer>`}
    ${dialog === "request" && html`<${RequestDialog} reply=${reply} onClose=${() => setDialog("")} />`}
    ${dialog === "tokens" && html`<${TokensDialog} reply=${reply} onClose=${() => setDialog("")} />`}
    ${dialog === "cache" && html`<${CacheDialog} reply=${reply} bodies=${earlier} onClose=${() => setDialog("")} />`}
  </section>`;
}

// The model's calls. In the last reply each has a box for its result; all together they are sent as tool messages.
function Calls({ reply, onResults }) {
  const [, redraw] = useState(0);
  const typed = (call) => (event) => ((call.result = event.target.value), redraw((turn) => turn + 1));
  const canAnswer = onResults && reply.state === "done";
  return html`<div class="calls">
    ${reply.calls.map((call) => html`<div class="call">
      <p><span class="faint">calls</span> <code>${call.name}(${call.arguments})</code></p>
      ${canAnswer ? html`<textarea rows="2" aria-label=${`Result of ${call.name}`} placeholder="What the tool answers" value=${call.result ?? ""} onInput=${typed(call)}></textarea>` : call.result && html`<p><span class="faint">result</span> <code>${call.result}</code></p>`}
    </div>`)}
    ${canAnswer && html`<button type="button" disabled=${!reply.calls.every((call) => call.result)} onClick=${onResults}>${reply.calls.length > 1 ? "Send results" : "Send result"}</button>`}
  </div>`;
}

const MOST_CHARACTERS = 4000; // of one frame: a long text that is already there comes over several

// Written into the DOM at most once per frame, beside the components: a token costs no re-render.
function ReplyText({ reply }) {
  const place = useRef();
  useLayoutEffect(() => {
    const text = markdownInto(place.current);
    let written = 0;
    let frame = 0;
    const later = () => (frame ||= requestAnimationFrame(write));
    const write = () => {
      frame = 0;
      let end = Math.min(written + MOST_CHARACTERS, reply.text.length);
      if (end < reply.text.length && /[\uD800-\uDBFF]/.test(reply.text[end - 1])) end -= 1; // not within a character
      if (written < end) text.write(reply.text.slice(written, end));
      written = end;
      if (written < reply.text.length) later();
      else if (!reply.isOpen) text.end();
    };
    write();
    const leave = reply.isOpen ? reply.on(later) : () => {};
    return () => (leave(), cancelAnimationFrame(frame), place.current?.replaceChildren());
  }, [reply]);
  return html`<div class="markdown" ref=${place}></div>`;
}

function Reasoning({ reply }) {
  const place = useRef();
  const [has, setHas] = useState(!!reply.reasoning);
  useEffect(() => {
    const write = () => {
      if (reply.reasoning && !has) setHas(true);
      if (place.current) place.current.textContent = reply.reasoning;
    };
    write();
    return reply.on(write);
  }, [reply, has]);
  return has && html`<details class="reasoning"><summary>Reasoning</summary><div ref=${place}></div></details>`;
}

function ReplyFigures({ reply, card }) {
  const found = reply.figures();
  const by = found.isServer ? "by the server's TimingRecord" : "by this browser's clock";
  const limit = card?.limits?.decode_tokens_per_s;
  const speed = found.tpot ? 1000 / found.tpot : null;
  const row = found.row;
  return html`<div class="reply-figures">
    <${Figure} name="TTFT" value=${ms(found.ttft)} formula=${`First output token − arrival of the request, ${by}.`} />
    <${Figure} name="TPOT" value=${ms(found.tpot)} formula=${`(last token − first token) ÷ (output tokens − 1), ${by}.`} />
    <${Figure} name="Speed" value=${rate(speed)} unit=${limit && speed ? `tok/s, ${percent(speed / limit)} of ${rate(limit)}` : "tok/s"} formula=${`1000 ÷ TPOT in ms.${limit ? " The limit is decode_tokens_per_s of /v1/models: one stream on this machine, by the bytes that a token reads." : ""}`} />
    <${Figure} name="Prompt" value=${count(found.prompt)} unit="tok" formula="usage.prompt_tokens of the answer." />
    <${Figure} name="Cached" value=${percent(found.prompt ? found.cached / found.prompt : null)} formula=${`usage.prompt_tokens_details.cached_tokens ÷ usage.prompt_tokens: ${count(found.cached)} of ${count(found.prompt)}.`} />
    <${Figure} name="Output" value=${count(found.out)} unit="tok" formula="usage.completion_tokens of the answer." />
    ${info.kind === "gateway" && html`<${Figure} name="Cost" value=${row ? `$${pusd(row.cost_pusd)}` : reply.isBooked || !key() ? "–" : "…"} formula=${row ? `cost_pusd of the ledger's row ${row.request_id}; prices by ${row.price_source || "none"}.` : "From the ledger's row, which is written shortly after the answer and needs the admin key."} />`}
    ${row && html`<${Figure} name="Served by" value=${row.upstream || "–"} unit=${row.cache ? `${row.cache} cache` : row.attempts > 1 ? `${row.attempts} attempts` : ""} formula=${`upstream and upstream_model of the ledger's row: ${row.upstream_model || "–"}.`} />`}
  </div>`;
}

function RequestDialog({ reply, onClose }) {
  const [tab, setTab] = useState("curl");
  const body = { ...reply.body };
  const shown = { curl: curl(body, info.needs_key), Python: python(body, info.needs_key), JSON: JSON.stringify(body, null, 2) }[tab];
  return html`<${Dialog} title="The request" onClose=${onClose}>
    <div class="toolbar"><${Tabs} names=${["curl", "Python", "JSON"]} value=${tab} onChange=${setTab} label="Form of the request" /><span class="spread"></span><${CopyButton} text=${shown} /></div>
    <pre class="code" tabindex="0">${shown}</pre>
    ${reply.requestId && html`<p class="faint">x-request-id: <code>${reply.requestId}</code></p>`}
  <//>`;
}

function TokensDialog({ reply, onClose }) {
  return html`<${Dialog} title="Tokens and their probability" onClose=${onClose}>
    <p class="faint">The wash grows as the probability exp(logprob) falls. Focus or point at a token for its alternatives.</p>
    <div class="tokens">
      ${reply.tokens.map(({ token, logprob, top_logprobs: others }) => {
        const share = Math.exp(logprob);
        const names = (others ?? []).map((one) => `${JSON.stringify(one.token)} ${percent(Math.exp(one.logprob))}`).join("\n");
        return html`<span tabindex="0" style=${{ "--doubt": 1 - share }} title=${`${percent(share)}\n${names}`}>${token}</span>`;
      })}
    </div>
  <//>`;
}

const BREAKERS = [
  { name: "What changes", cell: (one) => html`<${Badge} tone="warn">${one.kind}<//>` },
  { name: "Where", cell: (one) => one.where },
  { name: "At token", number: true, cell: (one) => count(one.at_token) },
  { name: "Tokens lost", number: true, cell: (one) => count(one.tokens_lost) },
  { name: "Example", wide: true, cell: (one) => html`<code>${one.example}</code>` },
];

// Which part of the prompt broke the prefix cache: the conversation's own requests, compared by the server.
function CacheDialog({ reply, bodies, onClose }) {
  const found = useLoad(() =>
    ask("/console/lint", { model: reply.model, requests: bodies.slice(-8).map(({ messages, tools }) => ({ messages, ...(tools ? { tools } : {}) })) }),
  );
  const { prompt, cached } = reply.figures();
  const report = found.value;
  return html`<${Dialog} title="Prefix cache" onClose=${onClose}>
    <p>The engine found <strong>${count(cached)} of ${count(prompt)}</strong> prompt tokens of this request in its cache.</p>
    ${found.error && html`<${Notice} tone="alarm">${found.error.message}<//>`}
    ${!report && !found.error && html`<${Loading} />`}
    ${report && html`
      <p class="faint">Over the last ${report.requests} requests of this conversation, ${count(report.tokens_shared)} of ${count(report.tokens)} tokens (${percent(report.tokens_shared / report.tokens)}) begin like an earlier request. With changing parts last, ${count(report.tokens_shared_ideal)} could. Blocks of 16 tokens are shared or not.</p>
      ${report.breakers.length === 0
        ? html`<p>${report.requests < 2 ? "One request has nothing to share with. Send another, then look again." : "No part of these prompts breaks the shared prefix."}</p>`
        : html`<${Table} caption="Parts that break the prefix" columns=${BREAKERS} rows=${report.breakers} />`}`}
  <//>`;
}
