// State of the pool, updated by pool diffs: how often and by which sequences each block is held.
// A diff is a `PoolDiff` of serve/engine/messages.py; observe/pool_changes.py documents its changes.

export const CACHED = -1;

export class Pool {
  /** Takes the numbers of requests, which are their colours, from the previous pool `before`. */
  constructor({ num_blocks, block_size }, before = null) {
    this.numBlocks = num_blocks; // includes the null block
    this.blockSize = block_size;
    this.counts = new Int32Array(num_blocks);
    this.hashes = new Uint32Array(num_blocks);
    this.owners = new Uint32Array(num_blocks); // number of the request, from 1; last owner of a cached block
    this.partial = new Map(); // partly filled block to its number of filled slots
    this.sequences = new Map(); // by seq_id
    this.requests = before?.requests ?? new Map(); // request_id to number
    this.numRequests = before?.numRequests ?? 0;
    this.pinned = new Set();
    this.swapEntries = [];
    this.text = new Map(); // block to the texts of its tokens
  }

  /**
   * Applies a pool diff. Returns the blocks to redraw, and the blocks that were newly allocated
   * (`taken`), `found` in the prefix cache, `shared` once more, created as copies (`copied`), or
   * `freed`.
   */
  apply({ changes, text }) {
    const { blocks, tables, grown, gone, swap_entries, pinned, copies } = changes;
    const events = { taken: [], found: [], shared: [], copied: Object.keys(copies).map(Number), freed: [] };
    this.applyBlocks(blocks, events);
    const orphans = new Set(); // blocks that a sequence no longer holds
    for (const id of gone) this.removeSequence(id, orphans);
    for (const table of tables) this.applyTable(table, orphans);
    for (const [id, computed] of Object.entries(grown)) this.sequences.get(Number(id)).computed = computed;
    this.updateOwners(orphans);
    const changed = new Set([...blocks[0], ...orphans, ...this.updatePartial()]);
    if (swap_entries) this.swapEntries = swap_entries;
    if (pinned) {
      for (const id of [...this.pinned, ...pinned]) changed.add(id);
      this.pinned = new Set(pinned);
    }
    for (const [id, words] of Object.entries(text)) this.text.set(Number(id), words);
    this.dropRequests();
    return { changed, events };
  }

  applyBlocks([ids, counts, hashes], events) {
    const copied = new Set(events.copied);
    ids.forEach((id, i) => {
      const before = this.counts[id];
      const now = counts[i];
      const isNew = before <= 0 && now > 0;
      if (before === CACHED && isNew && hashes[i] === this.hashes[id]) events.found.push(id);
      else if (isNew && !copied.has(id)) events.taken.push(id);
      if (now > 1 && now > before) events.shared.push(id);
      else if (before > 0 && now <= 0) events.freed.push(id);
      if (now === 0 || isNew) this.owners[id] = 0; // the sequence that takes the block becomes the owner
      if (now === 0 || (isNew && !hashes[i])) this.text.delete(id);
      this.counts[id] = now;
      this.hashes[id] = hashes[i];
    });
  }

  applyTable([id, request, index, status, prompt, computed, numKept, fresh, host], orphans) {
    const number = this.requestNumber(request);
    const blocks = this.sequences.get(id)?.blocks ?? [];
    for (const block of blocks.splice(numKept)) orphans.add(block);
    for (const block of fresh) {
      blocks.push(block);
      // Blocks of a shared prefix keep their colour.
      if (this.counts[block] === 1 || !this.owners[block]) this.owners[block] = number;
    }
    this.sequences.set(id, { request, number, index, status, prompt, computed, blocks, host });
  }

  removeSequence(id, orphans) {
    for (const block of this.sequences.get(id).blocks) orphans.add(block);
    this.sequences.delete(id);
  }

  /** Gives each orphan that is still held the colour of a sequence that holds the block. */
  updateOwners(orphans) {
    const toRecolour = new Set([...orphans].filter((id) => this.counts[id] > 0));
    if (!toRecolour.size) return;
    for (const { blocks, number } of this.sequences.values()) {
      for (const block of blocks) if (toRecolour.has(block)) this.owners[block] = number;
    }
  }

  /** Recounts the slots of blocks that are not full; returns the blocks whose count changed. */
  updatePartial() {
    const before = this.partial;
    this.partial = new Map();
    for (const { blocks, computed } of this.sequences.values()) {
      const numFull = Math.floor(computed / this.blockSize);
      blocks.slice(numFull).forEach((block, i) => this.partial.set(block, i ? 0 : computed % this.blockSize));
    }
    const ids = [...before.keys(), ...this.partial.keys()];
    return ids.filter((id) => before.get(id) !== this.partial.get(id));
  }

  requestNumber(request) {
    if (!this.requests.has(request)) this.requests.set(request, ++this.numRequests);
    return this.requests.get(request);
  }

  /** Forgets requests without blocks if there are many. Until then, each request keeps its colour. */
  dropRequests() {
    if (this.requests.size < 4096) return;
    const held = new Set([...this.sequences.values()].map((s) => s.request));
    for (const request of this.requests.keys()) if (!held.has(request)) this.requests.delete(request);
  }

  filledSlots(id) {
    if (this.counts[id] === 0) return 0;
    return this.partial.get(id) ?? this.blockSize;
  }

  /** Number of blocks that sequences or pins hold. */
  get numUsed() {
    return this.counts.reduce((sum, count) => sum + (count > 0), 0);
  }

  /** Number of entries in all block tables. */
  get numLogical() {
    return [...this.sequences.values()].reduce((sum, { blocks }) => sum + blocks.length, 0);
  }

  /** Number of empty slots in the blocks in use. */
  get numWasted() {
    return [...this.partial.values()].reduce((sum, filled) => sum + this.blockSize - filled, 0);
  }

  /** Returns the sequences that hold a block, and its position in their block tables. */
  holders(id) {
    return [...this.sequences.values()]
      .map((sequence) => ({ sequence, position: sequence.blocks.indexOf(id) }))
      .filter(({ position }) => position >= 0);
  }

  /** Returns a sentence about a block. */
  describe(id) {
    const count = this.counts[id];
    if (count === 0) return `Block ${id}: free.`;
    const parts = [`Block ${id}: ${count > 0 ? this.describeUse(id) : "free, kept in the prefix cache"}`];
    if (this.hashes[id]) parts.push(`hash ${this.hashes[id].toString(16).padStart(8, "0")}`);
    if (this.text.has(id)) parts.push(`text “${showControlCharacters(this.text.get(id).join(""))}”`);
    return `${parts.join("; ")}.`;
  }

  describeUse(id) {
    const names = [...new Set(this.holders(id).map(({ sequence }) => sequenceName(sequence)))];
    const more = names.length > 4 ? ` and ${names.length - 4} more` : "";
    const held = names.length ? `, held by ${names.slice(0, 4).join(", ")}${more}` : "";
    const use = this.counts[id] > 1 ? `shared by ${this.counts[id]}` : "used";
    const pinned = this.pinned.has(id) ? ", pinned" : "";
    return `${use}${held}${pinned}; ${this.filledSlots(id)} of ${this.blockSize} slots filled`;
  }
}

/** Replaces characters that break lines or change the text direction by visible ones. */
export function showControlCharacters(text) {
  const marks = text.replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  return marks.replace(/[\p{Cc}\u200e\u200f\u202a-\u202e\u2066-\u2069]/gu, "·");
}

export function sequenceName({ request, index }) {
  const short = request.length > 20 ? `${request.slice(0, 11)}…${request.slice(-4)}` : request;
  return index ? `${short} #${index}` : short;
}
