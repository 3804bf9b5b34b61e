// Browser storage, with an in-memory fallback if storage is disabled or full.

const PREFIX = "lorax-";

class SafeStorage {
  constructor(kind) {
    this.kind = kind;
    this.copy = new Map();
  }

  get(name) {
    if (this.copy.has(name)) return this.copy.get(name);
    return this.#try((storage) => storage.getItem(PREFIX + name)) ?? null;
  }

  set(name, text) {
    this.copy.set(name, text);
    this.#try((storage) => storage.setItem(PREFIX + name, text));
  }

  remove(name) {
    this.copy.delete(name);
    this.#try((storage) => storage.removeItem(PREFIX + name));
  }

  remember(name, value) {
    this.set(name, JSON.stringify(value));
  }

  recall(name, otherwise) {
    try {
      return JSON.parse(this.get(name)) ?? otherwise;
    } catch {
      return otherwise; // not written by this page
    }
  }

  #try(act) {
    try {
      return act(window[this.kind]);
    } catch {
      return null;
    }
  }
}

/** Kept until the user clears it. */
export const browser = new SafeStorage("localStorage");

/** Deleted when the tab closes. */
export const tab = new SafeStorage("sessionStorage");
