// Connects the parts of the page: stream of pool diffs, player, pool, and drawings.

import { Charts } from "./charts.js";
import { showBlock, showHost, showTables } from "./detail.js";
import { EventCounts, FLASHES } from "./event_counts.js";
import { Grid, drawStrip } from "./grid.js";
import { Palette } from "./palette.js";
import { Player } from "./play.js";
import { Pool } from "./pool.js";
import { Prompts } from "./prompts.js";
import { fetchChecked, readEvents } from "./stream.js";

const PANELS_INTERVAL_MS = 250;
const RETRY_DELAY_MS = 2000;
const SILENCE_TIMEOUT_MS = 40_000; // the server sends something at least every 15 s
const CHARTS_INTERVAL_MS = 500;
const MAX_SAMPLES = 240; // chart samples that wait for one pool diff
const HIDDEN_TIMEOUT_MS = 60_000; // time until a hidden page disconnects
const MAX_SMALL_POOL_BLOCKS = 4096;

const element = (id) => document.getElementById(id);
const state = { pool: null, stats: null, isLive: false };

const grid = new Grid(element("grid"), element("scroller"), showSelected);
const player = new Player(applyDiffs, (count) => {
  element("behind").textContent = count ? `${count} step${count > 1 ? "s" : ""} behind` : "";
  element("step").disabled = player?.speed === "live" || !count;
});
const charts = new Charts(element("charts"));
const eventCounts = new EventCounts(element("happened"));
const prompts = new Prompts(element);

const select = (block) => grid.select(block, true);

/** Describes the selected block. Screen readers announce it only if `isAnnounced`. */
function showSelected(id, isAnnounced = true) {
  const [holder] = state.pool.holders(id);
  grid.mark(holder?.sequence.blocks ?? []);
  const sentence = state.pool.describe(id);
  element("said").ariaLive = isAnnounced ? "polite" : "off";
  if (element("said").textContent !== sentence) element("said").textContent = sentence;
  showBlock(element("block"), state.pool, id, select);
}

/** Applies pool diffs and draws them once. A diff that cannot be applied restarts the stream. */
function applyDiffs(diffs) {
  const { pool } = state;
  try {
    for (const diff of diffs) {
      const { changed, events } = pool.apply(diff);
      grid.update(changed);
      for (const [kind, colour] of FLASHES) grid.flash(events[kind], colour);
      eventCounts.record(diff.step, events);
      if (diff.changes.swap_entries) drawHost();
      for (const sample of diff.samples ?? []) charts.add(sample, pool);
    }
  } catch (error) {
    state.listening.abort();
    throw error;
  }
  schedulePanels();
}

function schedulePanels() {
  const wait = Math.max((state.panelsRendered ?? 0) + PANELS_INTERVAL_MS - performance.now(), 0);
  state.panels ||= setTimeout(renderPanels, wait);
}

function renderPanels() {
  state.panels = 0;
  state.panelsRendered = performance.now();
  const { pool } = state;
  showTables(element("tables"), element("num-tables"), pool, grid.selected, select);
  if (grid.selected) showSelected(grid.selected, false);
  eventCounts.render();
  charts.showPool(pool);
  prompts.updateColours(pool, new Palette());
}

function drawHost() {
  const { pool, stats } = state;
  const total = stats?.num_host_blocks ?? 0;
  element("host").hidden = !total;
  if (!total) return;
  drawStrip(element("strip"), pool, total);
  showHost(element("host-size"), element("host-list"), pool, total);
}

/** Adds a sample to the charts, or attaches it to the last waiting diff so that both appear together. */
function sampleStats() {
  if (!state.isLive) return;
  const sample = { stats: state.stats, at: performance.now() };
  const last = player.waiting.at(-1);
  if (!last) charts.add(sample, state.pool);
  else last.samples = [...(last.samples ?? []).slice(1 - MAX_SAMPLES), sample];
}

// The stream

function showSnapshot({ pool, frame, stats }) {
  state.pool = new Pool(pool, state.pool);
  state.stats = stats;
  state.isLive = true;
  element("model").textContent = pool.model ?? "";
  const size = `${(pool.num_blocks - 1).toLocaleString("en")} blocks of ${pool.block_size} tokens`;
  element("pool-size").textContent = size;
  element("block-size").textContent = pool.block_size;
  player.clear();
  if (!state.hasSpeed) chooseSpeed(pool, stats);
  state.pool.apply(frame);
  eventCounts.clear(frame.step);
  grid.show(state.pool);
  drawHost();
  schedulePanels();
}

/** Slows an idle engine with a small pool down: such engines are too fast to follow. */
function chooseSpeed(pool, stats) {
  state.hasSpeed = true;
  if (pool.num_blocks <= MAX_SMALL_POOL_BLOCKS && !stats.num_running) setSpeed("20");
}

function queueDiffs({ frames, stats }) {
  state.stats = stats;
  if (frames.length && player.speed !== "live") frames.at(-1).samples = [{ stats, at: performance.now() }];
  player.push(frames);
}

async function followStream() {
  state.listening = new AbortController();
  const response = await fetchChecked("picture/events", { signal: state.listening.signal });
  for await (const { name, data } of readEvents(response, SILENCE_TIMEOUT_MS)) {
    if (name === "snapshot") showSnapshot(JSON.parse(data));
    else if (name === "frames") queueDiffs(JSON.parse(data));
    else throw new Error(JSON.parse(data).error.message);
    setStatus("live", "live");
  }
}

function setStatus(text, kind) {
  if (element("line").textContent !== text) element("line").textContent = text;
  element("line").className = kind;
  document.body.classList.toggle("old", kind !== "live");
}

async function followForever() {
  for (;;) {
    try {
      await followStream();
      showDisconnected("the stream ended: trying again", "down");
    } catch (error) {
      if (state.isSuspended) showDisconnected("disconnected while the page is hidden", "");
      else showDisconnected(`${error.message}: trying again`, "down");
    }
    await new Promise((resolve) => {
      state.wake = resolve;
      if (!state.isSuspended) setTimeout(resolve, RETRY_DELAY_MS);
    });
  }
}

/** Shows that the page is out of date. */
function showDisconnected(text, kind) {
  setStatus(text, kind);
  state.isLive = false;
  charts.breakLines();
}

/** Disconnects a hidden page: browsers limit the connections to a server, and other pages need them. */
function disconnectHidden() {
  if (player.speed !== "live") return; // the user may come back to the waiting diffs
  state.isSuspended = true;
  state.listening?.abort();
}

function onVisibility() {
  clearTimeout(state.hiddenTimer);
  if (document.hidden) state.hiddenTimer = setTimeout(disconnectHidden, HIDDEN_TIMEOUT_MS);
  else {
    state.isSuspended = false;
    state.wake?.();
  }
}

// Keys and settings

element("pace").addEventListener("change", (event) => player.setSpeed(event.target.value));
element("step").addEventListener("click", () => player.step());

function setSpeed(speed) {
  element("pace").value = speed;
  player.setSpeed(speed);
}

element("grid").addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.key === " ") setSpeed(String(player.toggledSpeed));
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
setInterval(sampleStats, CHARTS_INTERVAL_MS);

// For the browser's console and the tests.
window.jpaged = { grid, player, prompts, charts, state, disconnectHidden };

onVisibility();
followForever();
