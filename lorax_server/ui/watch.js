// Polls the server: often during activity, rarely when idle, never while the page is hidden.

const BUSY_MS = 1000;
const IDLE_MS = 5000;

export class Watch {
  /** `look` is awaited and must not reject. */
  constructor(look, isBusy) {
    this.look = look;
    this.isBusy = isBusy;
    this.isLooking = false;
    this.isDue = false;
    document.addEventListener("visibilitychange", () => this.poke());
  }

  /** Polls now and schedules the next poll. During a poll, schedules another one after it. */
  async poke() {
    if (this.isLooking) {
      this.isDue = true;
      return;
    }
    clearTimeout(this.timer);
    if (document.visibilityState === "hidden") return; // until the page is visible again
    this.isLooking = true;
    await this.look();
    this.isLooking = false;
    this.timer = setTimeout(() => this.poke(), this.isDue ? 0 : this.isBusy() ? BUSY_MS : IDLE_MS);
    this.isDue = false;
  }
}
