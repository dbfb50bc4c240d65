// Server-sent events through fetch: unlike EventSource, it can send the key in a header.

let key = ""; // in this page's memory only

export function setKey(value) {
  key = value;
}

/** fetch with the API key; throws an `AskForKey` where the server wants another one. */
export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.status === 401) throw new AskForKey();
  if (!response.ok) throw new Error(await reasonOf(response));
  return response;
}

export class AskForKey extends Error {
  constructor() {
    super(key ? "the server does not accept this key" : "the server asks for its API key");
  }
}

async function reasonOf(response) {
  try {
    const { error } = await response.json();
    return error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

/** The events of a stream as they come: {name, data}. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      text += value;
      const parts = text.split("\n\n");
      text = parts.pop();
      for (const part of parts) {
        const event = parse(part);
        if (event) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // whoever stops listening hangs up
  }
}

function parse(part) {
  let name = "message";
  const data = [];
  for (const line of part.split("\n")) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
  }
  return data.length ? { name, data: data.join("\n") } : null;
}
