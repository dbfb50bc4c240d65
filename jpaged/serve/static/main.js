// Puts the page together: the stream feeds the player, the player the pool and its drawings.

import { Charts } from "./charts.js";
import { showBlock, showTables } from "./detail.js";
import { Grid, Palette, drawStrip } from "./grid.js";
import { Player } from "./play.js";
import { Pool } from "./pool.js";
import { Prompts } from "./prompts.js";
import { ask, events } from "./stream.js";

const PANELS_EVERY = 250; // milliseconds
const RETRY = 2000; // milliseconds
const MAX_TOY = 4096; // blocks of a pool that is no more than a toy

const element = (id) => document.getElementById(id);
const state = { pool: null, stats: null, panelsDue: 0 };

const grid = new Grid(element("grid"), element("scroller"), lookAt);
const player = new Player(show, (count) => {
  element("behind").textContent = count ? `${count} step${count > 1 ? "s" : ""} behind` : "";
  element("step").disabled = player?.pace === "live" || !count;
});
const charts = new Charts(element("charts"));
const prompts = new Prompts(element);

function lookAt(id) {
  const holders = state.pool.holders(id);
  grid.mark(holders.length ? holders[0].sequence.blocks : []);
  element("said").textContent = state.pool.describe(id);
  showBlock(element("block"), state.pool, id, (block) => grid.select(block, true));
}

/** Frames become a picture: all of them at once, drawn once. */
function show(frames) {
  const { pool } = state;
  for (const frame of frames) {
    const { changed, events } = pool.apply(frame);
    grid.update(changed);
    grid.flash(events.taken, "take");
    grid.flash(events.copied.map(([, fresh]) => fresh), "copy");
    if (frame.images) drawHost();
  }
  schedulePanels();
}

function schedulePanels() {
  if (state.panels) return;
  state.panels = setTimeout(() => {
    state.panels = 0;
    const { pool } = state;
    const onChip = (block) => grid.select(block, true);
    showTables(element("tables"), element("num-tables"), pool, grid.selected, onChip);
    if (grid.selected) refresh(grid.selected);
    prompts.paint(pool, new Palette());
  }, PANELS_EVERY);
}

/** What is said of the block in view is kept true, and said again only if it changed. */
function refresh(id) {
  const sentence = state.pool.describe(id);
  if (element("said").textContent !== sentence) lookAt(id);
}

function drawHost() {
  const { pool, stats } = state;
  const total = stats?.num_host_blocks ?? 0;
  element("host").hidden = !total;
  if (!total) return;
  const used = pool.images.reduce((sum, [, count]) => sum + count, 0);
  element("host-size").textContent = `${used} of ${total} blocks hold ${pool.images.length} requests`;
  drawStrip(element("strip"), pool, total);
}

// The stream

function begin({ pool, frame, stats }) {
  state.pool = charts.pool = new Pool(pool);
  state.stats = charts.stats = stats;
  element("model").textContent = pool.model ?? "";
  const size = `${(pool.num_blocks - 1).toLocaleString("en")} blocks of ${pool.block_size} tokens`;
  element("pool-size").textContent = size;
  player.clear();
  if (!state.hasPace) choosePace(pool, stats);
  grid.show(state.pool);
  show([frame]);
  drawHost();
}

/** A small engine that idles is there to be watched, and is too fast for that. */
function choosePace(pool, stats) {
  state.hasPace = true;
  if (pool.num_blocks <= MAX_TOY && !stats.num_running) setPace("20");
}

function take({ frames, stats }) {
  state.stats = charts.stats = stats;
  player.push(frames);
}

async function watch() {
  const response = await ask("picture/events");
  for await (const { name, data } of events(response)) {
    tell("live", "live");
    const content = JSON.parse(data);
    if (name === "snapshot") begin(content);
    else if (name === "frames") take(content);
  }
}

function tell(text, kind) {
  if (element("line").textContent !== text) element("line").textContent = text;
  element("line").className = kind;
}

async function watchForEver() {
  for (;;) {
    try {
      await watch();
      tell("the stream ended: trying again", "down");
    } catch (error) {
      tell(`${error.message}: trying again`, "down");
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY));
  }
}

// Keys and settings

element("pace").addEventListener("change", (event) => player.setPace(event.target.value));
element("step").addEventListener("click", () => player.step());

function setPace(pace) {
  element("pace").value = pace;
  player.setPace(pace);
}

element("grid").addEventListener("keydown", (event) => {
  if (event.key === " ") setPace(player.pace === 0 ? "live" : "0");
  else if (event.key === ".") player.step();
  else return;
  event.preventDefault();
});

window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  grid.drawAll();
  if (state.pool) drawHost();
});
window.addEventListener("resize", () => state.pool && drawHost());

// For whoever wants to look from the console, and for the tests.
window.jpaged = { grid, player, prompts, state };

watchForEver();
