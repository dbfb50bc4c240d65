// The pool as the frames tell it: which block is held how often, by whom, and how full it is.
// The form of a frame is documented in dashboard/codec.py.

export const CACHED = -1;

/** Little-endian uint32 numbers out of base64. */
export function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  return Array.from({ length: bytes.length / 4 }, (_, i) => view.getUint32(4 * i, true));
}

function* ranges(firsts) {
  for (let i = 0; i < firsts.length; i += 2) {
    for (let k = 0; k < firsts[i + 1]; k++) yield firsts[i] + k;
  }
}

function* runs(values) {
  for (let i = 0; i < values.length; i += 2) {
    for (let k = 0; k < values[i + 1]; k++) yield values[i];
  }
}

function pairs(numbers) {
  return Array.from({ length: numbers.length / 2 }, (_, i) => numbers.slice(2 * i, 2 * i + 2));
}

export class Pool {
  /** A request has one colour as long as the page is open: its number comes from the pool before. */
  constructor({ num_blocks, block_size }, before = null) {
    this.numBlocks = num_blocks; // the null block, which nobody holds, counted
    this.blockSize = block_size;
    this.step = 0;
    this.counts = new Int32Array(num_blocks);
    this.hashes = new Uint32Array(num_blocks);
    this.owners = new Uint32Array(num_blocks); // a request's number, from 1; of a cached one the last
    this.partial = new Map(); // of blocks that are not full: slots with tokens
    this.sequences = new Map(); // by seq_id
    this.requests = before?.requests ?? new Map(); // request_id to its number, which is its colour
    this.pinned = new Set();
    this.images = [];
    this.text = new Map(); // block to the text of each of its tokens
    this.numUsed = 0; // blocks that somebody holds
    this.numLogical = 0; // entries of all block tables
    this.numRequests = before?.numRequests ?? 0;
  }

  /**
   * Takes a frame in; gives the blocks that look different now, and what happened to which: `taken`
   * anew, `found` with their content kept, `shared` by one more, `copied` [source, target], `freed`.
   */
  apply(frame) {
    this.step = frame.step;
    const changed = new Set();
    const events = { taken: [], found: [], shared: [], copied: pairs(frame.copies ?? []), freed: [] };
    this.takeCounts(frame, changed, events);
    const orphans = new Set();
    for (const id of frame.gone) this.forget(id, orphans);
    for (const table of frame.tables) this.takeTable(table, orphans);
    for (let i = 0; i < frame.grown.length; i += 2) {
      this.sequences.get(frame.grown[i]).computed = frame.grown[i + 1];
    }
    this.adopt(orphans);
    this.takePartial(changed);
    for (const id of orphans) changed.add(id);
    if (frame.images) this.images = frame.images;
    if (frame.pinned) {
      for (const id of [...this.pinned, ...frame.pinned]) changed.add(id);
      this.pinned = new Set(frame.pinned);
    }
    for (const [id, words] of Object.entries(frame.text ?? {})) this.text.set(Number(id), words);
    this.dropRequests();
    return { changed, events };
  }

  takeCounts(frame, changed, events) {
    const copies = new Set(events.copied.map(([, target]) => target));
    const counts = runs(frame.counts);
    const hashes = unpack(frame.hashes);
    let i = 0;
    for (const id of ranges(frame.ids)) {
      const before = this.counts[id];
      const now = counts.next().value;
      this.counts[id] = now;
      this.numUsed += (now > 0) - (before > 0);
      const isFound = before === CACHED && now > 0 && hashes[i] === this.hashes[id];
      this.hashes[id] = hashes[i++];
      if (isFound) events.found.push(id);
      else if (before <= 0 && now > 0 && !copies.has(id)) events.taken.push(id);
      if (now > 1 && now > before) events.shared.push(id);
      else if (before > 0 && now <= 0) events.freed.push(id);
      if (now === 0 || (before <= 0 && now > 0)) this.owners[id] = 0; // whoever takes it, owns it
      if (now === 0 || (before <= 0 && now > 0 && !this.hashes[id])) this.text.delete(id);
      changed.add(id);
    }
  }

  takeTable([id, request, index, status, prompt, computed, numKept, host, packed], orphans) {
    const fresh = unpack(packed);
    const number = this.numberOf(request);
    let sequence = this.sequences.get(id);
    if (!sequence) {
      sequence = { id, request, number, blocks: [] };
      this.sequences.set(id, sequence);
    }
    const dropped = sequence.blocks.splice(numKept);
    for (const block of dropped) orphans.add(block);
    for (const block of fresh) {
      sequence.blocks.push(block);
      // A prefix that others hold keeps its colour.
      if (this.counts[block] === 1 || !this.owners[block]) this.owners[block] = number;
    }
    this.numLogical += fresh.length - dropped.length;
    Object.assign(sequence, { index, status, prompt, computed, host });
  }

  forget(id, orphans) {
    const sequence = this.sequences.get(id);
    if (!sequence) return;
    this.sequences.delete(id);
    this.numLogical -= sequence.blocks.length;
    for (const block of sequence.blocks) orphans.add(block);
  }

  /** Blocks that somebody let go of get the colour of one who holds them still. */
  adopt(orphans) {
    const lost = new Set([...orphans].filter((id) => this.counts[id] > 0));
    if (!lost.size) return;
    for (const { blocks, number } of this.sequences.values()) {
      for (const block of blocks) if (lost.has(block)) this.owners[block] = number;
    }
  }

  takePartial(changed) {
    const partial = new Map();
    for (const { blocks, computed } of this.sequences.values()) {
      const rest = computed % this.blockSize;
      if (rest && blocks.length) partial.set(blocks.at(-1), rest);
    }
    for (const [id, filled] of partial) if (this.partial.get(id) !== filled) changed.add(id);
    for (const id of this.partial.keys()) if (!partial.has(id)) changed.add(id);
    this.partial = partial;
  }

  numberOf(request) {
    let number = this.requests.get(request);
    if (!number) this.requests.set(request, (number = ++this.numRequests));
    return number;
  }

  /** Colours are remembered a while, so that a request swapped out comes back in its own. */
  dropRequests() {
    if (this.requests.size < 4096) return;
    const held = new Set([...this.sequences.values()].map((s) => s.request));
    for (const request of this.requests.keys()) if (!held.has(request)) this.requests.delete(request);
  }

  filledSlots(id) {
    if (this.counts[id] === 0) return 0;
    return this.partial.get(id) ?? this.blockSize;
  }

  /** Slots of held blocks without a token. */
  get numWasted() {
    let numWasted = 0;
    for (const filled of this.partial.values()) numWasted += this.blockSize - filled;
    return numWasted;
  }

  /** Who holds a block: sequences, and its place in their tables. */
  holders(id) {
    const found = [];
    for (const sequence of this.sequences.values()) {
      const place = sequence.blocks.indexOf(id);
      if (place >= 0) found.push({ sequence, place });
    }
    return found;
  }

  /** A sentence about a block. */
  describe(id) {
    const count = this.counts[id];
    const parts = [`Block ${id}: `];
    if (count === 0) return `Block ${id}: free.`;
    if (count === CACHED) parts.push("free, its content kept for its prefix");
    else {
      const holders = this.holders(id);
      const names = [...new Set(holders.map(({ sequence }) => nameOf(sequence)))];
      parts.push(count > 1 ? `shared by ${count}` : "used");
      if (names.length) parts.push(`, held by ${names.slice(0, 4).join(", ")}`);
      if (names.length > 4) parts.push(` and ${names.length - 4} more`);
      if (this.pinned.has(id)) parts.push(", pinned");
      parts.push(`; ${this.filledSlots(id)} of ${this.blockSize} slots filled`);
    }
    if (this.hashes[id]) parts.push(`; hash ${hashOf(this.hashes[id])}`);
    const words = this.text.get(id);
    if (words) parts.push(`; text “${visible(words.join(""))}”`);
    return `${parts.join("")}.`;
  }
}

/** Text with what would break the line, or turn it around, made visible. */
export function visible(text) {
  const marks = text.replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  return marks.replace(/[\p{Cc}\u200e\u200f\u202a-\u202e\u2066-\u2069]/gu, "·");
}

export function nameOf({ request, index }) {
  const short = request.length > 20 ? `${request.slice(0, 11)}…${request.slice(-4)}` : request;
  return index ? `${short} #${index}` : short;
}

export function hashOf(number) {
  return number.toString(16).padStart(8, "0");
}
