// Small charts of the last two minutes, drawn from the statistics of the engine.

import { createElement } from "./palette.js";

const SPAN_MS = 120_000;
const HEIGHT_PX = 34;

const formatPercent = (value) => `${(100 * value).toFixed(value < 0.1 && value > 0 ? 1 : 0)} %`;
const formatInteger = (value) => Math.round(value).toLocaleString("en");
const ratio = (a, b) => (b ? a / b : 0);

// Each chart has a title, a hint and a curve. The curve's value is `poolValue(pool)`,
// `statsValue(now, before, seconds)`, or the increase of the statistic that `total` names. `lines`
// has several named curves. `format` writes a value as text, and the scale ends at `minScale` or more.
const CHARTS = [
  {
    title: "Requests",
    hint: "running, waiting, and waiting with KV in host memory",
    lines: [
      ["running", (now) => now.num_running],
      ["waiting", (now) => now.num_waiting],
      ["swapped", (now) => now.num_swapped],
    ],
    format: formatInteger,
    minScale: 4,
  },
  {
    title: "Blocks in use",
    hint: "fraction of the blocks that sequences and pins hold",
    poolValue: (pool) => ratio(pool.numUsed, pool.numBlocks - 1),
  },
  {
    title: "Waste",
    hint: "fraction of empty slots in the blocks in use",
    poolValue: (pool) => ratio(pool.numWasted, pool.numUsed * pool.blockSize),
  },
  {
    title: "Sharing saves",
    hint: "fraction of the blocks that would be needed without sharing",
    poolValue: (pool) => Math.max(ratio(pool.numLogical - pool.numUsed, pool.numLogical), 0),
  },
  {
    title: "Tokens per second",
    hint: "generated tokens of all requests",
    statsValue: (now, before, seconds) => (now.num_generated_tokens - before.num_generated_tokens) / seconds,
    format: formatInteger,
    minScale: 10,
  },
  {
    title: "Prefix hits",
    hint: "fraction of the looked-up tokens that the prefix cache contained",
    statsValue: prefixHitRate,
  },
  {
    title: "Accepted drafts",
    hint: "fraction of the drafts of speculative decoding that were accepted",
    statsValue: acceptanceRate,
  },
  {
    title: "Preemptions",
    hint: "total number of preemptions",
    total: "num_preemptions",
    format: formatInteger,
    minScale: 2,
  },
  {
    title: "Copy-on-write",
    hint: "total number of shared blocks copied before a write",
    total: "num_block_copies",
    format: formatInteger,
    minScale: 2,
  },
];

function prefixHitRate(now, before) {
  const queries = now.prefix_cache_queries - before.prefix_cache_queries;
  if (queries) return (now.prefix_cache_hits - before.prefix_cache_hits) / queries;
  return ratio(now.prefix_cache_hits, now.prefix_cache_queries);
}

function acceptanceRate(now, before) {
  const drafts = now.num_draft_tokens - before.num_draft_tokens;
  if (drafts) return (now.num_accepted_tokens - before.num_accepted_tokens) / drafts;
  return ratio(now.num_accepted_tokens, now.num_draft_tokens);
}

function createSvg(name, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

class Chart {
  constructor({ title, hint, lines, poolValue, statsValue, total, format = formatPercent, minScale = 1 }, parent) {
    Object.assign(this, { title, hint, poolValue, total, format, minScale });
    this.lines = lines ?? [["", poolValue ?? statsValue ?? ((now, before) => now[total] - before[total])]];
    this.points = []; // {at, values}; null separates segments
    this.labels = this.lines.map(([name], i) => createElement("span", { className: name && `line-${i + 1}` }));
    this.curves = this.lines.map((_, i) => createSvg("path", { class: `curve-${i + 1}` }));
    this.area = createSvg("path", { class: "area" }); // under the first curve
    const viewBox = `0 0 ${SPAN_MS} ${HEIGHT_PX}`;
    this.drawing = createSvg("svg", { role: "img", viewBox, preserveAspectRatio: "none" });
    this.drawing.append(this.area, ...[...this.curves].reverse()); // the first curve on top
    const caption = createElement("figcaption", {}, title);
    const labels = createElement("p", {}, ...this.labels);
    parent.append(createElement("figure", { title: hint }, caption, labels, this.drawing));
  }

  add({ stats, at }, from, pool) {
    const seconds = Math.max((at - from.at) / 1000, 0.001);
    const args = this.poolValue ? [pool] : [stats, from.stats, seconds];
    const values = this.lines.map(([, curveValue]) => curveValue(...args));
    this.points.push({ at, values });
    while (!this.points[0] || this.points[0].at < at - SPAN_MS) this.points.shift();
    this.showValues(this.total ? [stats[this.total]] : values);
  }

  showValues(values) {
    const texts = values.map((value, i) => `${this.format(value)} ${this.lines[i][0]}`.trim());
    this.labels.forEach((label, i) => (label.textContent = texts[i]));
    this.drawing.setAttribute("aria-label", `${this.title} (${this.hint}): ${texts.join(", ")}`);
  }

  draw() {
    const last = this.points.at(-1);
    if (!last) return;
    const scale = Math.max(this.minScale, ...this.points.flatMap((point) => point?.values ?? []));
    const x = (point) => SPAN_MS - (last.at - point.at);
    const y = (value) => HEIGHT_PX - 2 - (value / scale) * (HEIGHT_PX - 4);
    const points = (segment, i) => segment.map((point) => `${x(point)} ${y(point.values[i])}`).join("L");
    const segments = this.segments();
    this.curves.forEach((curve, i) => {
      curve.setAttribute("d", segments.map((segment) => `M${points(segment, i)}`).join(""));
    });
    const area = (segment) =>
      `M${x(segment[0])} ${HEIGHT_PX}L${points(segment, 0)}L${x(segment.at(-1))} ${HEIGHT_PX}Z`;
    this.area.setAttribute("d", segments.map(area).join(""));
  }

  /** Returns the runs of points without a break. */
  segments() {
    const segments = [[]];
    for (const point of this.points) {
      if (point) segments.at(-1).push(point);
      else segments.push([]);
    }
    return segments.filter((segment) => segment.length);
  }
}

export class Charts {
  constructor(parent) {
    this.charts = CHARTS.map((spec) => new Chart(spec, parent));
    this.before = null;
  }

  /** Adds a point to all charts. `sample` has the engine's `stats` and their time `at` in ms. */
  add(sample, pool) {
    const { before } = this;
    // The counters of a restarted engine are lower and must not be compared with earlier ones.
    const isSameEngine = before && before.stats.num_steps <= sample.stats.num_steps;
    for (const chart of this.charts) chart.add(sample, isSameEngine ? before : sample, pool);
    this.before = sample;
    this.pending ||= requestAnimationFrame(() => {
      this.pending = 0;
      for (const chart of this.charts) chart.draw();
    });
  }

  /** Shows the current values of the charts that depend on the pool alone. */
  showPool(pool) {
    for (const chart of this.charts) if (chart.poolValue) chart.showValues([chart.poolValue(pool)]);
  }

  /** Starts new curves: the next point is not connected to the last one. */
  breakLines() {
    if (this.before) for (const chart of this.charts) chart.points.push(null);
    this.before = null;
  }
}
