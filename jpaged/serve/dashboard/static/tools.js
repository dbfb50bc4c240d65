// A calculator tool for the model: the page runs each call and sends the result back.

import { fetchChecked, readEvents } from "./stream.js";

const MAX_MESSAGES = 8;
const CALCULATOR = {
  type: "function",
  function: {
    name: "calculator",
    description: "Compute an arithmetic expression.",
    parameters: {
      type: "object",
      properties: { expression: { type: "string" } },
      required: ["expression"],
    },
  },
};

/**
 * Sends a question and runs tool calls until the model answers. `onText(text, id)` gets each chunk of
 * text as it arrives, with the id of its request.
 */
export async function converse(question, options, signal, onText) {
  const messages = [{ role: "user", content: question }];
  for (let i = 0; i < MAX_MESSAGES; i++) {
    const message = await requestMessage({ ...options, messages }, signal, onText);
    messages.push(message);
    if (!message.tool_calls) return;
    for (const { id, function: call } of message.tool_calls) {
      const content = runTool(call);
      onText(`\nresult: ${content}\n`);
      messages.push({ role: "tool", tool_call_id: id, content });
    }
  }
}

/** Requests one message from the model, and passes its text to `onText` as it arrives. */
async function requestMessage(body, signal, onText) {
  const response = await fetchChecked("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, tools: [CALCULATOR], stream: true }),
    signal,
  });
  const message = { role: "assistant", content: "" };
  const calls = [];
  for await (const { data } of readEvents(response)) {
    if (data === "[DONE]") return calls.length ? { ...message, tool_calls: calls } : message;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    for (const { delta } of chunk.choices) {
      if (delta.content) onText(delta.content, chunk.id);
      message.content += delta.content ?? "";
      for (const { index, id, function: more } of delta.tool_calls ?? []) {
        if (id) {
          calls[index] = { id, type: "function", function: { name: more.name, arguments: "" } };
          onText(`call: ${more.name} `, chunk.id);
        }
        calls[index].function.arguments += more.arguments ?? "";
        onText(more.arguments ?? "", chunk.id);
      }
    }
  }
  throw new Error("the stream ended before the answer");
}

/** Runs a tool call and returns its result. An invalid call returns an error text for the model. */
function runTool({ name, arguments: text }) {
  try {
    if (name !== CALCULATOR.function.name) throw new Error(`there is no tool ${name}`);
    return String(calculate(String(JSON.parse(text).expression)));
  } catch (error) {
    return `Error: ${error.message}`;
  }
}

/** Computes an expression of numbers, + - * / and parentheses; throws if it has anything else. */
export function calculate(text) {
  const tokens = text.match(/\d+(\.\d+)?|\S/g) ?? [];
  let at = 0;
  const accept = (...signs) => signs.includes(tokens[at]) && tokens[at++];
  const syntaxError = () => new Error("only numbers, + - * / and parentheses can be computed");

  function sum() {
    let value = product();
    for (let sign; (sign = accept("+", "-")); ) value += sign === "+" ? product() : -product();
    return value;
  }
  function product() {
    let value = signed();
    for (let sign; (sign = accept("*", "/")); ) {
      const by = signed();
      if (sign === "/" && !by) throw new Error("division by zero");
      value = sign === "*" ? value * by : value / by;
    }
    return value;
  }
  function signed() {
    if (accept("-")) return -signed();
    if (accept("+")) return signed();
    if (accept("(")) {
      const value = sum();
      if (!accept(")")) throw syntaxError();
      return value;
    }
    if (!/^\d/.test(tokens[at] ?? "")) throw syntaxError();
    return Number(tokens[at++]);
  }

  if (text.length > 200) throw new Error("the expression has more than 200 characters");
  const value = sum();
  if (at < tokens.length) throw syntaxError();
  return Number.isSafeInteger(value) ? value : Number(value.toPrecision(10));
}
