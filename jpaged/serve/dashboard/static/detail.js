// What is known of the block that is looked at, of host memory, and of all block tables.

import { Palette, make } from "./palette.js";
import { CACHED, nameOf, visible } from "./pool.js";

const MAX_HOLDERS = 8;
const MAX_CHIPS = 400;
const MAX_ROWS = 60;
const MAX_ROW_CHIPS = 24;
const MAX_SLOTS = 128;

/** What `show` makes of the first of a list, and how many more there are. */
function firstOf(list, most, show, showRest) {
  const shown = list.slice(0, most).map(show);
  if (list.length > most) shown.push(showRest(`and ${list.length - most} more`));
  return shown;
}

/** A number with its noun: "1 block", "2 blocks". */
function counted(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

/** Fills the panel of one block: its slots, and the block tables of the sequences that hold it. */
export function showBlock(parent, pool, id, onChip) {
  const palette = new Palette();
  const holders = pool.holders(id);
  const line = (...parts) => make("p", { className: "holder" }, ...parts);
  const lines = firstOf(holders, MAX_HOLDERS, ({ sequence, place }) => {
    const where = `block ${place + 1} of ${sequence.blocks.length}`;
    const words = `${nameOf(sequence)}: ${where}, ${counted(sequence.computed, "token")} computed`;
    return line(palette.swatch(sequence.number), words);
  }, line);
  const tables = holders.slice(0, 1).map(({ sequence }) => chipsOf(pool, sequence, id, onChip, MAX_CHIPS));
  parent.replaceChildren(slotsOf(pool, id), ...lines, ...tables);
}

/** What the strip of host memory shows, in words. */
export function showHost(label, list, pool, total) {
  const palette = new Palette();
  const used = pool.images.reduce((sum, [, count]) => sum + count, 0);
  label.textContent = `${used.toLocaleString("en")} of ${total.toLocaleString("en")} blocks in use`;
  const line = (...parts) => make("span", { className: "holder" }, ...parts);
  list.replaceChildren(...firstOf(pool.images, MAX_HOLDERS, ([request, count]) => {
    const words = `${nameOf({ request })}: ${count} block${count > 1 ? "s" : ""}`;
    return line(palette.swatch(pool.numberOf(request)), words);
  }, line));
}

function slotsOf(pool, id) {
  const words = pool.text.get(id) ?? [];
  const filled = pool.filledSlots(id);
  const kept = pool.counts[id] === CACHED ? " kept" : "";
  const slots = Array.from({ length: Math.min(pool.blockSize, MAX_SLOTS) }, (_, i) => {
    if (i >= filled) return make("span", { className: `slot${kept}` });
    return make("span", { className: `slot filled${kept}` }, visible(words[i] ?? "").replaceAll(" ", "␣"));
  });
  return make("div", { className: "slots" }, ...slots);
}

function chipsOf(pool, sequence, current, onChip, most) {
  const chips = sequence.blocks.slice(0, most).map((block) => {
    const chip = make("span", { className: block === current ? "chip here" : "chip" }, String(block));
    if (pool.counts[block] > 1) chip.append(make("sub", {}, `×${pool.counts[block]}`));
    chip.addEventListener("pointerdown", () => onChip(block));
    return chip;
  });
  if (sequence.blocks.length > most) chips.push(`… ${sequence.blocks.length} in all`);
  return make("span", { className: "chips" }, ...chips);
}

/** The block tables of all sequences, as figure 6 of the paper has them. */
export function showTables(body, label, pool, current, onChip) {
  const palette = new Palette();
  const sequences = [...pool.sequences.values()];
  label.textContent = sequences.length ? `of ${sequences.length} sequences` : "";
  const note = (text) => make("tr", {}, make("td", { className: "none", colSpan: 4 }, text));
  const rows = firstOf(sequences, MAX_ROWS, (sequence) => {
    const name = { scope: "row", title: sequence.request };
    const chips = () => chipsOf(pool, sequence, current, onChip, MAX_ROW_CHIPS);
    return make("tr", {},
      make("th", name, palette.swatch(sequence.number), nameOf(sequence)),
      make("td", {}, sequence.status),
      make("td", { className: "number" }, `${sequence.computed} (${sequence.prompt} given)`),
      make("td", {}, sequence.host ? `${counted(sequence.host, "block")} in host memory` : chips()));
  }, note);
  if (!rows.length) rows.push(note("No sequence holds a block now."));
  body.replaceChildren(...rows);
}
