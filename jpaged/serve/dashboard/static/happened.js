// What happened to the blocks since the last painting, in the colours that their cells flash in.

// Each kind as pool.js calls it, its colour in the style sheet, what it is called and what it means.
const KINDS = [
  ["taken", "take", "taken", "handed out: a sequence needs room for its next tokens"],
  [
    "found",
    "find",
    "found in the cache",
    "kept content that a new request begins with: it is not computed again",
  ],
  [
    "shared",
    "share",
    "shared",
    "in one more block table: a sample or a beam forked, or a request begins like one that runs",
  ],
  ["copied", "copy", "copied on write", "a sequence was to write to a block it shares: it got a copy"],
  ["freed", "drop", "given back", "in no block table any more"],
];

/** [kind, colour] of what cells flash for. */
export const FLASHES = KINDS.map(([kind, colour]) => [kind, colour]);

export class Happened {
  constructor(parent) {
    this.steps = document.createElement("strong");
    this.parts = new Map();
    parent.replaceChildren(this.steps);
    for (const [kind, colour, title, hint] of KINDS) {
      const part = document.createElement("span");
      part.className = `kind ${colour}`;
      part.title = hint;
      const count = document.createElement("strong");
      part.append(count, ` ${title}`);
      parent.append(part);
      this.parts.set(kind, { part, count });
    }
    this.clear();
  }

  /** Nothing happened yet. */
  clear() {
    this.forget();
    this.say("No step yet");
  }

  forget() {
    this.first = this.last = 0;
    this.counts = new Map(KINDS.map(([kind]) => [kind, 0]));
  }

  note(step, events) {
    this.first ||= step;
    this.last = step;
    for (const [kind, count] of this.counts) this.counts.set(kind, count + events[kind].length);
  }

  /** Says what happened since it was said last, if anything did. */
  paint() {
    if (!this.last) return;
    const [first, last] = [this.first, this.last].map((step) => step.toLocaleString("en"));
    this.say(first === last ? `Step ${last}` : `Steps ${first} to ${last}`);
    this.forget();
  }

  say(steps) {
    this.steps.textContent = steps;
    for (const [kind, { part, count }] of this.parts) {
      count.textContent = this.counts.get(kind).toLocaleString("en");
      part.classList.toggle("some", this.counts.get(kind) > 0);
    }
  }
}
