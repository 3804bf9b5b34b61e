// The activity panel: the speed of the latest completions, and the memory tier of each adapter.

import { byId, make } from "./dom.js";
import { bytes, count, milliseconds, rate } from "./format.js";

const MAX_SHOWN = 30; // adapters per tier
const TIERS = [
  { state: "failed", title: "Failed" },
  { state: "device", title: "On the device", isAlways: true },
  { state: "loading", title: "Loading" },
  { state: "host", title: "In host memory", isAlways: true },
  { state: "disk", title: "On disk", isAlways: true },
  { state: "unknown", title: "Not listed by the server" },
];

export class Activity {
  constructor(models, onFilter) {
    this.models = models;
    this.filter = byId("filter");
    this.filter.addEventListener("input", () => {
      this.render();
      onFilter();
    });
  }

  get wanted() {
    return this.filter.value.trim();
  }

  render() {
    const { models } = this;
    const listed = new Set(models.adapters.map(({ id }) => id));
    const others = models.selected.filter((id) => id !== models.base && !listed.has(id)).map((id) => ({ id }));
    const wanted = this.wanted.toLowerCase();
    const found = [...models.adapters, ...others].filter(({ id }) => id.toLowerCase().includes(wanted));
    const groups = Map.groupBy(found, ({ id }) => models.statusOf(id).state);
    const tiers = TIERS.filter(({ state, isAlways }) => isAlways || groups.has(state));
    byId("tiers").replaceChildren(...tiers.map((tier) => tierOf(tier, groups.get(tier.state) ?? [])));
    const running = models.adapters.reduce((sum, adapter) => sum + (adapter.requests ?? 0), 0);
    const known = count(listed.size, "adapter") + (models.hasMore ? " shown; search to find more" : "");
    byId("activity-note").textContent = `${known} · ${count(running, "request")} running`;
  }

  /** Shows the speed of the latest turn. */
  renderSpeeds(records) {
    const rows = records.map(({ label, rate: speed, firstMs, count: tokens }) => {
      const times = [speed === undefined ? "–" : rate(speed), firstMs === undefined ? "–" : milliseconds(firstMs)];
      const cells = [...times, tokens];
      return make("tr", {}, make("th", { scope: "row" }, label), ...cells.map((cell) => make("td", {}, String(cell))));
    });
    byId("speeds").replaceChildren(...rows);
    byId("speed-table").hidden = !rows.length;
    byId("speed-note").hidden = rows.length > 0;
  }
}

function tierOf({ state, title }, adapters) {
  const shown = [...adapters].sort(busiestFirst).slice(0, MAX_SHOWN);
  const size = adapters.reduce((sum, adapter) => sum + (adapter.bytes ?? 0), 0);
  const rest = adapters.length - shown.length;
  const items = shown.map(itemOf);
  if (rest) items.push(make("li", { class: "note" }, `and ${rest.toLocaleString("en")} more`));
  const total = adapters.length.toLocaleString("en") + (size ? ` · ${bytes(size)}` : "");
  const heading = make("h3", {}, make("span", { class: "dot" }), title, make("span", { class: "note" }, total));
  const list = make("ul", { "aria-label": title }, ...items);
  return make("div", { class: "tier", "data-state": state }, heading, ...(items.length ? [list] : []));
}

function itemOf({ id, state, bytes: size, uses, requests, pinned, error, warning }) {
  const isLoading = !["on the device", "in host memory", "on disk", "failed", undefined].includes(state);
  const facts = [size && bytes(size), uses && count(uses, "use"), pinned && "pinned", isLoading && state];
  const note = facts.filter(Boolean).join(" · ");
  return make(
    "li",
    { class: "resident", "data-adapter": id },
    make("span", { class: "name" }, id),
    requests > 0 && make("span", { class: "running" }, `${requests} running`),
    note && make("span", { class: "note" }, note),
    error ? make("span", { class: "error" }, error) : warning ? make("span", { class: "note" }, warning) : null,
  );
}

const busiestFirst = (a, b) =>
  (b.requests ?? 0) - (a.requests ?? 0) || (b.uses ?? 0) - (a.uses ?? 0) || (a.id < b.id ? -1 : 1);
