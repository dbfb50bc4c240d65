// Server-sent events through fetch: unlike EventSource, it tells why there are none.

/** fetch; throws what the server says in place of an answer. Keys are the browser's business. */
export async function ask(path, options = {}) {
  const response = await fetch(path, { ...options, cache: "no-store" }).catch(notThere);
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  throw new Error(said?.error?.message ?? `the server answered ${response.status}`);
}

/** Of a server that is not there, each browser has words of its own. */
function notThere(error) {
  throw error.name === "AbortError" ? error : new Error("the server does not answer");
}

/**
 * The events of a stream as they come: {name, data}, each of one line of data. Throws if nothing at
 * all comes for so many milliseconds, as of a line that is cut without either end being told.
 */
export async function* events(response, patience = Infinity) {
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
        // Not `^`, `.` and `$`: for these U+2028 ends a line too, and the text of tokens may have it.
        const [, name = "message"] = /(?:^|\n)event: ([^\n]*)/.exec(part) ?? [];
        const [, data] = /(?:^|\n)data: ([^\n]*)/.exec(part) ?? [];
        if (data) yield { name, data };
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // a reader that stops hangs up
  }
}

function within(milliseconds, promise) {
  if (milliseconds === Infinity) return promise;
  let timer;
  const silence = new Promise((_, reject) => {
    const error = new Error(`nothing came for ${Math.round(milliseconds / 1000)} seconds`);
    timer = setTimeout(() => reject(error), milliseconds);
  });
  return Promise.race([promise, silence]).finally(() => clearTimeout(timer));
}
