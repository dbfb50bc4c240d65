// Counts what happened to blocks since the last rendering, in the colours in which cells flash.

import { createElement } from "./palette.js";

// For each kind of event in pool.js: its colour in the style sheet, its label and its meaning.
const EVENT_KINDS = {
  taken: ["take", "taken", "allocated, because a sequence needs slots for its next tokens"],
  found: ["find", "found in the cache", "part of a cached prefix of a new request, which is not computed again"],
  shared: ["share", "shared",
    "in one more block table, because a sample or beam forked, or requests have a common prefix"],
  copied: ["copy", "copied on write", "replaced by a copy before a sequence wrote to a shared block"],
  freed: ["drop", "given back", "freed, because no block table contains the block any more"],
};

/** Pairs of an event kind and the colour in which cells flash. */
export const FLASHES = Object.entries(EVENT_KINDS).map(([kind, [colour]]) => [kind, colour]);

export class EventCounts {
  constructor(parent) {
    this.parent = parent;
    this.clear();
  }

  /** Resets all counts; later events follow this step. */
  clear(step) {
    this.step = step;
    this.reset();
    this.showCounts("No step yet");
  }

  reset() {
    this.first = this.last = 0;
    this.counts = Object.fromEntries(Object.keys(EVENT_KINDS).map((kind) => [kind, 0]));
  }

  record(step, events) {
    const hasEvents = Object.values(events).some((blocks) => blocks.length);
    if (step === this.step && !hasEvents) return; // only text arrived
    this.step = step;
    this.first ||= step;
    this.last = step;
    for (const kind of Object.keys(EVENT_KINDS)) this.counts[kind] += events[kind].length;
  }

  /** Shows and resets the counts, if anything was recorded since the last call. */
  render() {
    if (!this.last) return;
    const [first, last] = [this.first, this.last].map((step) => step.toLocaleString("en"));
    this.showCounts(first === last ? `Step ${last}` : `Steps ${first} to ${last}`);
    this.reset();
  }

  showCounts(steps) {
    const parts = Object.entries(EVENT_KINDS).map(([kind, [colour, label, title]]) => {
      const count = this.counts[kind];
      const className = `kind ${colour}${count ? " some" : ""}`;
      const number = createElement("strong", {}, count.toLocaleString("en"));
      return createElement("span", { className, title }, number, ` ${label}`);
    });
    this.parent.replaceChildren(createElement("strong", {}, steps), ...parts);
  }
}
