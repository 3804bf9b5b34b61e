// Browser storage, with an in-memory fallback if storage is disabled.

const PREFIX = "lorax-";

/** A browser storage with an in-memory copy. Access throws if storage is forbidden or full. */
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

/** Session storage, deleted when the tab closes. */
export const tab = new Shelf("sessionStorage");

export const remember = (name, value) => shelf.set(name, JSON.stringify(value));

export function recall(name, otherwise) {
  try {
    return JSON.parse(shelf.get(name)) ?? otherwise;
  } catch {
    return otherwise; // not written by this page
  }
}
