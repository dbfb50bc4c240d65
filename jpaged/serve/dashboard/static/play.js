// Frames at the pace that is wanted: as they come, slower, or one by one.

const MAX_WAITING = 5000; // frames; of more, the oldest are shown at once

export class Player {
  /** `show(frames)` draws them, as one picture; `report(count)` says how many are yet to come. */
  constructor(show, report) {
    this.show = show;
    this.report = report;
    this.pace = "live"; // or steps a second, 0 for none
    this.paceBefore = "live"; // it was stopped
    this.waiting = [];
    this.due = 0;
  }

  clear() {
    this.waiting = [];
    this.report(0);
  }

  push(frames) {
    this.waiting.push(...frames);
    // Out of sight nothing is drawn, and nothing needs to wait for it.
    const most = document.hidden && this.pace === "live" ? 0 : MAX_WAITING;
    if (this.waiting.length > most) this.take(this.waiting.length - most);
    this.schedule();
  }

  setPace(pace) {
    if (this.pace !== 0) this.paceBefore = this.pace;
    this.pace = pace === "live" ? pace : Number(pace);
    this.due = 0;
    this.schedule();
  }

  /** The pace to stop, or to go on at as before. */
  get otherPace() {
    return this.pace === 0 ? this.paceBefore : 0;
  }

  step() {
    if (this.waiting.length) this.take(1);
  }

  schedule() {
    if (!this.pending && this.waiting.length && this.pace !== 0) {
      this.pending = requestAnimationFrame((now) => this.go(now));
    }
    this.report(this.waiting.length);
  }

  go(now) {
    this.pending = 0;
    if (this.pace === "live") this.take(this.waiting.length);
    else if (this.pace && now >= this.due) {
      this.due = now + 1000 / this.pace;
      this.take(1);
    }
    this.schedule();
  }

  take(count) {
    this.show(this.waiting.splice(0, count));
    this.report(this.waiting.length);
  }
}
