// Small charts of the last two minutes, drawn from the engine's own figures.

import { sized } from "./palette.js";

const SPAN = 120_000; // milliseconds that the charts show
const HEIGHT = 34; // CSS pixels

const percent = (value) => `${(100 * value).toFixed(value < 0.1 && value > 0 ? 1 : 0)} %`;
const whole = (value) => Math.round(value).toLocaleString("en");
const over = (a, b) => (b ? a / b : 0);

// Each chart: what it is called, its lines, each named, from (stats now, stats before, seconds
// between), or its one line from the pool as it is `shown`, and how its values are said. `top` is the
// least height of its scale.
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
    say: percent,
    top: 1,
  },
  {
    title: "Waste",
    hint: "slots of held blocks that hold no token",
    shown: (pool) => over(pool.numWasted, pool.numUsed * pool.blockSize),
    say: percent,
    top: 1,
  },
  {
    title: "Sharing saves",
    hint: "of the blocks it would take not to share",
    shown: (pool) => Math.max(over(pool.numLogical - pool.numUsed, pool.numLogical), 0),
    say: percent,
    top: 1,
  },
  {
    title: "Tokens a second",
    hint: "generated",
    lines: [["", rate("num_generated_tokens")]],
    say: whole,
    top: 10,
  },
  {
    title: "Prefix hits",
    hint: "tokens found in the prefix cache, of those looked up",
    lines: [["", hits]],
    say: percent,
    top: 1,
  },
  {
    title: "Preemptions",
    hint: "requests that gave way to others, in all",
    lines: [["", growth("num_preemptions")]],
    say: whole,
    total: (now) => now.num_preemptions,
    top: 2,
  },
  {
    title: "Copies on write",
    hint: "blocks copied since others share them, in all",
    lines: [["", growth("num_block_copies")]],
    say: whole,
    total: (now) => now.num_block_copies,
    top: 2,
  },
];

function growth(name) {
  return (now, before) => now[name] - before[name];
}

function rate(name) {
  return (now, before, seconds) => (now[name] - before[name]) / seconds;
}

function hits(now, before) {
  const queries = now.prefix_cache_queries - before.prefix_cache_queries;
  if (queries) return (now.prefix_cache_hits - before.prefix_cache_hits) / queries;
  return over(now.prefix_cache_hits, now.prefix_cache_queries);
}

class Chart {
  constructor(spec, parent) {
    this.spec = spec;
    this.points = []; // {at, values}, and null where the line is broken
    const tile = document.createElement("figure");
    const caption = document.createElement("figcaption");
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    this.value = document.createElement("p");
    this.lines = spec.lines ?? [["", spec.shown]];
    this.said = this.lines.map(([name], i) => {
      const part = document.createElement("span");
      if (name) part.className = `line-${i + 1}`;
      return part;
    });
    this.value.append(...this.said);
    caption.textContent = spec.title;
    tile.title = spec.hint;
    tile.append(caption, this.value, this.canvas);
    parent.append(tile);
  }

  add({ stats, at }, from, pool) {
    const { spec, points } = this;
    const seconds = Math.max((at - from.at) / 1000, 0.001);
    const given = spec.shown ? [pool] : [stats, from.stats, seconds];
    const values = this.lines.map(([, of]) => of(...given));
    points.push({ at, values });
    while (!points[0] || points[0].at < at - SPAN) points.shift();
    this.say(spec.total ? [spec.total(stats)] : values);
  }

  say(values) {
    const { spec } = this;
    const said = values.map((value, i) => `${spec.say(value)} ${this.lines[i][0]}`.trim());
    if (this.value.textContent === said.join("")) return;
    said.forEach((text, i) => (this.said[i].textContent = text));
    this.canvas.setAttribute("aria-label", `${spec.title} (${spec.hint}): ${said.join(", ")}`);
  }

  draw() {
    const width = this.canvas.parentElement.clientWidth;
    const last = this.points.at(-1);
    if (!width || !last) return;
    const height = HEIGHT;
    if (this.width !== width || this.ratio !== window.devicePixelRatio) {
      this.context = sized(this.canvas, width, height);
      this.width = width;
      this.ratio = window.devicePixelRatio;
    }
    this.context.clearRect(0, 0, width, height);
    const top = Math.max(this.spec.top, ...this.points.flatMap((point) => point?.values ?? []));
    const style = getComputedStyle(this.canvas);
    const place = (point, i) => [
      width - ((last.at - point.at) / SPAN) * width,
      height - 2 - (point.values[i] / top) * (height - 4),
    ];
    // The first line is drawn last, so that it is on top.
    for (let i = last.values.length - 1; i >= 0; i--) {
      this.context.strokeStyle = style.getPropertyValue(`--line-${i + 1}`);
      this.context.lineWidth = 1.5;
      this.context.setLineDash(i ? [4, 3] : []);
      for (const part of this.parts()) this.drawLine(part.map((point) => place(point, i)), !i);
    }
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

  drawLine(places, isShaded) {
    const { context } = this;
    context.beginPath();
    for (const [x, y] of places) context.lineTo(x, y);
    context.stroke();
    if (!isShaded) return;
    context.lineTo(places.at(-1)[0], HEIGHT);
    context.lineTo(places[0][0], HEIGHT);
    context.globalAlpha = 0.14;
    context.fillStyle = context.strokeStyle;
    context.fill();
    context.globalAlpha = 1;
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
    this.schedule();
  }

  /** What is said of the pool is true of each picture of it. */
  say(pool) {
    for (const chart of this.charts) {
      const { shown } = chart.spec;
      if (shown) chart.say([shown(pool)]);
    }
  }

  /** What comes next does not follow on what was. */
  cut() {
    if (this.before) for (const chart of this.charts) chart.points.push(null);
    this.before = null;
  }

  schedule() {
    this.pending ||= requestAnimationFrame(() => {
      this.pending = 0;
      for (const chart of this.charts) chart.draw();
    });
  }
}
