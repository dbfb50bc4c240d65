// Draws the blocks as cells of a canvas, and redraws only changed cells.

import { Palette, resizeCanvas } from "./palette.js";
import { CACHED } from "./pool.js";

const CELL_SIZES = [44, 38, 32, 26, 22, 18, 15, 13, 11, 9, 8, 7, 6, 5, 4, 3]; // CSS pixels
const MIN_NUMBERED_SIZE = 32; // CSS pixels of a cell with room for the block's number
const FLASH_MS = 900;
const MAX_FLASHES = 300;

/** Returns the largest cell size at which all cells fit, or the smallest size if none fits. */
function largestSize(numCells, width, height) {
  const fits = (size) => Math.ceil(numCells / Math.floor(width / size)) * size <= height;
  return CELL_SIZES.find(fits) ?? CELL_SIZES.at(-1);
}

export class Grid {
  /** Calls `onSelect(id)` when another block is selected. */
  constructor(canvas, scroller, onSelect) {
    this.canvas = canvas;
    this.scroller = scroller;
    this.onSelect = onSelect;
    this.pool = null;
    this.selected = 0;
    this.marked = new Set(); // block table of the selected block's sequence
    this.flashes = new Map(); // block to [colour name, end time]
    this.dirty = new Set(); // blocks to redraw
    this.drawTime = 0; // duration of the last full redraw in ms
    this.reducedMotion = window.matchMedia("(prefers-reduced-motion: reduce)");
    canvas.addEventListener("pointermove", (event) => this.select(this.blockAt(event), false));
    canvas.addEventListener("pointerdown", (event) => this.select(this.blockAt(event), false));
    canvas.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.layOut()).observe(scroller);
  }

  show(pool) {
    this.pool = pool;
    this.flashes.clear();
    this.marked.clear();
    if (this.selected >= pool.numBlocks) this.selected = 0;
    this.layOut();
  }

  layOut() {
    const { pool } = this;
    if (!pool || !this.scroller.clientWidth) return;
    const width = this.scroller.clientWidth;
    this.size = largestSize(pool.numBlocks - 1, width, Math.max(window.innerHeight * 0.5, 220));
    this.columns = Math.floor(width / this.size);
    const rows = Math.ceil((pool.numBlocks - 1) / this.columns);
    this.context = resizeCanvas(this.canvas, this.columns * this.size, rows * this.size);
    this.fillColour = ""; // current fillStyle of the context
    this.drawAll();
  }

  drawAll() {
    if (!this.context) return;
    const start = performance.now();
    this.palette = new Palette();
    this.context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    // Sort the cells by colour: changing fillStyle costs more than filling a cell.
    const { owners } = this.pool;
    const ids = Float64Array.from(owners, (owner, id) => owner * 2 ** 32 + id).sort();
    for (const id of ids) if (id % 2 ** 32) this.drawCell(id % 2 ** 32, true);
    this.dirty.clear();
    this.drawTime = performance.now() - start;
  }

  /** Redraws these blocks in the next animation frame. */
  update(ids) {
    for (const id of ids) this.dirty.add(id);
    this.schedule();
  }

  flash(ids, kind) {
    if (this.reducedMotion.matches || !this.palette) return;
    const until = performance.now() + FLASH_MS;
    for (const id of ids) {
      if (this.flashes.size >= MAX_FLASHES) break;
      this.flashes.set(id, [kind, until]);
    }
    this.schedule();
  }

  schedule() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      this.drawDirty();
    });
  }

  drawDirty() {
    if (!this.context) return;
    const now = performance.now();
    for (const [id, [, until]] of this.flashes) {
      this.dirty.add(id);
      if (until <= now) this.flashes.delete(id);
    }
    for (const id of this.dirty) if (id) this.drawCell(id, false);
    this.dirty.clear();
    for (const [id, [kind, until]] of this.flashes) {
      this.context.globalAlpha = Math.max((until - now) / FLASH_MS, 0);
      this.drawRing(id, this.palette[kind], Math.max(this.size / 8, 2));
    }
    this.context.globalAlpha = 1;
    if (this.flashes.size) this.schedule();
  }

  /** Returns the upper left corner of a block's cell. */
  cellCorner(id) {
    return [((id - 1) % this.columns) * this.size, Math.floor((id - 1) / this.columns) * this.size];
  }

  drawCell(id, isClear) {
    const { context, size, pool, palette } = this;
    const count = pool.counts[id];
    const [x, y] = this.cellCorner(id);
    const side = size >= 5 ? size - 1 : size; // leaves a gap between cells
    if (!isClear) context.clearRect(x, y, size, size);
    if (count > 0) this.drawUsed(id, count, x, y, side);
    else {
      const owner = pool.owners[id];
      this.fillCell(palette.free, x, y, side, side);
      const colour = owner ? palette.requestColour(owner, 0.3) : palette.cached;
      if (count === CACHED) this.fillCell(colour, x, y, side, side);
    }
    if (size >= MIN_NUMBERED_SIZE) {
      const colour = count > 0 ? palette.ink : palette.quiet;
      this.drawText(id, colour, `${Math.round(size / 4)}px`, "left", "top", x + 3, y + 3);
    }
    if (this.marked.has(id)) this.drawRing(id, palette.table, 1.5);
    if (id === this.selected) this.drawRing(id, palette.ring, 2);
  }

  drawUsed(id, count, x, y, side) {
    const { context, pool, palette } = this;
    const owner = pool.owners[id];
    const filledFraction = pool.filledSlots(id) / pool.blockSize;
    if (filledFraction < 1) this.fillCell(palette.requestColour(owner, 0.22), x, y, side, side);
    this.fillCell(palette.requestColour(owner), x, y, side * filledFraction, side);
    if (count > 1) this.drawCount(count, x, y, side);
    if (pool.pinned.has(id)) {
      context.strokeStyle = palette.pin;
      context.lineWidth = Math.max(side / 10, 1);
      context.strokeRect(x + 1, y + 1, side - 2, side - 2);
    }
  }

  drawCount(count, x, y, side) {
    const { ink } = this.palette;
    if (side < 10) {
      const dot = Math.max(Math.floor(side / 2), 1);
      this.fillCell(ink, x + (side - dot) / 2, y + (side - dot) / 2, dot, dot);
      return;
    }
    const isNumbered = this.size >= MIN_NUMBERED_SIZE; // the block's number is above
    const font = `600 ${Math.round(side * (isNumbered || count > 9 ? 0.5 : 0.66))}px`;
    const text = count > 99 ? "*" : count;
    this.drawText(text, ink, font, "center", "middle", x + side / 2, y + side * (isNumbered ? 0.62 : 0.52));
  }

  fillCell(colour, x, y, width, height) {
    if (this.fillColour !== colour) this.context.fillStyle = this.fillColour = colour;
    this.context.fillRect(x, y, width, height);
  }

  drawText(text, colour, font, align, baseline, x, y) {
    const { context } = this;
    context.fillStyle = this.fillColour = colour;
    context.font = `${font} system-ui, sans-serif`;
    context.textAlign = align;
    context.textBaseline = baseline;
    context.fillText(text, x, y);
  }

  drawRing(id, colour, width) {
    const { context, size } = this;
    const [x, y] = this.cellCorner(id);
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.strokeRect(x + width / 2, y + width / 2, size - width, size - width);
  }

  // Selection

  blockAt(event) {
    if (!this.pool || !this.size) return 0;
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.size);
    const row = Math.floor((event.clientY - box.top) / this.size);
    const id = row * this.columns + column + 1;
    return column < this.columns && id < this.pool.numBlocks ? id : 0;
  }

  select(id, scroll) {
    if (!id || id === this.selected) return;
    const before = this.selected;
    this.selected = id;
    this.update([before, id]);
    if (scroll) this.scrollTo(id);
    this.onSelect(id);
  }

  mark(ids) {
    this.update(this.marked);
    this.marked = new Set(ids);
    this.update(this.marked);
  }

  scrollTo(id) {
    const [, y] = this.cellCorner(id);
    const { scrollTop, clientHeight } = this.scroller;
    if (y < scrollTop) this.scroller.scrollTop = y;
    if (y + this.size > scrollTop + clientHeight) this.scroller.scrollTop = y + this.size - clientHeight;
  }

  onKey(event) {
    if (!this.pool || event.ctrlKey || event.altKey || event.metaKey) return;
    const next = this.nextFor(event.key);
    if (next === undefined) return;
    event.preventDefault();
    this.select(Math.min(Math.max(next, 1), this.pool.numBlocks - 1), true);
  }

  nextFor(key) {
    const { columns, pool } = this;
    const at = this.selected || 0;
    const page = columns * Math.max(Math.floor(this.scroller.clientHeight / this.size) - 1, 1);
    switch (key) {
      case "ArrowRight": return at + 1;
      case "ArrowLeft": return at - 1;
      case "ArrowDown": return at + columns < pool.numBlocks ? at + columns : at;
      case "ArrowUp": return at - columns > 0 ? at - columns : at;
      case "PageDown": return at + page;
      case "PageUp": return at - page;
      case "Home": return 1;
      case "End": return pool.numBlocks - 1;
      case "n": return this.nextUsed(at, 1);
      case "p": return this.nextUsed(at, -1);
      case "t": return this.nextInTable(at);
      default: return undefined;
    }
  }

  nextUsed(at, direction) {
    for (let id = at + direction; id > 0 && id < this.pool.numBlocks; id += direction) {
      if (this.pool.counts[id] > 0) return id;
    }
    return at;
  }

  nextInTable(at) {
    const [holder] = this.pool.holders(at);
    if (!holder) return at;
    const { blocks } = holder.sequence;
    return blocks[(holder.position + 1) % blocks.length];
  }
}

/** Draws host memory: the blocks of each swap entry, and then the free blocks. */
export function drawStrip(canvas, pool, numHostBlocks) {
  const palette = new Palette();
  const width = canvas.parentElement.clientWidth;
  if (!width) return;
  const size = Math.min(largestSize(numHostBlocks, width, 64), 15);
  const columns = Math.floor(width / size);
  const context = resizeCanvas(canvas, columns * size, Math.ceil(numHostBlocks / columns) * size);
  const owners = pool.swapEntries.flatMap(([request, count]) => Array(count).fill(pool.requestNumber(request)));
  const side = size >= 5 ? size - 1 : size;
  for (let i = 0; i < numHostBlocks; i++) {
    context.fillStyle = owners[i] ? palette.requestColour(owners[i]) : palette.free;
    context.fillRect((i % columns) * size, Math.floor(i / columns) * size, side, side);
  }
}
