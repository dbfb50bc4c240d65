// The pool as the frames tell it: which block is held how often, by whom, and how full it is.
// A frame is a `PoolFrame` of serve/messages.py; its changes are documented in observe/pool_changes.py.

export const CACHED = -1;

export class Pool {
  /** A request has one colour as long as the page is open: its number comes from the pool before. */
  constructor({ num_blocks, block_size }, before = null) {
    this.numBlocks = num_blocks; // the null block, which no sequence holds, counted
    this.blockSize = block_size;
    this.counts = new Int32Array(num_blocks);
    this.hashes = new Uint32Array(num_blocks);
    this.owners = new Uint32Array(num_blocks); // a request's number, from 1; of a cached one the last
    this.partial = new Map(); // of blocks that are not full: slots with tokens
    this.sequences = new Map(); // by seq_id
    this.requests = before?.requests ?? new Map(); // request_id to its number, which is its colour
    this.numRequests = before?.numRequests ?? 0;
    this.pinned = new Set();
    this.images = [];
    this.text = new Map(); // block to the text of each of its tokens
  }

  /**
   * Takes a frame in; gives the blocks that look different now, and which blocks were `taken` anew,
   * `found` with their content kept, `shared` by one more, made a copy (`copied`), or `freed`.
   */
  apply({ changes, text }) {
    const { blocks, tables, grown, gone, images, pinned, copies } = changes;
    const events = { taken: [], found: [], shared: [], copied: Object.keys(copies).map(Number), freed: [] };
    this.takeBlocks(blocks, events);
    const orphans = new Set(); // blocks that a sequence let go
    for (const id of gone) this.forget(id, orphans);
    for (const table of tables) this.takeTable(table, orphans);
    for (const [id, computed] of Object.entries(grown)) this.sequences.get(Number(id)).computed = computed;
    this.adopt(orphans);
    const changed = new Set([...blocks[0], ...orphans, ...this.takePartial()]);
    if (images) this.images = images;
    if (pinned) {
      for (const id of [...this.pinned, ...pinned]) changed.add(id);
      this.pinned = new Set(pinned);
    }
    for (const [id, words] of Object.entries(text)) this.text.set(Number(id), words);
    this.dropRequests();
    return { changed, events };
  }

  takeBlocks([ids, counts, hashes], events) {
    const copied = new Set(events.copied);
    ids.forEach((id, i) => {
      const before = this.counts[id];
      const now = counts[i];
      const isNew = before <= 0 && now > 0;
      if (before === CACHED && isNew && hashes[i] === this.hashes[id]) events.found.push(id);
      else if (isNew && !copied.has(id)) events.taken.push(id);
      if (now > 1 && now > before) events.shared.push(id);
      else if (before > 0 && now <= 0) events.freed.push(id);
      if (now === 0 || isNew) this.owners[id] = 0; // the sequence that takes it owns it
      if (now === 0 || (isNew && !hashes[i])) this.text.delete(id);
      this.counts[id] = now;
      this.hashes[id] = hashes[i];
    });
  }

  takeTable([id, request, index, status, prompt, computed, numKept, fresh, host], orphans) {
    const number = this.numberOf(request);
    const blocks = this.sequences.get(id)?.blocks ?? [];
    for (const block of blocks.splice(numKept)) orphans.add(block);
    for (const block of fresh) {
      blocks.push(block);
      // A prefix that others hold keeps its colour.
      if (this.counts[block] === 1 || !this.owners[block]) this.owners[block] = number;
    }
    this.sequences.set(id, { request, number, index, status, prompt, computed, blocks, host });
  }

  forget(id, orphans) {
    for (const block of this.sequences.get(id).blocks) orphans.add(block);
    this.sequences.delete(id);
  }

  /** Blocks that somebody let go of get the colour of one who holds them still. */
  adopt(orphans) {
    const lost = new Set([...orphans].filter((id) => this.counts[id] > 0));
    if (!lost.size) return;
    for (const { blocks, number } of this.sequences.values()) {
      for (const block of blocks) if (lost.has(block)) this.owners[block] = number;
    }
  }

  /** Counts anew how full the last blocks are; gives those that may look different now. */
  takePartial() {
    const before = this.partial;
    this.partial = new Map();
    for (const { blocks, computed } of this.sequences.values()) {
      const filled = computed % this.blockSize;
      if (filled && blocks.length) this.partial.set(blocks.at(-1), filled);
    }
    const either = [...before.keys(), ...this.partial.keys()];
    return either.filter((id) => before.get(id) !== this.partial.get(id));
  }

  numberOf(request) {
    if (!this.requests.has(request)) this.requests.set(request, ++this.numRequests);
    return this.requests.get(request);
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

  /** Blocks that somebody holds. */
  get numUsed() {
    return this.counts.reduce((sum, count) => sum + (count > 0), 0);
  }

  /** Entries of all block tables. */
  get numLogical() {
    return [...this.sequences.values()].reduce((sum, { blocks }) => sum + blocks.length, 0);
  }

  /** Slots of held blocks without a token. */
  get numWasted() {
    return [...this.partial.values()].reduce((sum, filled) => sum + this.blockSize - filled, 0);
  }

  /** Who holds a block: sequences, and its place in their tables. */
  holders(id) {
    const all = [...this.sequences.values()].map((sequence) => ({ sequence, place: sequence.blocks.indexOf(id) }));
    return all.filter(({ place }) => place >= 0);
  }

  /** A sentence about a block. */
  describe(id) {
    const count = this.counts[id];
    if (count === 0) return `Block ${id}: free.`;
    const parts = [`Block ${id}: ${count > 0 ? this.describeUse(id) : "free, its content kept for its prefix"}`];
    if (this.hashes[id]) parts.push(`hash ${this.hashes[id].toString(16).padStart(8, "0")}`);
    if (this.text.has(id)) parts.push(`text “${visible(this.text.get(id).join(""))}”`);
    return `${parts.join("; ")}.`;
  }

  describeUse(id) {
    const names = [...new Set(this.holders(id).map(({ sequence }) => nameOf(sequence)))];
    const more = names.length > 4 ? ` and ${names.length - 4} more` : "";
    const held = names.length ? `, held by ${names.slice(0, 4).join(", ")}${more}` : "";
    const use = this.counts[id] > 1 ? `shared by ${this.counts[id]}` : "used";
    const pinned = this.pinned.has(id) ? ", pinned" : "";
    return `${use}${held}${pinned}; ${this.filledSlots(id)} of ${this.blockSize} slots filled`;
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
