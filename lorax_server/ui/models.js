// The server's models, their memory tiers, and the selection.

import { getJson } from "./api.js";
import { browser } from "./storage.js";

const MAX_SELECTED = 6;
const MAX_QUERIED = 20; // names in a URL
const SELECTION = "models";
const STATES = { "on the device": "device", "in host memory": "host", "on disk": "disk", failed: "failed" };

export class Models {
  /** Calls `onChange` after any change. */
  constructor(onChange) {
    this.onChange = onChange;
    this.base = null;
    this.names = []; // adapters with a name
    this.added = new Set(); // adapters loaded by name on this page
    this.selected = [];
    this.adapters = []; // as the server lists them
    this.hasMore = false; // the server has more adapters than listed
    this.isFirst = true;
  }

  /** The base model first, then all known adapters. */
  get all() {
    const names = [this.base, ...this.names, ...this.added, ...this.adapters.map(({ id }) => id)];
    return [...new Set(names.filter((name) => name !== null))];
  }

  /** Shortens a folder path to its last component. */
  labelOf(model) {
    return model.startsWith("/") ? model.split("/").filter(Boolean).at(-1) : model;
  }

  /** Returns the label and the kind of a model. */
  describe(model) {
    return [this.labelOf(model), model === this.base ? "base model" : "adapter"];
  }

  /** Returns `{state, text, reason}`. `state` is base, device, host, disk, loading, failed or unknown. */
  statusOf(model) {
    if (model === this.base) return { state: "base", text: "base model" };
    const adapter = this.adapters.find(({ id }) => id === model);
    if (!adapter) return { state: "unknown", text: "" };
    const { state, error, warning } = adapter;
    return { state: STATES[state] ?? "loading", text: state, reason: error ?? warning ?? "" };
  }

  /** Selects the models that exist. "base" selects the base model. */
  select(names) {
    const all = new Set(this.all);
    const resolved = names.map((name) => (name === "base" && !all.has(name) ? this.base : name));
    this.#setSelected(resolved.filter((name) => all.has(name)).slice(0, MAX_SELECTED));
  }

  /** Returns an error message, or "". */
  toggle(name) {
    const isSelected = this.selected.includes(name);
    const isFull = !isSelected && this.selected.length >= MAX_SELECTED;
    if (isFull) return `Remove a model first: at most ${MAX_SELECTED} can be compared.`;
    this.#setSelected(isSelected ? this.selected.filter((each) => each !== name) : [...this.selected, name]);
    return "";
  }

  /** Adds and selects an adapter that the server does not list. */
  add(name) {
    if (!this.all.includes(name)) this.added.add(name);
    return this.selected.includes(name) ? "" : this.toggle(name);
  }

  async refresh() {
    const { data } = await getJson("v1/models");
    const before = this.base;
    this.base = data.find((model) => model.parent === null)?.id ?? null;
    this.names = data.filter((model) => model.parent !== null).map((model) => model.id);
    if (this.isFirst) this.select(browser.recall(SELECTION, []));
    else this.selected = this.selected.map((name) => (name === before ? this.base : name)); // it may have a new name
    this.isFirst = false;
    this.onChange();
  }

  /** Loads the first adapter page. If there are more, `search` finds others. */
  async refreshAdapters(search) {
    const sent = this.hasMore ? search : "";
    const unlisted = [...this.added].filter((name) => name !== this.base && !this.names.includes(name));
    const selected = this.hasMore ? this.selected.filter((name) => name !== this.base) : [];
    const names = [...new Set([...unlisted, ...selected])].slice(-MAX_QUERIED);
    const query = new URLSearchParams([...names.map((name) => ["also", name]), ...(sent ? [["search", sent]] : [])]);
    const { data, has_more } = await getJson(query.size ? `v1/adapters?${query}` : "v1/adapters");
    const ids = data.map(({ id }) => id).join("\n");
    const isSameQuery = !this.hasMore || query.toString() === this.query;
    const isOther = ids !== this.adapters.map(({ id }) => id).join("\n");
    Object.assign(this, { adapters: data, query: query.toString(), hasMore: Boolean(has_more) || sent !== "" });
    if (isOther && isSameQuery) await this.refresh(); // otherwise only the query has changed
    this.onChange();
  }

  /** Selects the base model and an adapter that works. */
  selectDefault() {
    const adapter = this.names.find((name) => this.statusOf(name).state !== "failed");
    this.select([this.base, adapter].filter((name) => name !== null && name !== undefined));
  }

  #setSelected(names) {
    this.selected = names;
    browser.remember(SELECTION, names);
    this.onChange();
  }
}
