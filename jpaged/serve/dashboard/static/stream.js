// Server-sent events through fetch: unlike EventSource, it tells why there are none.

/** fetch; throws what the server says in place of an answer. Keys are the browser's business. */
export async function ask(path, options = {}) {
  const response = await fetch(path, { ...options, cache: "no-store" }).catch(notThere);
  if (!response.ok) throw new Error(await reasonOf(response));
  return response;
}

async function reasonOf(response) {
  try {
    const { error } = await response.json();
    return error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

/** Of a server that is not there, each browser has words of its own. */
function notThere(error) {
  throw error.name === "AbortError" ? error : new Error("the server does not answer");
}

/**
 * The events of a stream as they come: {name, data}. Throws if nothing at all comes for so many
 * milliseconds, as of a line that is cut without either end being told.
 */
export async function* events(response, patience = 0) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await within(patience, reader.read().catch(notThere));
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

function within(milliseconds, promise) {
  if (!milliseconds) return promise;
  let timer;
  const silence = new Promise((_, reject) => {
    const error = new Error(`nothing came for ${Math.round(milliseconds / 1000)} seconds`);
    timer = setTimeout(() => reject(error), milliseconds);
  });
  return Promise.race([promise, silence]).finally(() => clearTimeout(timer));
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
