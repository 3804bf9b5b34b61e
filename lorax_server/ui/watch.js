// Looks every now and then: often while something happens, seldom otherwise, never while nobody sees the page.

const BUSY_MS = 1000;
const IDLE_MS = 5000;

export class Watch {
  /** `look` is awaited, and never rejects. */
  constructor(look, isBusy) {
    this.look = look;
    this.isBusy = isBusy;
    this.isLooking = false;
    this.isDue = false;
    document.addEventListener("visibilitychange", () => this.poke());
  }

  /** Now, and from then on. While a look is under way: once more after it. */
  async poke() {
    if (this.isLooking) {
      this.isDue = true;
      return;
    }
    clearTimeout(this.timer);
    if (document.visibilityState === "hidden") return; // until it is seen again
    this.isLooking = true;
    await this.look();
    this.isLooking = false;
    this.timer = setTimeout(() => this.poke(), this.isDue ? 0 : this.isBusy() ? BUSY_MS : IDLE_MS);
    this.isDue = false;
  }
}
