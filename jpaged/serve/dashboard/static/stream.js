// Server-sent events with fetch, because EventSource does not report the server's error messages.

/** Calls fetch, and throws the server's error message. The browser adds the credentials itself. */
export async function fetchChecked(path, options = {}) {
  const response = await fetch(path, { ...options, cache: "no-store" }).catch(throwUnreachable);
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Error(body?.error?.message ?? `the server answered ${response.status}`);
}

/** Replaces a network error, whose text differs between browsers. */
function throwUnreachable(error) {
  throw error.name === "AbortError" ? error : new Error("the server does not answer");
}

/**
 * Yields the events of a stream as {name, data}; each event has one line of data. Throws if nothing
 * arrives for `timeoutMs`, which is how a broken connection shows.
 */
export async function* readEvents(response, timeoutMs = Infinity) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await withTimeout(timeoutMs, reader.read().catch(throwUnreachable));
      if (done) return;
      text += value;
      const parts = text.split("\n\n");
      text = parts.pop();
      for (const part of parts) {
        // `^`, `.` and `$` would treat U+2028 as a line end, and token text may contain it.
        const [, name = "message"] = /(?:^|\n)event: ([^\n]*)/.exec(part) ?? [];
        const [, data] = /(?:^|\n)data: ([^\n]*)/.exec(part) ?? [];
        if (data) yield { name, data };
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // closes the connection
  }
}

function withTimeout(timeoutMs, promise) {
  if (timeoutMs === Infinity) return promise;
  let timer;
  const timeout = new Promise((_, reject) => {
    const error = new Error(`nothing arrived for ${Math.round(timeoutMs / 1000)} seconds`);
    timer = setTimeout(() => reject(error), timeoutMs);
  });
  return Promise.race([promise, timeout]).finally(() => clearTimeout(timer));
}
