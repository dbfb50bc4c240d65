// A calculator that the model may call: each call is run here, and its result goes back.

import { ask, events } from "./stream.js";

const MAX_TURNS = 8;
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
 * Puts a question, runs what is called, and goes on until the model answers. `tell(text, id)` gets
 * each piece as it comes, with the id of the request that it belongs to.
 */
export async function converse(question, options, signal, tell) {
  const messages = [{ role: "user", content: question }];
  for (let turn = 0; turn < MAX_TURNS; turn++) {
    const message = await answer({ ...options, messages }, signal, tell);
    messages.push(message);
    if (!message.tool_calls) return;
    for (const { id, function: called } of message.tool_calls) {
      const content = run(called);
      tell(`\nresult: ${content}\n`);
      messages.push({ role: "tool", tool_call_id: id, content });
    }
  }
}

/** One message of the model, told as it comes. */
async function answer(body, signal, tell) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, tools: [CALCULATOR], stream: true }),
    signal,
  });
  const message = { role: "assistant", content: "" };
  const calls = [];
  for await (const { data } of events(response)) {
    if (data === "[DONE]") return calls.length ? { ...message, tool_calls: calls } : message;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    for (const { delta } of chunk.choices) {
      if (delta.content) tell(delta.content, chunk.id);
      message.content += delta.content ?? "";
      for (const { index, id, function: more } of delta.tool_calls ?? []) {
        if (id) {
          calls[index] = { id, type: "function", function: { name: more.name, arguments: "" } };
          tell(`call: ${more.name} `, chunk.id);
        }
        calls[index].function.arguments += more.arguments ?? "";
        tell(more.arguments ?? "", chunk.id);
      }
    }
  }
  throw new Error("the answer broke off");
}

/** What the calculator says to a call; of one that is none, the mistake, for the model to see. */
function run({ name, arguments: text }) {
  try {
    if (name !== CALCULATOR.function.name) throw new Error(`there is no tool ${name}`);
    return String(calculate(String(JSON.parse(text).expression)));
  } catch (error) {
    return `Error: ${error.message}`;
  }
}

/** The value of an expression of numbers, + - * / and parentheses; throws at anything else. */
export function calculate(text) {
  const tokens = text.match(/\d+(\.\d+)?|\S/g) ?? [];
  let at = 0;
  const takes = (...signs) => signs.includes(tokens[at]) && tokens[at++];
  const mistake = () => new Error("only numbers, + - * / and parentheses can be computed");

  function sum() {
    let value = product();
    for (let sign; (sign = takes("+", "-")); ) value += sign === "+" ? product() : -product();
    return value;
  }
  function product() {
    let value = signed();
    for (let sign; (sign = takes("*", "/")); ) {
      const by = signed();
      if (sign === "/" && !by) throw new Error("division by zero");
      value = sign === "*" ? value * by : value / by;
    }
    return value;
  }
  function signed() {
    if (takes("-")) return -signed();
    if (takes("+")) return signed();
    if (takes("(")) {
      const value = sum();
      if (!takes(")")) throw mistake();
      return value;
    }
    if (!/^\d/.test(tokens[at] ?? "")) throw mistake();
    return Number(tokens[at++]);
  }

  if (text.length > 200) throw new Error("the expression has more than 200 characters");
  const value = sum();
  if (at < tokens.length) throw mistake();
  return Number.isSafeInteger(value) ? value : Number(value.toPrecision(10));
}
