// Shows pool diffs immediately, at a chosen speed, or one by one.

const MAX_WAITING_DIFFS = 5000; // if more are waiting, the oldest are shown immediately

export class Player {
  /** `show(diffs)` draws pool diffs; `report(count)` gets the number of waiting diffs. */
  constructor(show, report) {
    this.show = show;
    this.report = report;
    this.speed = "live"; // "live" or steps per second; 0 is paused
    this.previousSpeed = "live"; // speed before the pause
    this.waiting = [];
    this.nextTime = 0;
  }

  clear() {
    this.waiting = [];
    this.report(0);
  }

  push(diffs) {
    this.waiting.push(...diffs);
    // A hidden page gets no animation frames, so show the diffs now.
    const maxWaiting = document.hidden && this.speed === "live" ? 0 : MAX_WAITING_DIFFS;
    if (this.waiting.length > maxWaiting) this.showNext(this.waiting.length - maxWaiting);
    this.schedule();
  }

  setSpeed(speed) {
    if (this.speed !== 0) this.previousSpeed = this.speed;
    this.speed = speed === "live" ? speed : Number(speed);
    this.nextTime = 0;
    this.schedule();
  }

  /** The speed after the pause is toggled. */
  get toggledSpeed() {
    return this.speed === 0 ? this.previousSpeed : 0;
  }

  step() {
    if (this.waiting.length) this.showNext(1);
  }

  schedule() {
    if (!this.pending && this.waiting.length && this.speed !== 0) {
      this.pending = requestAnimationFrame((now) => this.onAnimationFrame(now));
    }
    this.report(this.waiting.length);
  }

  onAnimationFrame(now) {
    this.pending = 0;
    if (this.speed === "live") this.showNext(this.waiting.length);
    else if (this.speed && now >= this.nextTime) {
      this.nextTime = now + 1000 / this.speed;
      this.showNext(1);
    }
    this.schedule();
  }

  showNext(count) {
    this.show(this.waiting.splice(0, count));
    this.report(this.waiting.length);
  }
}
