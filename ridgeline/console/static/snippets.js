// A request as a command line and as a Python program. The key is a variable: no secret is shown.

import { info } from "console/api.js";

const address = () => info.api_url.replace(/\/\/(0\.0\.0\.0|\[::\])/, `//${location.hostname}`) || location.origin;
const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

export function curl(body, needsKey) {
  const key = needsKey ? ` \\\n  -H "Authorization: Bearer $RIDGELINE_API_KEY"` : "";
  return `curl ${address()}/v1/chat/completions${key} \\\n  -H 'Content-Type: application/json' \\\n  -d ${quoted(JSON.stringify(body, null, 2))}\n`;
}

export function python(body, needsKey) {
  const key = needsKey ? `os.environ["RIDGELINE_API_KEY"]` : `"none"`;
  const fields = Object.entries(body).map(([name, value]) => `    ${name}=${literal(value, 1)},\n`);
  return `${needsKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${address()}/v1", api_key=${key})
stream = client.chat.completions.create(
${fields.join("")}    stream=True,
)
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        print(chunk.choices[0].delta.content, end="", flush=True)
`;
}

function literal(value, depth) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const pad = "    ".repeat(depth + 1);
  const end = "    ".repeat(depth);
  const list = Array.isArray(value);
  const parts = list
    ? value.map((one) => pad + literal(one, depth + 1))
    : Object.entries(value).map(([name, one]) => `${pad}${JSON.stringify(name)}: ${literal(one, depth + 1)}`);
  if (!parts.length) return list ? "[]" : "{}";
  return `${list ? "[" : "{"}\n${parts.join(",\n")},\n${end}${list ? "]" : "}"}`;
}
