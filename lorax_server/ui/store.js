// What this browser remembers. One that may not remember anything works all the same, until the page is closed.

const PREFIX = "lorax-";

/** One of the browser's storages, and a copy for where that is full or forbidden: then even to name it throws. */
class Shelf {
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

  #try(act) {
    try {
      return act(window[this.kind]);
    } catch {
      return null;
    }
  }
}

const shelf = new Shelf("localStorage");

/** A tab's own: what is there is gone with the tab. */
export const tab = new Shelf("sessionStorage");

export const remember = (name, value) => shelf.set(name, JSON.stringify(value));

export function recall(name, otherwise) {
  try {
    return JSON.parse(shelf.get(name)) ?? otherwise;
  } catch {
    return otherwise; // somebody else wrote it
  }
}
