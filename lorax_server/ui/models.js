// Model selection: toggle buttons for the base model and adapters, and a field for other adapter names.

import { UNAUTHORIZED, getJson } from "./api.js";
import { load } from "./ask.js";
import { button, byId, make } from "./dom.js";

const SHOWN = 24; // maximum number of unselected adapters shown
const CHOSEN_AT_FIRST = 2; // adapters selected in addition to the base model
export const MOST_NAMED = 20; // limit for names in a URL

export class Models {
  constructor(onChange, onLoading) {
    this.base = null;
    this.names = []; // adapter names
    this.loaded = new Set(); // loaded by name on this page
    this.chosen = new Set();
    this.loading = null; // AbortController of the running load
    this.onChange = onChange;
    this.onLoading = onLoading; // called when a load starts or ends
    this.form = byId("load");
    this.list = byId("models");
    this.field = byId("name");
    this.error = byId("load-error");
    this.field.addEventListener("input", () => this.#typed());
    this.form.addEventListener("submit", (event) => this.#load(event));
  }

  get isLoading() {
    return this.loading !== null;
  }

  stop() {
    this.loading?.abort();
  }

  get chosenInOrder() {
    return this.#all().filter((name) => this.chosen.has(name));
  }

  /** Shortens a folder path to its last component. */
  labelOf(model) {
    return model.startsWith("/") ? model.split("/").filter(Boolean).at(-1) : model;
  }

  /** Selected adapters, whether listed by the server or not. */
  get chosenAdapters() {
    return this.chosenInOrder.filter((name) => name !== this.base);
  }

  /** The most recent adapters that must be queried by name. */
  get named() {
    return this.#others().slice(-MOST_NAMED);
  }

  async refresh() {
    const { data } = await getJson("v1/models");
    const isFirst = !this.base && !this.names.length;
    const wasChosen = this.chosen.delete(this.base); // the base model may have a new name
    this.base = data.find((model) => model.parent === null)?.id ?? null;
    if (wasChosen && this.base !== null) this.chosen.add(this.base);
    this.names = data.filter((model) => model.parent !== null).map((model) => model.id);
    if (isFirst && !this.chosen.size) this.choose(this.#all().slice(0, CHOSEN_AT_FIRST + 1));
    this.#render();
  }

  /** Selects the names that exist. "base" selects the base model. */
  choose(names) {
    const all = new Set(this.#all());
    const known = names.map((name) => (name === "base" && !all.has("base") ? this.base : name));
    this.chosen = new Set(known.filter((name) => all.has(name)));
    this.#render();
  }

  #all() {
    return [...(this.base === null ? [] : [this.base]), ...this.names, ...this.#others()];
  }

  /** Adapters that the server does not list. */
  #others() {
    return [...this.loaded].filter((name) => name !== this.base && !this.names.includes(name));
  }

  #toggle(name) {
    if (!this.chosen.delete(name)) this.chosen.add(name);
    this.#render();
  }

  #render() {
    const wanted = this.field.value.trim().toLowerCase();
    const others = this.#all().filter((name) => !this.chosen.has(name) && name.toLowerCase().includes(wanted));
    const shown = new Set([...this.chosen, ...others.slice(0, SHOWN)]);
    const chips = this.#all().filter((name) => shown.has(name)).map((name) => this.#chip(name));
    const rest = others.length - SHOWN;
    const more = rest > 0 ? [make("span", { class: "note" }, `+ ${rest} more`)] : [];
    this.#replace(chips, more);
    const size = this.chosenInOrder.length;
    byId("models-note").textContent = size ? `${size} selected` : "select at least one";
    this.onChange();
  }

  /** Keeps the keyboard focus on the same chip. */
  #replace(chips, more) {
    const before = this.list.contains(document.activeElement) ? document.activeElement.dataset.model : null;
    this.list.replaceChildren(...chips, ...more);
    if (before === null) return;
    const chip = chips.find((each) => each.dataset.model === before) ?? chips[0];
    chip?.focus({ preventScroll: true });
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
    this.#showError("");
    this.#render();
  }

  async #load(event) {
    event.preventDefault();
    const name = this.field.value.trim();
    if (this.isLoading) return;
    if (!name) return this.#showError("Enter an adapter name.");
    this.#showError("");
    this.#setLoading(new AbortController());
    try {
      await load(name, this.loading.signal);
      this.#add(name);
    } catch (error) {
      if (error.name === "AbortError") this.error.textContent = "Stopped.";
      else this.#showError(error.status === UNAUTHORIZED ? "An API key is required." : error.message);
    }
    this.#setLoading(null);
  }

  #add(name) {
    this.loaded.add(name);
    this.chosen.add(name);
    this.field.value = "";
    this.#render();
  }

  #showError(message) {
    this.error.textContent = message;
    this.field.setAttribute("aria-invalid", String(Boolean(message)));
  }

  #setLoading(controller) {
    this.loading = controller;
    const control = this.form.querySelector("button");
    control.setAttribute("aria-disabled", String(this.isLoading)); // a disabled control would lose focus
    control.textContent = this.isLoading ? "Loading" : "Load";
    this.field.readOnly = this.isLoading;
    if (!this.isLoading && this.form.contains(document.activeElement)) this.field.focus();
    this.onLoading();
  }
}
