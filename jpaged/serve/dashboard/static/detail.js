// Panels with the details of the selected block, of host memory, and of all block tables.

import { Palette, createElement } from "./palette.js";
import { CACHED, sequenceName, showControlCharacters } from "./pool.js";

const MAX_HOLDERS = 8;
const MAX_CHIPS = 400;
const MAX_ROWS = 60;
const MAX_ROW_CHIPS = 24;
const MAX_SLOTS = 128;

/** Maps the first `maxCount` items with `show`; `showRest` shows how many items are left. */
function showFirst(list, maxCount, show, showRest) {
  const shown = list.slice(0, maxCount).map(show);
  if (list.length > maxCount) shown.push(showRest(`and ${list.length - maxCount} more`));
  return shown;
}

/** Returns a number with its noun: "1 block", "2 blocks". */
function pluralize(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

/** Shows the slots of a block, the sequences that hold the block, and the first one's block table. */
export function showBlock(parent, pool, id, onChip) {
  const palette = new Palette();
  const holders = pool.holders(id);
  const line = (...parts) => createElement("p", { className: "holder" }, ...parts);
  const lines = showFirst(holders, MAX_HOLDERS, ({ sequence, position }) => {
    const where = `block ${position + 1} of ${sequence.blocks.length}`;
    const words = `${sequenceName(sequence)}: ${where}, ${pluralize(sequence.computed, "token")} computed`;
    return line(palette.swatch(sequence.number), words);
  }, line);
  const tables = holders.slice(0, 1).map(({ sequence }) => renderChips(pool, sequence, id, onChip, MAX_CHIPS));
  parent.replaceChildren(renderSlots(pool, id), ...lines, ...tables);
}

/** Describes the contents of host memory as text. */
export function showHost(label, list, pool, total) {
  const palette = new Palette();
  const used = pool.swapEntries.reduce((sum, [, count]) => sum + count, 0);
  label.textContent = `${used.toLocaleString("en")} of ${total.toLocaleString("en")} blocks in use`;
  const line = (...parts) => createElement("span", { className: "holder" }, ...parts);
  list.replaceChildren(...showFirst(pool.swapEntries, MAX_HOLDERS, ([request, count]) => {
    const words = `${sequenceName({ request })}: ${count} block${count > 1 ? "s" : ""}`;
    return line(palette.swatch(pool.requestNumber(request)), words);
  }, line));
}

function renderSlots(pool, id) {
  const words = pool.text.get(id) ?? [];
  const filled = pool.filledSlots(id);
  const cached = pool.counts[id] === CACHED ? " cached" : "";
  const slots = Array.from({ length: Math.min(pool.blockSize, MAX_SLOTS) }, (_, i) => {
    if (i >= filled) return createElement("span", { className: `slot${cached}` });
    const text = showControlCharacters(words[i] ?? "").replaceAll(" ", "␣");
    return createElement("span", { className: `slot filled${cached}` }, text);
  });
  return createElement("div", { className: "slots" }, ...slots);
}

function renderChips(pool, sequence, current, onChip, maxCount) {
  const chips = sequence.blocks.slice(0, maxCount).map((block) => {
    const chip = createElement("span", { className: block === current ? "chip here" : "chip" }, String(block));
    if (pool.counts[block] > 1) chip.append(createElement("sub", {}, `×${pool.counts[block]}`));
    chip.addEventListener("pointerdown", () => onChip(block));
    return chip;
  });
  if (sequence.blocks.length > maxCount) chips.push(`… ${sequence.blocks.length} blocks`);
  return createElement("span", { className: "chips" }, ...chips);
}

/** Shows the block tables of all sequences, like figure 6 of the PagedAttention paper. */
export function showTables(body, label, pool, current, onChip) {
  const palette = new Palette();
  const sequences = [...pool.sequences.values()];
  label.textContent = sequences.length ? `of ${sequences.length} sequences` : "";
  const note = (text) => createElement("tr", {}, createElement("td", { className: "none", colSpan: 4 }, text));
  const rows = showFirst(sequences, MAX_ROWS, (sequence) => {
    const name = { scope: "row", title: sequence.request };
    const chips = () => renderChips(pool, sequence, current, onChip, MAX_ROW_CHIPS);
    return createElement("tr", {},
      createElement("th", name, palette.swatch(sequence.number), sequenceName(sequence)),
      createElement("td", {}, sequence.status),
      createElement("td", { className: "number" }, `${sequence.computed} (${sequence.prompt} in the prompt)`),
      createElement("td", {}, sequence.host ? `${pluralize(sequence.host, "block")} in host memory` : chips()));
  }, note);
  if (!rows.length) rows.push(note("No sequence holds a block."));
  body.replaceChildren(...rows);
}
