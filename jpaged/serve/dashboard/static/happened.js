// What happened to the blocks since the last painting, in the colours that their cells flash in.

import { make } from "./palette.js";

// Each kind as pool.js calls it: its colour in the style sheet, what it is called, what it means.
const KINDS = {
  taken: ["take", "taken", "handed out: a sequence needs room for its next tokens"],
  found: ["find", "found in the cache", "kept content that a new request begins with: it is not computed again"],
  shared: ["share", "shared",
    "in one more block table: a sample or a beam forked, or a request begins like one that runs"],
  copied: ["copy", "copied on write", "a sequence was to write to a block it shares: it got a copy"],
  freed: ["drop", "given back", "in no block table any more"],
};

/** [kind, colour] of what cells flash for. */
export const FLASHES = Object.entries(KINDS).map(([kind, [colour]]) => [kind, colour]);

export class Happened {
  constructor(parent) {
    this.parent = parent;
    this.clear();
  }

  /** Nothing happened since this step. */
  clear(step) {
    this.step = step;
    this.forget();
    this.say("No step yet");
  }

  forget() {
    this.first = this.last = 0;
    this.counts = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, 0]));
  }

  note(step, events) {
    const happens = Object.values(events).some((blocks) => blocks.length);
    if (step === this.step && !happens) return; // only text came
    this.step = step;
    this.first ||= step;
    this.last = step;
    for (const kind of Object.keys(KINDS)) this.counts[kind] += events[kind].length;
  }

  /** Says what happened since it was said last, if anything did. */
  paint() {
    if (!this.last) return;
    const [first, last] = [this.first, this.last].map((step) => step.toLocaleString("en"));
    this.say(first === last ? `Step ${last}` : `Steps ${first} to ${last}`);
    this.forget();
  }

  say(steps) {
    const parts = Object.entries(KINDS).map(([kind, [colour, called, title]]) => {
      const count = this.counts[kind];
      const className = `kind ${colour}${count ? " some" : ""}`;
      return make("span", { className, title }, make("strong", {}, count.toLocaleString("en")), ` ${called}`);
    });
    this.parent.replaceChildren(make("strong", {}, steps), ...parts);
  }
}
