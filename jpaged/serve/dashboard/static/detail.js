// What is known of the block that is looked at, and all block tables. Whatever came from a prompt
// is set as text, never as markup.

import { Palette } from "./palette.js";
import { CACHED, nameOf, visible } from "./pool.js";

const MAX_HOLDERS = 8;
const MAX_CHIPS = 400;
const MAX_ROWS = 60;
const MAX_ROW_CHIPS = 24;

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function swatch(number, palette) {
  const made = element("i", "swatch");
  made.style.background = palette.of(number);
  return made;
}

/** Fills the panel of one block: its slots, and the block table of whoever holds it. */
export function showBlock(parent, pool, id, onChip) {
  parent.replaceChildren();
  if (!id || !pool) return;
  parent.append(slotsOf(pool, id));
  const palette = new Palette();
  const holders = pool.holders(id);
  for (const { sequence, place } of holders.slice(0, MAX_HOLDERS)) {
    const line = element("p", "holder");
    line.append(swatch(sequence.number, palette));
    const where = `block ${place + 1} of ${sequence.blocks.length}`;
    line.append(`${nameOf(sequence)}: ${where}, ${sequence.computed} tokens computed`);
    parent.append(line);
  }
  if (holders.length > MAX_HOLDERS) {
    parent.append(element("p", "holder", `and ${holders.length - MAX_HOLDERS} more`));
  }
  if (holders.length) parent.append(chipsOf(pool, holders[0].sequence, id, onChip, MAX_CHIPS));
}

/** What the strip of host memory shows, in words. */
export function showHost(label, list, pool, total) {
  const palette = new Palette();
  const used = pool.images.reduce((sum, [, count]) => sum + count, 0);
  label.textContent = `${used.toLocaleString("en")} of ${total.toLocaleString("en")} blocks in use`;
  const lines = pool.images.slice(0, MAX_HOLDERS).map(([request, count]) => {
    const line = element("span", "holder");
    const name = nameOf({ request, index: 0 });
    line.append(swatch(pool.numberOf(request), palette), `${name}: ${count} block${count > 1 ? "s" : ""}`);
    return line;
  });
  if (pool.images.length > MAX_HOLDERS) lines.push(`and ${pool.images.length - MAX_HOLDERS} more`);
  list.replaceChildren(...lines);
}

function slotsOf(pool, id) {
  const list = element("div", "slots");
  const words = pool.text.get(id) ?? [];
  const filled = pool.filledSlots(id);
  for (let i = 0; i < Math.min(pool.blockSize, 128); i++) {
    const isFilled = i < filled;
    const slot = element("span", isFilled ? "slot filled" : "slot", isFilled ? visible(words[i] ?? "").replaceAll(" ", "␣") : "");
    slot.classList.toggle("kept", pool.counts[id] === CACHED);
    list.append(slot);
  }
  return list;
}

function chipsOf(pool, sequence, current, onChip, most) {
  const list = element("span", "chips");
  for (const block of sequence.blocks.slice(0, most)) {
    const chip = element("span", "chip", String(block));
    const count = pool.counts[block];
    if (count > 1) chip.append(element("sub", "", `×${count}`));
    chip.classList.toggle("here", block === current);
    chip.addEventListener("pointerdown", () => onChip(block));
    list.append(chip);
  }
  if (sequence.blocks.length > most) list.append(`… ${sequence.blocks.length} in all`);
  return list;
}

/** The block tables of all sequences, as figure 6 of the paper has them. */
export function showTables(body, label, pool, current, onChip) {
  const palette = new Palette();
  const sequences = [...pool.sequences.values()];
  label.textContent = sequences.length ? `of ${sequences.length} sequences` : "";
  const rows = sequences.slice(0, MAX_ROWS).map((sequence) => {
    const row = element("tr");
    const name = element("th");
    name.scope = "row";
    name.title = sequence.request;
    name.append(swatch(sequence.number, palette), nameOf(sequence));
    const tokens = `${sequence.computed} (${sequence.prompt} given)`;
    const blocks = element("td");
    if (sequence.host) blocks.append(`${sequence.host} blocks in host memory`);
    else blocks.append(chipsOf(pool, sequence, current, onChip, MAX_ROW_CHIPS));
    row.append(name, element("td", "", sequence.status), element("td", "number", tokens), blocks);
    return row;
  });
  if (sequences.length > MAX_ROWS) {
    const more = element("td", "", `and ${sequences.length - MAX_ROWS} more`);
    more.colSpan = 4;
    const row = element("tr");
    row.append(more);
    rows.push(row);
  }
  if (!rows.length) {
    const none = element("td", "none", "No sequence holds a block now.");
    none.colSpan = 4;
    const row = element("tr");
    row.append(none);
    rows.push(row);
  }
  body.replaceChildren(...rows);
}
