// The conversation as messages of the API, and in this tab's storage: a reload shows it again, also without a server.

import { partsOf } from "console/pages/chat_files.js";
import { Reply } from "console/reply.js";

const NAME = "ridgeline.turns";
const KEPT = ["body", "model", "text", "reasoning", "calls", "tokens", "state", "usage", "finish", "requestId", "row", "isBooked"];

// A call without a result is left out: APIs refuse a conversation in which a call has no answer.
function replied({ text, calls }) {
  const isAnswered = calls.length > 0 && calls.every((call) => call.result);
  if (!isAnswered) return text ? [{ role: "assistant", content: text }] : [];
  const made = calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
  const results = calls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result }));
  return [{ role: "assistant", content: text, tool_calls: made }, ...results];
}

export const messagesOf = (turns, column) =>
  turns.flatMap(({ text, files, replies }) => [
    ...(text || files.length ? [{ role: "user", content: partsOf(text, files) }] : []), // none behind results of tools
    ...replied(replies[column] ?? replies[0]),
  ]);

export function keep(turns) {
  const kept = turns.map(({ text, files, replies }) => ({
    text,
    files,
    replies: replies.map((reply) => Object.fromEntries([...KEPT.map((name) => [name, reply[name]]), ["figures", reply.figures()], ["problem", reply.error?.message]])),
  }));
  try {
    sessionStorage.setItem(NAME, JSON.stringify(kept));
  } catch {
    sessionStorage.removeItem(NAME); // too large: better no history than half of one
  }
}

export function kept() {
  try {
    return JSON.parse(sessionStorage.getItem(NAME) ?? "[]").map((turn) => ({ ...turn, replies: turn.replies.map((one) => Reply.again(one)) }));
  } catch {
    return [];
  }
}
