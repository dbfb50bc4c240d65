// Small charts of the last two minutes, drawn from the engine's own figures.

import { sized } from "./grid.js";

const EVERY = 500; // milliseconds between two points
const POINTS = 240;

const percent = (value) => `${(100 * value).toFixed(value < 0.1 && value > 0 ? 1 : 0)} %`;
const whole = (value) => Math.round(value).toLocaleString("en");
const over = (a, b) => (b ? a / b : 0);

// Each chart: what it is called, its lines from (stats now, stats before, seconds between, pool),
// and how its values are said. `top` is the least height of its scale.
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
    lines: [["", (now) => over(now.num_blocks - now.num_free_blocks, now.num_blocks)]],
    say: percent,
    top: 1,
  },
  {
    title: "Waste",
    hint: "slots of held blocks that hold no token",
    lines: [["", (now) => over(now.num_waste_slots, usedSlots(now))]],
    say: percent,
    top: 1,
  },
  {
    title: "Saved by sharing",
    hint: "of the blocks it would take not to share",
    lines: [["", (_now, _before, _seconds, pool) => saved(pool)]],
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

function usedSlots(now) {
  return (now.num_blocks - now.num_free_blocks) * now.block_size;
}

function saved(pool) {
  return pool.numLogical ? Math.max(1 - pool.numUsed / pool.numLogical, 0) : 0;
}

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
    this.points = spec.lines.map(() => []);
    const tile = document.createElement("figure");
    const caption = document.createElement("figcaption");
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    this.value = document.createElement("output");
    caption.textContent = spec.title;
    tile.title = spec.hint;
    tile.append(caption, this.value, this.canvas);
    parent.append(tile);
  }

  add(now, before, seconds, pool) {
    const { spec } = this;
    const values = spec.lines.map(([, of]) => of(now, before, seconds, pool));
    values.forEach((value, i) => {
      this.points[i].push(value);
      if (this.points[i].length > POINTS) this.points[i].shift();
    });
    const shown = spec.total ? [spec.total(now)] : values;
    const said = shown.map((value, i) => `${spec.say(value)} ${spec.lines[i][0]}`.trim()).join(", ");
    if (this.value.textContent !== said) {
      this.value.textContent = said;
      this.canvas.setAttribute("aria-label", `${spec.title} (${spec.hint}): ${said}`);
    }
  }

  draw() {
    const width = this.canvas.parentElement.clientWidth;
    if (!width) return;
    const height = 34;
    if (this.width !== width || this.ratio !== window.devicePixelRatio) {
      this.context = sized(this.canvas, width, height);
      this.width = width;
      this.ratio = window.devicePixelRatio;
    }
    const { context } = this;
    context.clearRect(0, 0, width, height);
    const top = Math.max(this.spec.top, ...this.points.flat());
    const style = getComputedStyle(this.canvas);
    this.points.forEach((line, i) => {
      context.beginPath();
      line.forEach((value, k) => {
        const x = width - ((line.length - 1 - k) / (POINTS - 1)) * width;
        const y = height - 2 - (value / top) * (height - 4);
        context.lineTo(x, y);
      });
      context.strokeStyle = style.getPropertyValue(`--line-${i + 1}`);
      context.lineWidth = 1.5;
      context.setLineDash(i ? [4, 3] : []);
      context.stroke();
      if (!i && line.length > 1) this.shade(line, width, height);
    });
  }

  shade(line, width, height) {
    const { context } = this;
    context.lineTo(width, height);
    context.lineTo(width - ((line.length - 1) / (POINTS - 1)) * width, height);
    context.globalAlpha = 0.14;
    context.fillStyle = context.strokeStyle;
    context.fill();
    context.globalAlpha = 1;
  }
}

export class Charts {
  constructor(parent) {
    this.charts = CHARTS.map((spec) => new Chart(spec, parent));
    this.stats = this.pool = this.before = null;
    this.at = 0;
    setInterval(() => this.sample(), EVERY);
  }

  sample() {
    if (!this.stats) return;
    const now = performance.now();
    const seconds = Math.max((now - this.at) / 1000, 0.001);
    const before = this.before ?? this.stats;
    for (const chart of this.charts) {
      chart.add(this.stats, before, seconds, this.pool);
      if (!document.hidden) chart.draw();
    }
    this.before = this.stats;
    this.at = now;
  }
}
