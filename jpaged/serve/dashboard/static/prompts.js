// The form that sends prompts, and the answers as they arrive.

import { createElement } from "./palette.js";
import { fetchChecked, readEvents } from "./stream.js";
import { converse } from "./tools.js";

const MAX_CARDS = 40;
const SYSTEM =
  "You are a careful assistant who knows a small world: sums, sorting, reversing, spelling and " +
  "counting. Answer shortly.\n";

// The name of each preset says what it shows; the numbers are fields of the form.
const PRESETS = [
  { name: "One answer: blocks are allocated one by one", prompts: ["Count from 1 to 60"], tokens: 240 },
  {
    name: "Four samples: they share the prompt, and its last block is copied on write",
    prompts: ["Sort 41, 7, 32, 15, 93 and 4"],
    samples: 4,
    tokens: 96,
    heat: 2,
  },
  {
    name: "Beam search: beams fork, share blocks, and free blocks when they end",
    prompts: ["Write the numbers seventeen plus twenty-five and more"],
    beams: 4,
    tokens: 64,
  },
  {
    name: "One beginning, four ends: the common prefix is computed once",
    prompts: [
      `${SYSTEM}What is 17 + 25?`,
      `${SYSTEM}Spell strawberry`,
      `${SYSTEM}Reverse stone`,
      `${SYSTEM}Count from 1 to 20`,
    ],
    tokens: 64,
  },
  {
    name: "A crowd: sixteen requests at the same time",
    prompts: Array.from({ length: 16 }, (_, i) => `Count from ${i + 1} to ${i + 60}`),
    tokens: 240,
  },
  {
    name: "A calculator: the model calls a tool, and its next request reuses the prefix",
    prompts: ["What is 48273 * 9164?"],
    tokens: 128,
    tools: true,
  },
];

export class Prompts {
  /** `element(id)` returns the element with this id. */
  constructor(element) {
    this.element = element;
    this.running = new Set(); // AbortControllers of running requests
    this.cards = [];
    const preset = element("preset");
    PRESETS.forEach(({ name }, i) => preset.append(new Option(name, String(i))));
    preset.addEventListener("change", () => this.fill(PRESETS[preset.value]));
    element("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    element("stop").addEventListener("click", () => this.stopAll());
    this.fill(PRESETS[0]);
  }

  /** Gives each answer the colour of its request's blocks. */
  updateColours(pool, palette) {
    for (const card of this.cards) card.updateColours(pool, palette);
  }

  fill({ prompts, samples = 1, beams = 0, tokens = 64, heat = 0 }) {
    this.element("prompt").value = prompts.join("\n---\n");
    for (const [id, value] of Object.entries({ samples, beams, tokens, heat })) {
      this.element(id).value = value;
    }
  }

  /**
   * Sends all prompts as one request, because browsers limit the connections to a server. With tools,
   * each prompt starts a separate conversation.
   */
  send() {
    const number = (id) => Number(this.element(id).value);
    const beams = number("beams");
    const prompts = this.element("prompt").value.split(/\n---\n/);
    if (PRESETS[this.element("preset").value].tools) {
      const options = { max_tokens: number("tokens"), temperature: number("heat") };
      for (const prompt of prompts) {
        this.run({ n: 1 }, [prompt], (_, card, signal) =>
          converse(prompt, options, signal, (text, id) => card.appendText(text, id)),
        );
      }
      return;
    }
    const body = { prompt: prompts.length > 1 ? prompts : prompts[0], max_tokens: number("tokens") };
    if (beams > 0) Object.assign(body, { use_beam_search: true, beam_width: beams, n: beams, temperature: 0 });
    else Object.assign(body, { temperature: number("heat"), n: number("samples"), stream: true });
    this.run(body, prompts);
  }

  stopAll() {
    for (const controller of this.running) controller.abort();
  }

  async run(body, prompts, complete = this.complete) {
    const controller = new AbortController();
    this.running.add(controller);
    const card = new AnswerCard(this.element("answers"), prompts, body.n, () => controller.abort());
    this.cards = [...this.cards.slice(1 - MAX_CARDS), card];
    this.element("stop").disabled = false;
    try {
      await complete(body, card, controller.signal);
      card.end("done");
    } catch (error) {
      card.end(controller.signal.aborted ? "stopped" : error.message);
    } finally {
      this.running.delete(controller);
      this.element("stop").disabled = !this.running.size;
    }
  }

  async complete(body, card, signal) {
    const response = await fetchChecked("v1/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
    if (!body.stream) {
      card.add(await response.json());
      return;
    }
    for await (const { data } of readEvents(response)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      card.add(chunk);
    }
    throw new Error("the stream ended before the answer");
  }
}

/** The prompts of one request, and their answers. */
class AnswerCard {
  constructor(parent, prompts, n, onStop) {
    this.n = n;
    this.parts = prompts.map((prompt) => {
      const answers = Array.from({ length: n }, () => createElement("pre"));
      const question = createElement("p", { className: "question" }, prompt);
      return { root: createElement("div", { className: "asked" }, question, ...answers), answers };
    });
    this.state = createElement("span", {}, "waiting");
    const ariaLabel = `Stop: ${prompts[0].slice(0, 40)}`;
    this.button = createElement("button", { type: "button", ariaLabel }, "Stop");
    this.button.addEventListener("click", onStop);
    const footer = createElement("p", { className: "foot" }, this.state, this.button);
    parent.prepend(createElement("article", {}, ...this.parts.map(({ root }) => root), footer));
    while (parent.children.length > MAX_CARDS) parent.lastElementChild.remove();
  }

  /** Sets the colours. The engine has one request per prompt, named after the HTTP request. */
  updateColours(pool, palette) {
    if (!this.id) return;
    this.parts.forEach((part, i) => {
      const number = pool.requests.get(`${this.id}-${i}`);
      if (number) part.root.style.borderLeftColor = palette.requestColour(number);
    });
  }

  add({ id, choices }) {
    this.id = id;
    this.state.textContent = "answering";
    for (const { index, text } of choices) {
      const answer = this.parts[Math.floor(index / this.n)]?.answers[index % this.n];
      if (answer) answer.append(answer.textContent ? text : text.trimStart());
    }
  }

  /** Appends text of a conversation. The colour is that of the conversation's last request. */
  appendText(text, id = this.id) {
    this.id = id;
    this.state.textContent = "answering";
    this.parts[0].answers[0].append(text);
  }

  end(how) {
    this.state.textContent = how;
    this.button.remove();
  }
}
