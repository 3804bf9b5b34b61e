// Polls the server: often during requests, rarely when idle, never while the page is hidden.

const BUSY_MS = 1000;
const IDLE_MS = 5000;

export class Polling {
  /** `poll` is awaited and must not reject. */
  constructor(poll, isBusy) {
    this.poll = poll;
    this.isBusy = isBusy;
    this.isPolling = false;
    this.isDue = false;
    document.addEventListener("visibilitychange", () => this.now());
  }

  /** Polls now and schedules the next poll. During a poll, schedules another one after it. */
  async now() {
    if (this.isPolling) {
      this.isDue = true;
      return;
    }
    clearTimeout(this.timer);
    if (document.visibilityState === "hidden") return; // until the page is visible again
    this.isPolling = true;
    await this.poll();
    this.isPolling = false;
    this.timer = setTimeout(() => this.now(), this.isDue ? 0 : this.isBusy() ? BUSY_MS : IDLE_MS);
    this.isDue = false;
  }
}
