// Adapter tiers: one lane per tier and one chip per adapter. Chips move with their adapters.

import { byId, make } from "./dom.js";
import { bytes, count } from "./numbers.js";

const SHOWN = 24; // maximum chips per lane
const MOVING = "on the way";
const UNSEEN = "not shown";
const LANES = [
  { place: "on the device", title: "On the device", isAlways: true },
  { place: MOVING, title: "On the way" },
  { place: "in host memory", title: "In host memory", isAlways: true },
  { place: "on disk", title: "On disk", isAlways: true },
  { place: "failed", title: "Failed" },
  { place: UNSEEN, title: "Elsewhere", note: "The server does not list these adapters." },
];

export class Residency {
  constructor(onFilter) {
    this.adapters = [];
    this.hasMore = false; // the server has more adapters than listed
    this.chips = new Map(); // by adapter
    this.lanes = new Map(LANES.map((lane) => [lane.place, makeLane(lane)]));
    byId("lanes").append(...[...this.lanes.values()].map((lane) => lane.element));
    this.filter = byId("filter");
    this.filter.addEventListener("input", () => {
      this.#render();
      onFilter();
    });
  }

  /** Shows the server's adapter list and the names of other selected adapters. */
  show(adapters, chosen, hasMore) {
    this.hasMore = hasMore;
    const listed = new Set(adapters.map((adapter) => adapter.id));
    const others = chosen.filter((name) => !listed.has(name)).map((id) => ({ id, state: UNSEEN }));
    this.adapters = [...adapters, ...others];
    this.#render();
  }

  placeOf(name) {
    const state = this.adapters.find((adapter) => adapter.id === name)?.state;
    return state === UNSEEN ? undefined : state;
  }

  get wanted() {
    return this.filter.value.trim().toLowerCase();
  }

  #render() {
    const wanted = this.wanted;
    const found = this.adapters.filter((adapter) => adapter.id.toLowerCase().includes(wanted));
    const before = this.#positions();
    const shown = new Map();
    for (const { place, isAlways } of LANES) {
      const here = found.filter((adapter) => laneOf(adapter) === place);
      this.#fill(this.lanes.get(place), here, shown, isAlways);
    }
    this.chips = shown;
    this.#move(before);
    const running = this.adapters.reduce((sum, adapter) => sum + (adapter.requests ?? 0), 0);
    const known = this.hasMore ? "shown; use the filter to find more" : "known";
    byId("residency-note").textContent = `${this.adapters.length} ${known} · ${count(running, "request")} running`;
  }

  #fill(lane, adapters, shown, isAlways) {
    const first = adapters.sort(busiestFirst).slice(0, SHOWN);
    lane.element.hidden = !isAlways && !adapters.length;
    lane.count.textContent = String(adapters.length);
    const size = adapters.reduce((sum, adapter) => sum + (adapter.bytes ?? 0), 0);
    lane.bytes.textContent = size ? bytes(size) : "";
    const chips = first.map((adapter) => {
      const key = `${adapter.source ?? ""} ${adapter.id}`;
      const chip = this.chips.get(key) ?? make("li", { class: "resident" });
      shown.set(key, chip);
      describe(chip, adapter);
      return chip;
    });
    const rest = adapters.length - first.length;
    const more = rest ? [make("li", { class: "note" }, `+ ${rest.toLocaleString("en")} more`)] : [];
    const none = adapters.length ? [] : [make("li", { class: "note" }, "none")];
    lane.list.replaceChildren(...chips, ...more, ...none);
  }

  #positions() {
    const here = (chip) => ({ lane: chip.parentElement, at: chip.getBoundingClientRect() });
    return new Map([...this.chips.values()].map((chip) => [chip, here(chip)]));
  }

  /** Animates a chip from its old lane to its new lane. */
  #move(before) {
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    for (const chip of this.chips.values()) {
      const was = before.get(chip);
      if (!was || was.lane === chip.parentElement) continue;
      const now = chip.getBoundingClientRect();
      const from = `translate(${was.at.left - now.left}px, ${was.at.top - now.top}px)`;
      chip.animate([{ transform: from }, { transform: "none" }], { duration: 450, easing: "ease-out" });
    }
  }
}

function makeLane({ place, title, note }) {
  const counted = make("span", { class: "count" }, "0");
  const size = make("span", { class: "note" });
  const list = make("ul", { class: "chips", "aria-label": title });
  const heading = make("h3", {}, title, counted, size);
  const notes = note ? [make("p", { class: "note" }, note)] : [];
  const element = make("div", { class: "lane", "data-place": place }, heading, ...notes, list);
  return { element, list, count: counted, bytes: size };
}

function laneOf({ state }) {
  return LANES.some((lane) => lane.place === state) ? state : MOVING;
}

const busiestFirst = (a, b) =>
  (b.requests ?? 0) - (a.requests ?? 0) || (b.uses ?? 0) - (a.uses ?? 0) || (a.id < b.id ? -1 : 1);

function describe(chip, { id, state, bytes: size, uses, requests, pinned, error }) {
  const isMoving = laneOf({ state }) === MOVING;
  const facts = [size && bytes(size), uses && count(uses, "use"), pinned && "pinned", isMoving && state, error];
  chip.dataset.adapter = id;
  chip.classList.toggle("busy", requests > 0);
  const parts = [make("span", { class: "name" }, id)];
  if (facts.some(Boolean)) parts.push(make("span", { class: "note" }, facts.filter(Boolean).join(" · ")));
  if (requests > 0) parts.push(make("span", { class: "running" }, `${requests} running`));
  chip.replaceChildren(...parts);
}
