// The page: prompt, model selection, completions and server status.

import { UNAUTHORIZED, UNREACHABLE, getJson } from "./api.js";
import { forgetTemplates } from "./ask.js";
import { Column } from "./column.js";
import { button, byId, make } from "./dom.js";
import { startKey } from "./key.js";
import { MOST_NAMED, Models } from "./models.js";
import { Parameters } from "./parameters.js";
import { Residency } from "./residency.js";
import { recall, remember } from "./store.js";
import { startTheme } from "./theme.js";
import { Tooltip } from "./tooltip.js";
import { Watch } from "./watch.js";

const tooltip = new Tooltip(byId("tooltip"));
const parameters = new Parameters();
const residency = new Residency(() => hasMore && watch.poke());
let listed = []; // last adapter list from the server
let hasMore = false; // the server has more adapters than listed
let lastAsked = ""; // last adapter list query
let running = null; // AbortController of running requests
let isKnown = false; // server info is loaded

const models = new Models(showAdapters, showBusy);
const watch = new Watch(look, isBusy);
const closeKeyForm = startKey(() => watch.poke());

// --- Requests --------------------------------------------------------------------------------------------------------

async function send() {
  const prompt = byId("prompt").value;
  const asked = parameters.read();
  const chosen = models.chosenInOrder;
  const problem = !prompt.trim() ? "Enter a prompt." : !chosen.length ? "Select a model." : "";
  byId("prompt-error").textContent = problem;
  if (problem || !asked) return;
  running?.abort();
  const mine = new AbortController();
  setRunning(mine);
  const columns = chosen.map(makeColumn);
  tooltip.hide(); // its token is removed
  byId("status").textContent = "";
  byId("columns").replaceChildren(...columns.map((column) => column.element));
  const ends = await Promise.all(columns.map((column) => run(column, prompt, asked, mine.signal)));
  if (running !== mine) return;
  setRunning(null);
  byId("status").textContent = ends.join("; "); // screen readers announce only the last of several updates
}

async function run(column, ...question) {
  const end = await column.run(...question);
  watch.poke();
  return end;
}

function makeColumn(model) {
  const kind = model === models.base ? "base model" : "adapter";
  const place = residency.placeOf(model);
  return new Column({ model, label: models.labelOf(model), kind: place ? `${kind}, was ${place}` : kind, tooltip });
}

function isBusy() {
  return running !== null || models.isLoading;
}

function stop() {
  running?.abort();
  models.stop();
}

function setRunning(controller) {
  running = controller;
  document.body.dataset.running = String(controller !== null);
  showBusy();
}

function showBusy() {
  byId("stop").disabled = !isBusy();
  watch.poke();
}

// --- Server status ---------------------------------------------------------------------------------------------------

async function look() {
  try {
    if (!isKnown) await meet();
    await list();
    showAdapters();
    showHealth("ready", "ready");
    closeKeyForm();
  } catch (error) {
    isKnown = false; // the next response may come from another server
    forgetTemplates();
    showProblem(error);
  }
}

/** Loads the first adapter page, filtered by the search field if there are more, with the chosen adapters. */
async function list() {
  const search = hasMore ? residency.wanted : "";
  const names = hasMore ? [...new Set([...models.named, ...models.chosenAdapters])].slice(-MOST_NAMED) : models.named;
  const asked = new URLSearchParams([...names.map((name) => ["also", name]), ...(search ? [["search", search]] : [])]);
  const { data, has_more } = await getJson(asked.size ? `v1/adapters?${asked}` : "v1/adapters");
  const isOther = data.length !== listed.length || data.some((adapter, i) => adapter.id !== listed[i].id);
  const isSameQuestion = !hasMore || asked.toString() === lastAsked;
  if (isOther && isSameQuestion) await models.refresh(); // otherwise the query has changed
  listed = data;
  lastAsked = asked.toString();
  hasMore = Boolean(has_more) || search !== "";
}

function showAdapters() {
  residency.show(listed, models.chosenAdapters, hasMore);
}

async function meet() {
  const info = await getJson("info");
  parameters.fit(info.max_total_tokens);
  await models.refresh();
  const served = models.labelOf(models.base ?? info.model_id);
  byId("served").textContent = served;
  byId("served").title = info.model_id;
  document.title = `${served} · lorax playground`;
  await startExamples();
  isKnown = true;
}

function showProblem(error) {
  if (error.status === UNAUTHORIZED) showHealth("locked", "API key required");
  else if (error.status === UNREACHABLE) showHealth("lost", "Cannot reach the server; retrying");
  else showHealth("lost", error.message);
}

function showHealth(state, text) {
  byId("health").dataset.state = state;
  if (byId("health").textContent !== text) byId("health").textContent = text; // screen readers announce changes
}

// --- Examples --------------------------------------------------------------------------------------------------------

async function startExamples() {
  const examples = await getJson("ui/examples.json");
  const isFirst = !byId("examples").hasChildNodes();
  byId("examples").hidden = !examples.length;
  const buttons = examples.map((example) => button(example.title, () => fillIn(example), { class: "quiet" }));
  byId("examples").replaceChildren(make("span", { class: "note" }, "Try"), ...buttons);
  if (isFirst && examples.length && !byId("prompt").value) fillIn(examples[0]);
}

function fillIn({ prompt, models: names, schema, tools, tool_choice: choice, temperature }) {
  byId("prompt").value = prompt;
  parameters.fill("schema", schema);
  parameters.fill("tools", tools);
  if (tools) parameters.fill("tool_choice", choice ?? "auto");
  parameters.fillTemperature(temperature);
  if (names?.length) models.choose(names);
}

// --- Page ------------------------------------------------------------------------------------------------------------

function startTint() {
  const control = byId("tint");
  const show = () => (document.body.dataset.tint = control.checked ? "on" : "off");
  control.checked = recall("tint", true) !== false;
  control.addEventListener("change", () => {
    remember("tint", control.checked);
    show();
  });
  show();
}

function startKeyboard() {
  addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      if (!event.repeat) send();
    } else if (event.key === "Escape" && !event.isComposing) {
      if (tooltip.isShown) tooltip.hide();
      else if (!clearsSearch(event.target)) stop();
    }
  });
}

const clearsSearch = (target) => target.type === "search" && target.value !== "";

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("stop").addEventListener("click", stop);
startTheme();
startTint();
startKeyboard();
watch.poke();
