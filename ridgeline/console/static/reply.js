// Reply: one streamed answer of /v1/chat/completions, measured by this browser and by the server.

import { ApiError, CHAT, ask, headers, info, key, refusal } from "console/api.js";
import { EventParser } from "console/events.js";

const BOOKED_MS = [250, 500, 1000, 2000, 4000];

export class Reply {
  constructor(body, model) {
    this.body = { ...body, model };
    this.model = model;
    this.text = this.reasoning = "";
    this.calls = [];
    this.tokens = []; // with log-probabilities, where they were asked for
    this.state = "waiting"; // streaming, done, stopped, failed
    this.usage = this.error = this.finish = this.requestId = this.row = null;
    this.listeners = new Set();
    this.unread = [];
  }

  // A reply out of this tab's storage.
  static again({ figures, problem, ...stored }) {
    const reply = Object.assign(new Reply(stored.body, stored.model), stored);
    if (reply.isOpen) reply.state = "stopped";
    if (problem) reply.error = new ApiError(0, problem);
    reply.figures = () => ({ ...figures, row: reply.row });
    return reply;
  }

  on(heard) {
    this.listeners.add(heard);
    return () => this.listeners.delete(heard);
  }

  tell() {
    for (const heard of this.listeners) heard();
  }

  get isOpen() {
    return this.state === "waiting" || this.state === "streaming";
  }

  stop() {
    this.controller?.abort();
  }

  async start(askTiming) {
    this.controller = new AbortController();
    this.begunAt = performance.now();
    const asked = { ...this.body, stream: true, stream_options: { include_usage: true } };
    if (askTiming) asked.include_timing = true;
    try {
      const answer = await fetch("/v1/chat/completions", {
        method: "POST",
        headers: headers({ "content-type": "application/json" }, CHAT),
        body: JSON.stringify(asked),
        signal: this.controller.signal,
        credentials: "omit",
      });
      this.requestId = answer.headers.get("x-request-id");
      if (!answer.ok) throw await refusal(answer);
      await this.read(answer);
      if (this.state !== "failed") this.state = "done";
    } catch (error) {
      if (this.controller.signal.aborted) this.state = "stopped";
      else {
        this.state = "failed";
        this.error = error instanceof ApiError ? error : new ApiError(0, "the connection broke off; the answer is incomplete");
      }
    }
    this.endedAt = performance.now();
    this.tell();
    if (info.kind === "gateway" && this.requestId && key()) this.book();
  }

  // What the gateway booked for this request: the ledger's row, which is written shortly after the answer.
  async book() {
    for (const pause of BOOKED_MS) {
      await new Promise((ready) => setTimeout(ready, pause));
      this.row = await ask(`/admin/usage/${encodeURIComponent(this.requestId)}`).catch(() => null);
      if (this.row) break;
    }
    this.isBooked = true;
    this.tell();
  }

  async read(answer) {
    let isComplete = false;
    const parser = new EventParser(({ data }) => {
      if (data === "[DONE]") isComplete = true;
      else this.hear(JSON.parse(data));
    });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let part; !(part = await reader.read()).done; ) {
      parser.push(part.value);
      this.tell();
    }
    if (!isComplete && this.state !== "failed") throw new ApiError(0, "the stream ended before the answer did");
  }

  hear(chunk) {
    if (chunk.error) {
      this.state = "failed";
      this.error = new ApiError(0, chunk.error.message);
      return;
    }
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { content, reasoning_content: thought, tool_calls: calls } = choice.delta ?? {};
    if (content || thought || calls) {
      this.state = "streaming";
      this.lastAt = performance.now();
      this.firstAt ??= this.lastAt;
    }
    if (content) this.text += content;
    if (thought) this.reasoning += thought;
    for (const call of calls ?? []) {
      const known = (this.calls[call.index ?? this.calls.length] ??= { id: call.id, name: "", arguments: "" });
      known.name += call.function?.name ?? "";
      known.arguments += call.function?.arguments ?? "";
    }
    if (choice.logprobs?.content) this.tokens.push(...choice.logprobs.content);
    if (choice.finish_reason) this.finish = choice.finish_reason;
  }

  // Server's clock where it told its times, else this browser's.
  figures() {
    const timing = this.usage?.timing?.[0];
    const out = this.usage?.completion_tokens ?? null;
    const measured = this.firstAt && this.lastAt > this.firstAt && out > 1 ? (this.lastAt - this.firstAt) / (out - 1) : null;
    return {
      isServer: !!timing,
      ttft: timing?.ttft_ms ?? (this.firstAt ? this.firstAt - this.begunAt : null),
      tpot: timing?.tpot_ms ?? measured,
      queue: timing?.queue_ms ?? null,
      prompt: this.usage?.prompt_tokens ?? null,
      cached: this.usage?.prompt_tokens_details?.cached_tokens ?? null,
      out,
      row: this.row,
    };
  }
}
