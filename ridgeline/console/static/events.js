// The one event stream. It reconnects with the last event's id, and rests while the tab is hidden.

import { headers, info, key, onKey } from "console/api.js";

const RETRY_MS = [250, 500, 1000, 2000];
const PAST_FRAMES = 300;
const SILENT_MS = 2000; // a frame comes each second
const DEAD_MS = 10000; // after this the connection is taken for broken, though nothing has closed it

// Splits text/event-stream; also used for chat streams.
export class EventParser {
  constructor(tell) {
    this.tell = tell;
    this.rest = "";
    this.event = this.id = "";
    this.data = null;
  }

  push(text) {
    const lines = (this.rest + text).split("\n");
    this.rest = lines.pop();
    for (const raw of lines) {
      const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
      if (line === "") {
        if (this.data !== null) this.tell({ event: this.event, data: this.data, id: this.id });
        this.event = "";
        this.data = null;
      } else if (line.startsWith("data:")) {
        const value = line.slice(line[5] === " " ? 6 : 5);
        this.data = this.data === null ? value : `${this.data}\n${value}`;
      } else if (line.startsWith("event:")) this.event = line.slice(6).trim();
      else if (line.startsWith("id:")) this.id = line.slice(3).trim();
    }
  }
}

class Feed {
  constructor() {
    this.topics = new Set();
    this.listeners = new Map();
    this.lastId = "";
    this.last = new Map(); // the newest frame and snapshot of each name, for pages that open later
    this.past = new Map(); // the frames of the last minutes, for charts
    this.status = { state: "connecting", why: "" };
    this.attempts = 0;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.rest() : this.open()));
    onKey(() => this.restart());
    setInterval(() => this.watch(), 500);
  }

  on(name, heard) {
    const heardBy = this.listeners.get(name) ?? new Set();
    this.listeners.set(name, heardBy.add(heard));
    if (this.last.has(name)) heard(this.last.get(name));
    return () => heardBy.delete(heard);
  }

  want(...topics) {
    const before = this.topics.size;
    for (const topic of topics) this.topics.add(topic);
    if (this.topics.size > before) this.restart();
  }

  restart() {
    this.lastId = "";
    this.close();
    this.open();
  }

  close() {
    clearTimeout(this.timer);
    this.controller?.abort();
    this.controller = null;
  }

  rest() {
    this.close();
    this.say("paused", "");
  }

  async open() {
    if (this.controller || document.hidden || !this.topics.size || !info.events) return;
    if (info.needs_key && !key()) return this.say("key", "a key is needed");
    const controller = (this.controller = new AbortController());
    this.heardAt = performance.now();
    try {
      const more = this.lastId ? { "last-event-id": this.lastId } : {};
      const url = `/console/events?topics=${[...this.topics].join(",")}`;
      const answer = await fetch(url, { headers: headers(more), signal: controller.signal, credentials: "omit" });
      if (answer.status === 401 || answer.status === 403) {
        this.controller = null;
        return this.say("key", "the key was refused");
      }
      if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
      const parser = new EventParser((event) => this.hear(event));
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let part; !(part = await reader.read()).done; ) parser.push(part.value);
      throw new Error("the stream ended");
    } catch (error) {
      if (controller.signal.aborted) return;
      this.controller = null;
      this.say("lost", "the server cannot be reached");
      const wait = RETRY_MS[Math.min(this.attempts++, RETRY_MS.length - 1)];
      this.timer = setTimeout(() => this.open(), wait);
    }
  }

  hear({ event, data, id }) {
    this.attempts = 0;
    this.heardAt = performance.now();
    if (this.status.state !== "live") this.say("live", "");
    if (id) this.lastId = id;
    const value = JSON.parse(data);
    if (event.endsWith(".frame") || event.endsWith(".snapshot")) this.last.set(event, value);
    if (event.endsWith(".frame")) {
      const past = this.past.get(event) ?? [];
      this.past.set(event, past);
      if (past.push(value) > PAST_FRAMES) past.shift();
    }
    for (const heard of this.listeners.get(event) ?? []) heard(value);
  }

  watch() {
    const silent = performance.now() - this.heardAt;
    if (!this.controller || silent < SILENT_MS) return;
    if (this.status.state === "live") this.say("lost", "no data for 2 s");
    if (silent < DEAD_MS) return;
    this.close();
    this.open();
  }

  say(state, why) {
    if (this.status.state === state && this.status.why === why) return;
    this.status = { state, why };
    for (const heard of this.listeners.get("status") ?? []) heard(this.status);
  }
}

export const feed = new Feed();
