// The selected models as chips, and a searchable list of all models.

import { UNAUTHORIZED } from "./api.js";
import { load } from "./completion.js";
import { announce, button, byId, make } from "./dom.js";

const MAX_SHOWN = 60; // list items; longer lists are searched
const GAP_PX = 6;

export class ModelPicker {
  /** Calls `onSearch` when the search text changes, and `onLoading` when a load starts or ends. */
  constructor(models, { onSearch, onLoading }) {
    Object.assign(this, { models, onSearch, onLoading });
    [this.popup, this.field, this.list] = ["picker", "search", "options"].map(byId);
    this.active = 0; // index of the list item that Enter toggles
    this.loading = null; // AbortController of the running load
    this.popup.addEventListener("toggle", (event) => this.#toggled(event.newState === "open"));
    this.field.addEventListener("input", () => this.#searched());
    this.field.addEventListener("keydown", (event) => this.#pressed(event));
    this.list.addEventListener("pointerdown", (event) => event.preventDefault()); // keeps the focus in the field
    this.list.addEventListener("click", (event) => this.#act(event.target.closest("[role=option]")));
    byId("load-cancel").addEventListener("click", () => this.stop());
  }

  get isLoading() {
    return this.loading !== null;
  }

  get isOpen() {
    return this.popup.matches(":popover-open");
  }

  get wanted() {
    return this.field.value.trim();
  }

  stop() {
    this.loading?.abort();
  }

  render() {
    this.#renderChips();
    if (this.isOpen) this.#renderOptions();
  }

  // --- Chips --------------------------------------------------------------------------------------------------------

  #renderChips() {
    const bar = byId("models");
    const focused = bar.contains(document.activeElement) ? document.activeElement.parentElement.dataset.model : null;
    const chips = this.models.selected.map((name) => this.#chip(name));
    bar.replaceChildren(...chips);
    byId("models-open").textContent = chips.length ? "Add model" : "Choose a model";
    if (focused === null) return;
    const again = chips.find((chip) => chip.dataset.model === focused);
    (again?.querySelector("button") ?? byId("models-open")).focus({ preventScroll: true });
  }

  #chip(name) {
    const label = this.models.labelOf(name);
    const { state, text, reason } = this.models.statusOf(name);
    const status = make("span", { class: "unseen" }, ` (${text || "not listed"})`);
    const failed = state === "failed" && make("span", { class: "flag", "aria-hidden": "true" }, "failed");
    const title = [text, reason].filter(Boolean).join(": ");
    const remove = button("✕", () => this.models.toggle(name), { class: "icon", "aria-label": `Remove ${label}` });
    const content = [make("span", { class: "dot" }), make("span", { class: "name" }, label), failed, status, remove];
    return make("li", { class: "chip", "data-model": name, "data-state": state, title }, ...content);
  }

  // --- List ---------------------------------------------------------------------------------------------------------

  #toggled(isOpen) {
    byId("models-open").setAttribute("aria-expanded", String(isOpen));
    if (!isOpen) return this.onSearch();
    const { left, bottom } = byId("models-open").getBoundingClientRect();
    const width = this.popup.offsetWidth;
    this.popup.style.top = `${bottom + GAP_PX}px`;
    this.popup.style.left = `${Math.max(GAP_PX, Math.min(left, innerWidth - width - GAP_PX))}px`;
    this.active = 0;
    this.field.value = "";
    this.#showError("");
    this.#renderOptions();
    this.field.focus();
  }

  #searched() {
    this.active = 0;
    this.#showError("");
    this.#renderOptions();
    this.onSearch();
  }

  #renderOptions() {
    const { models, wanted } = this;
    const found = models.all.filter((name) => name.toLowerCase().includes(wanted.toLowerCase()));
    const options = found.slice(0, MAX_SHOWN).map((name) => this.#option(name));
    if (wanted && !models.all.includes(wanted)) options.push(this.#loadOption(wanted));
    options.forEach((option, i) => (option.id = `option-${i}`));
    const scroll = this.list.scrollTop;
    this.list.replaceChildren(...options);
    this.list.scrollTop = scroll; // replaced while the user reads
    this.#setActive(Math.min(this.active, options.length - 1), false);
    const isPartial = models.hasMore || found.length > MAX_SHOWN;
    const number = found.length.toLocaleString("en") + (models.hasMore ? "+" : "");
    const note = isPartial ? `${number} models. Type to search.` : `${number} of ${models.all.length} models.`;
    announce(byId("picker-note"), note);
  }

  #option(name) {
    const { state, text, reason } = this.models.statusOf(name);
    const isSelected = this.models.selected.includes(name);
    const label = make("span", { class: "name" }, this.models.labelOf(name));
    const status = make("span", { class: "status" }, make("span", { class: "dot" }), text || "not listed");
    const why = reason && make("span", { class: "reason" }, reason);
    const attributes = { role: "option", "aria-selected": String(isSelected), "data-model": name, "data-state": state };
    return make("li", attributes, label, status, why || null);
  }

  #loadOption(name) {
    const text = `Load the adapter “${name}”`;
    return make("li", { role: "option", class: "load", "aria-selected": "false", "data-load": name }, text);
  }

  #setActive(place, isScrolled = true) {
    const options = [...this.list.children];
    this.active = Math.max(0, place);
    options.forEach((option, i) => option.classList.toggle("active", i === this.active));
    const option = options[this.active];
    if (!option) return this.field.removeAttribute("aria-activedescendant");
    this.field.setAttribute("aria-activedescendant", option.id);
    if (isScrolled) option.scrollIntoView({ block: "nearest" });
  }

  #pressed(event) {
    const last = this.list.children.length - 1;
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 8, PageUp: -8 }[event.key];
    if (event.key === "Enter") this.#act(this.list.children[this.active]);
    else if (step) this.#setActive(Math.min(Math.max(this.active + step, 0), last));
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  #act(option) {
    if (!option) return;
    if (option.dataset.load) return this.#load(option.dataset.load);
    this.active = [...this.list.children].indexOf(option);
    this.#showError(this.models.toggle(option.dataset.model));
  }

  // --- Loading ------------------------------------------------------------------------------------------------------

  async #load(name) {
    if (this.isLoading) return;
    this.#showError("");
    this.#setLoading(new AbortController(), name);
    try {
      await load(name, this.loading.signal);
      if (this.wanted === name) this.field.value = "";
      this.#showError(this.models.add(name));
    } catch (error) {
      if (error.name === "AbortError") this.#showError("Loading was cancelled.");
      else this.#showError(error.status === UNAUTHORIZED ? "This server requires an API key." : error.message);
    }
    this.#setLoading(null, name);
  }

  #setLoading(controller, name) {
    this.loading = controller;
    byId("loading").hidden = !this.isLoading;
    announce(byId("loading-note"), this.isLoading ? `Loading ${name} …` : "");
    this.onLoading();
  }

  #showError(message) {
    announce(byId("picker-error"), message);
  }
}
