// JSON as a collapsible tree. All content is inserted as text.

import { make } from "./dom.js";

const DEPTH = 64; // deeper values are shown as text

/** Returns a tree for JSON text, or null if the text is not JSON. */
export function treeOf(text) {
  try {
    return branch(null, JSON.parse(text), 0);
  } catch (error) {
    if (error instanceof SyntaxError) return null;
    throw error;
  }
}

function branch(name, value, depth) {
  const label = name === null ? [] : [make("span", { class: "name" }, name), ": "];
  if (value === null || typeof value !== "object" || depth === DEPTH) {
    const leaf = make("span", { class: `of-${typeof value}` }, JSON.stringify(value));
    return make("div", { class: "leaf" }, ...label, leaf);
  }
  const entries = Object.entries(value);
  const summary = make("summary", {}, ...label, note(value, entries.length));
  return make("details", { open: true }, summary, ...entries.map(([key, child]) => branch(key, child, depth + 1)));
}

function note(value, count) {
  const what = Array.isArray(value) ? (count === 1 ? "item" : "items") : count === 1 ? "field" : "fields";
  return make("span", { class: "note" }, `${count} ${what}`);
}
