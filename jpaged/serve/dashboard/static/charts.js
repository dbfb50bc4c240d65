// Small charts of the last two minutes, drawn from the engine's own figures.

import { make } from "./palette.js";

const SPAN = 120_000; // milliseconds that the charts show
const HEIGHT = 34; // CSS pixels

const percent = (value) => `${(100 * value).toFixed(value < 0.1 && value > 0 ? 1 : 0)} %`;
const whole = (value) => Math.round(value).toLocaleString("en");
const over = (a, b) => (b ? a / b : 0);

// Each chart: what it is called, and its line: `shown` of the pool as it is shown, or `of` (stats
// now, stats before, seconds between), or how much a `total` grows; or several lines of stats, each
// named. `say` puts values in words, and `top` is the least height of the scale.
const CHARTS = [
  {
    title: "Requests",
    hint: "in the batch, waiting for a place in it, and those of the waiting that are in host memory",
    lines: [
      ["running", (now) => now.num_running],
      ["waiting", (now) => now.num_waiting],
      ["swapped", (now) => now.num_swapped],
    ],
    say: whole,
    top: 4,
  },
  {
    title: "Blocks in use",
    hint: "held by sequences and pins, of all",
    shown: (pool) => over(pool.numUsed, pool.numBlocks - 1),
  },
  {
    title: "Waste",
    hint: "slots of held blocks that hold no token",
    shown: (pool) => over(pool.numWasted, pool.numUsed * pool.blockSize),
  },
  {
    title: "Sharing saves",
    hint: "of the blocks it would take not to share",
    shown: (pool) => Math.max(over(pool.numLogical - pool.numUsed, pool.numLogical), 0),
  },
  {
    title: "Tokens a second",
    hint: "generated",
    of: (now, before, seconds) => (now.num_generated_tokens - before.num_generated_tokens) / seconds,
    say: whole,
    top: 10,
  },
  {
    title: "Prefix hits",
    hint: "tokens found in the prefix cache, of those looked up",
    of: hits,
  },
  {
    title: "Preemptions",
    hint: "requests that gave way to others, in all",
    total: "num_preemptions",
    say: whole,
    top: 2,
  },
  {
    title: "Copies on write",
    hint: "blocks copied since others share them, in all",
    total: "num_block_copies",
    say: whole,
    top: 2,
  },
];

function hits(now, before) {
  const queries = now.prefix_cache_queries - before.prefix_cache_queries;
  if (queries) return (now.prefix_cache_hits - before.prefix_cache_hits) / queries;
  return over(now.prefix_cache_hits, now.prefix_cache_queries);
}

function svg(name, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

class Chart {
  constructor({ title, hint, lines, shown, of, total, say = percent, top = 1 }, parent) {
    Object.assign(this, { title, hint, shown, total, sayValue: say, top });
    this.lines = lines ?? [["", shown ?? of ?? ((now, before) => now[total] - before[total])]];
    this.points = []; // {at, values}, and null where the line is broken
    this.said = this.lines.map(([name], i) => make("span", { className: name && `line-${i + 1}` }));
    this.curves = this.lines.map((_, i) => svg("path", { class: `curve-${i + 1}` }));
    this.area = svg("path", { class: "area" }); // under the first curve
    this.drawing = svg("svg", { role: "img", viewBox: `0 0 ${SPAN} ${HEIGHT}`, preserveAspectRatio: "none" });
    this.drawing.append(this.area, ...[...this.curves].reverse()); // the first one on top
    const caption = make("figcaption", {}, title);
    parent.append(make("figure", { title: hint }, caption, make("p", {}, ...this.said), this.drawing));
  }

  add({ stats, at }, from, pool) {
    const seconds = Math.max((at - from.at) / 1000, 0.001);
    const given = this.shown ? [pool] : [stats, from.stats, seconds];
    const values = this.lines.map(([, of]) => of(...given));
    this.points.push({ at, values });
    while (!this.points[0] || this.points[0].at < at - SPAN) this.points.shift();
    this.say(this.total ? [stats[this.total]] : values);
  }

  say(values) {
    const said = values.map((value, i) => `${this.sayValue(value)} ${this.lines[i][0]}`.trim());
    this.said.forEach((part, i) => (part.textContent = said[i]));
    this.drawing.setAttribute("aria-label", `${this.title} (${this.hint}): ${said.join(", ")}`);
  }

  draw() {
    const last = this.points.at(-1);
    if (!last) return;
    const top = Math.max(this.top, ...this.points.flatMap((point) => point?.values ?? []));
    const x = (point) => SPAN - (last.at - point.at);
    const y = (value) => HEIGHT - 2 - (value / top) * (HEIGHT - 4);
    const along = (part, i) => part.map((point) => `${x(point)} ${y(point.values[i])}`).join("L");
    const parts = this.parts();
    this.curves.forEach((curve, i) => {
      curve.setAttribute("d", parts.map((part) => `M${along(part, i)}`).join(""));
    });
    const down = (part) => `M${x(part[0])} ${HEIGHT}L${along(part, 0)}L${x(part.at(-1))} ${HEIGHT}Z`;
    this.area.setAttribute("d", parts.map(down).join(""));
  }

  /** The points between two breaks. */
  parts() {
    const parts = [[]];
    for (const point of this.points) {
      if (point) parts.at(-1).push(point);
      else parts.push([]);
    }
    return parts.filter((part) => part.length);
  }
}

export class Charts {
  constructor(parent) {
    this.charts = CHARTS.map((spec) => new Chart(spec, parent));
    this.before = null;
  }

  /** One more point: the engine's `stats` `at` a time, in milliseconds, and the pool then. */
  add(moment, pool) {
    const { before } = this;
    // Of an engine that began anew there is nothing to compare with.
    const follows = before && before.stats.num_steps <= moment.stats.num_steps;
    for (const chart of this.charts) chart.add(moment, follows ? before : moment, pool);
    this.before = moment;
    this.pending ||= requestAnimationFrame(() => {
      this.pending = 0;
      for (const chart of this.charts) chart.draw();
    });
  }

  /** What is said of the pool is true of each picture of it. */
  say(pool) {
    for (const chart of this.charts) if (chart.shown) chart.say([chart.shown(pool)]);
  }

  /** What comes next does not follow on what was. */
  cut() {
    if (this.before) for (const chart of this.charts) chart.points.push(null);
    this.before = null;
  }
}
