// Puts the page together: the stream feeds the player, the player the pool and its drawings.

import { Charts } from "./charts.js";
import { showBlock, showHost, showTables } from "./detail.js";
import { Grid, drawStrip } from "./grid.js";
import { FLASHES, Happened } from "./happened.js";
import { Palette } from "./palette.js";
import { Player } from "./play.js";
import { Pool } from "./pool.js";
import { Prompts } from "./prompts.js";
import { ask, events } from "./stream.js";

const PANELS_EVERY = 250; // milliseconds
const RETRY = 2000; // milliseconds
const SILENCE = 40_000; // milliseconds; the server says every 15 s at least that it is there
const CHARTS_EVERY = 500; // milliseconds
const MAX_MOMENTS = 240; // of the charts, while the picture stands still
const REST_AFTER = 60_000; // milliseconds out of sight
const MAX_TOY = 4096; // blocks of a pool that is no more than a toy

const element = (id) => document.getElementById(id);
const state = { pool: null, stats: null, isLive: false };

const grid = new Grid(element("grid"), element("scroller"), lookAt);
const player = new Player(show, (count) => {
  element("behind").textContent = count ? `${count} step${count > 1 ? "s" : ""} behind` : "";
  element("step").disabled = player?.pace === "live" || !count;
});
const charts = new Charts(element("charts"));
const happened = new Happened(element("happened"));
const prompts = new Prompts(element);

const select = (block) => grid.select(block, true);

/** Says what is known of a block; to those who listen, too, unless they did not ask for it anew. */
function lookAt(id, isAsked = true) {
  const [holder] = state.pool.holders(id);
  grid.mark(holder?.sequence.blocks ?? []);
  const sentence = state.pool.describe(id);
  element("said").ariaLive = isAsked ? "polite" : "off";
  if (element("said").textContent !== sentence) element("said").textContent = sentence;
  showBlock(element("block"), state.pool, id, select);
}

/** Frames become a picture: all of them at once, drawn once. What does not fit is asked for anew. */
function show(frames) {
  const { pool } = state;
  try {
    for (const frame of frames) {
      const { changed, events } = pool.apply(frame);
      grid.update(changed);
      for (const [kind, colour] of FLASHES) grid.flash(events[kind], colour);
      happened.note(frame.step, events);
      if (frame.changes.images) drawHost();
      for (const moment of frame.moments ?? []) charts.add(moment, pool);
    }
  } catch (error) {
    state.listening.abort();
    throw error;
  }
  schedulePanels();
}

function schedulePanels() {
  const wait = Math.max((state.panelsPainted ?? 0) + PANELS_EVERY - performance.now(), 0);
  state.panels ||= setTimeout(paintPanels, wait);
}

function paintPanels() {
  state.panels = 0;
  state.panelsPainted = performance.now();
  const { pool } = state;
  showTables(element("tables"), element("num-tables"), pool, grid.selected, select);
  if (grid.selected) lookAt(grid.selected, false);
  happened.paint();
  charts.say(pool);
  prompts.paint(pool, new Palette());
}

function drawHost() {
  const { pool, stats } = state;
  const total = stats?.num_host_blocks ?? 0;
  element("host").hidden = !total;
  if (!total) return;
  drawStrip(element("strip"), pool, total);
  showHost(element("host-size"), element("host-list"), pool, total);
}

/** The charts tell of the time that the picture shows: figures wait for the frames before them. */
function noteMoment() {
  if (!state.isLive) return;
  const moment = { stats: state.stats, at: performance.now() };
  const last = player.waiting.at(-1);
  if (!last) charts.add(moment, state.pool);
  else last.moments = [...(last.moments ?? []).slice(1 - MAX_MOMENTS), moment];
}

// The stream

function begin({ pool, frame, stats }) {
  state.pool = new Pool(pool, state.pool);
  state.stats = stats;
  state.isLive = true;
  element("model").textContent = pool.model ?? "";
  const size = `${(pool.num_blocks - 1).toLocaleString("en")} blocks of ${pool.block_size} tokens`;
  element("pool-size").textContent = size;
  element("block-size").textContent = pool.block_size;
  player.clear();
  if (!state.hasPace) choosePace(pool, stats);
  state.pool.apply(frame);
  happened.clear(frame.step);
  grid.show(state.pool);
  drawHost();
  schedulePanels();
}

/** A small engine that idles is there to be watched, and is too fast for that. */
function choosePace(pool, stats) {
  state.hasPace = true;
  if (pool.num_blocks <= MAX_TOY && !stats.num_running) setPace("20");
}

function receive({ frames, stats }) {
  state.stats = stats;
  if (frames.length && player.pace !== "live") frames.at(-1).moments = [{ stats, at: performance.now() }];
  player.push(frames);
}

async function watch() {
  state.listening = new AbortController();
  const response = await ask("picture/events", { signal: state.listening.signal });
  for await (const { name, data } of events(response, SILENCE)) {
    if (name === "snapshot") begin(JSON.parse(data));
    else if (name === "frames") receive(JSON.parse(data));
    else throw new Error(JSON.parse(data).error.message);
    tell("live", "live");
  }
}

function tell(text, kind) {
  if (element("line").textContent !== text) element("line").textContent = text;
  element("line").className = kind;
  document.body.classList.toggle("old", kind !== "live");
}

async function watchForEver() {
  for (;;) {
    try {
      await watch();
      lose("the stream ended: trying again", "down");
    } catch (error) {
      if (state.isResting) lose("rests while it is out of sight", "");
      else lose(`${error.message}: trying again`, "down");
    }
    await new Promise((resolve) => {
      state.wake = resolve;
      if (!state.isResting) setTimeout(resolve, RETRY);
    });
  }
}

/** What is shown is old from now on. */
function lose(text, kind) {
  tell(text, kind);
  state.isLive = false;
  charts.cut();
}

/** Out of sight for long: a browser has few lines to a server, which other pages may want. */
function rest() {
  if (player.pace !== "live") return; // somebody may come back to what waits
  state.isResting = true;
  state.listening?.abort();
}

function onVisibility() {
  clearTimeout(state.restDue);
  if (document.hidden) state.restDue = setTimeout(rest, REST_AFTER);
  else {
    state.isResting = false;
    state.wake?.();
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
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.key === " ") setPace(String(player.otherPace));
  else if (event.key === ".") player.step();
  else return;
  event.preventDefault();
});

window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  if (!state.pool) return;
  grid.drawAll();
  drawHost();
  schedulePanels();
});
window.addEventListener("resize", () => state.pool && drawHost());
document.addEventListener("visibilitychange", onVisibility);
setInterval(noteMoment, CHARTS_EVERY);

// For a look from the console, and for the tests.
window.jpaged = { grid, player, prompts, charts, state, rest };

onVisibility();
watchForEver();
