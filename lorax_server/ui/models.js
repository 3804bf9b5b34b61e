// Who answers: the base model and adapters as buttons that are on or off, and a field for any other adapter.

import { UNAUTHORIZED, getJson } from "./api.js";
import { load } from "./ask.js";
import { button, byId, make } from "./dom.js";

const SHOWN = 24; // of those that are not chosen
const CHOSEN_AT_FIRST = 2; // beside the base model

export class Models {
  constructor(onChange) {
    this.base = null;
    this.names = []; // of adapters
    this.loaded = new Set(); // that were asked for by name here
    this.chosen = new Set();
    this.onChange = onChange;
    this.list = byId("models");
    this.field = byId("name");
    this.error = byId("load-error");
    this.field.addEventListener("input", () => this.#typed());
    byId("load").addEventListener("submit", (event) => this.#load(event));
  }

  get chosenInOrder() {
    return this.#all().filter((name) => this.chosen.has(name));
  }

  /** A model that is called by its folder is shown by the folder's last name. */
  labelOf(model) {
    return model.startsWith("/") ? model.split("/").filter(Boolean).at(-1) : model;
  }

  /** Adapters that are wanted, whether the server lists them or not. */
  get chosenAdapters() {
    return this.chosenInOrder.filter((name) => name !== this.base);
  }

  async refresh() {
    const { data } = await getJson("v1/models");
    const isFirst = !this.base && !this.names.length;
    this.base = data.find((model) => model.parent === null)?.id ?? null;
    this.names = data.filter((model) => model.parent !== null).map((model) => model.id);
    if (isFirst && !this.chosen.size) this.choose(this.#all().slice(0, CHOSEN_AT_FIRST + 1));
    this.#render();
  }

  /** Those of the names that there are; "base" is the base model, whatever it is called. */
  choose(names) {
    const all = new Set(this.#all());
    const known = names.map((name) => (name === "base" && !all.has("base") ? this.base : name));
    this.chosen = new Set(known.filter((name) => all.has(name)));
    this.#render();
  }

  #all() {
    const others = [...this.loaded].filter((name) => !this.names.includes(name));
    return [...(this.base === null ? [] : [this.base]), ...this.names, ...others];
  }

  #toggle(name) {
    if (!this.chosen.delete(name)) this.chosen.add(name);
    this.#render();
    [...this.list.children].find((chip) => chip.dataset.model === name)?.focus(); // it is another element now
  }

  #render() {
    const wanted = this.field.value.trim().toLowerCase();
    const others = this.#all().filter((name) => !this.chosen.has(name) && name.toLowerCase().includes(wanted));
    const shown = new Set([...this.chosen, ...others.slice(0, SHOWN)]);
    const chips = this.#all().filter((name) => shown.has(name)).map((name) => this.#chip(name));
    const rest = others.length - SHOWN;
    this.list.replaceChildren(...chips, ...(rest > 0 ? [make("span", { class: "note" }, `+ ${rest} more`)] : []));
    const size = this.chosenInOrder.length;
    byId("models-note").textContent = size ? `${size} chosen` : "choose at least one";
    this.onChange();
  }

  #chip(name) {
    const label = this.labelOf(name);
    return button(name === this.base ? `${label} (base)` : label, () => this.#toggle(name), {
      class: "chip",
      "data-model": name,
      "aria-pressed": String(this.chosen.has(name)),
    });
  }

  #typed() {
    this.#refuse("");
    this.#render();
  }

  async #load(event) {
    event.preventDefault();
    const name = this.field.value.trim();
    if (!name) return this.#refuse("Type the name of an adapter.");
    this.#refuse("");
    this.#setBusy(true);
    try {
      await load(name);
      this.#add(name);
    } catch (error) {
      this.#refuse(error.status === UNAUTHORIZED ? "An API key is needed first." : error.message);
    }
    this.#setBusy(false);
  }

  #add(name) {
    this.loaded.add(name);
    this.chosen.add(name);
    this.field.value = "";
    this.#render();
  }

  #refuse(message) {
    this.error.textContent = message;
    this.field.setAttribute("aria-invalid", String(Boolean(message)));
  }

  #setBusy(isBusy) {
    const control = byId("load").querySelector("button");
    control.disabled = isBusy;
    control.textContent = isBusy ? "Loading" : "Load";
    this.field.readOnly = isBusy;
    if (!isBusy) this.field.focus();
  }
}
