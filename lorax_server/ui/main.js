// The page: what is asked, who answers, and what is seen of the server meanwhile.

import { UNAUTHORIZED, UNREACHABLE, getJson } from "./api.js";
import { Column } from "./column.js";
import { button, byId, make } from "./dom.js";
import { startKey } from "./key.js";
import { Models } from "./models.js";
import { Parameters } from "./parameters.js";
import { Residency } from "./residency.js";
import { recall, remember } from "./store.js";
import { startTheme } from "./theme.js";
import { Tooltip } from "./tooltip.js";
import { Watch } from "./watch.js";

const tooltip = new Tooltip(byId("tooltip"));
const parameters = new Parameters();
const residency = new Residency();
let listed = []; // what the server said last of its adapters
let running = null; // what stops the requests under way
let isKnown = false; // whether the server has said what it serves

const models = new Models(() => residency.show(listed, models.chosenAdapters));
const watch = new Watch(look, () => running !== null);

// --- Asking ----------------------------------------------------------------------------------------------------------

async function send() {
  const prompt = byId("prompt").value;
  const asked = parameters.read();
  const chosen = models.chosenInOrder;
  const problem = !prompt.trim() ? "Write a prompt first." : !chosen.length ? "Choose a model first." : "";
  byId("prompt-error").textContent = problem;
  if (problem || !asked) return;
  stop();
  const mine = new AbortController();
  setRunning(mine);
  const columns = chosen.map(makeColumn);
  byId("columns").replaceChildren(...columns.map((column) => column.element));
  watch.poke();
  await Promise.all(columns.map((column) => column.run(prompt, asked, mine.signal).then(announce)));
  if (running === mine) setRunning(null);
}

function makeColumn(model) {
  const kind = model === models.base ? "base model" : "adapter";
  const place = residency.placeOf(model);
  return new Column({ model, label: models.labelOf(model), kind: place ? `${kind}, was ${place}` : kind, tooltip });
}

function stop() {
  running?.abort();
}

function setRunning(controller) {
  running = controller;
  byId("stop").disabled = controller === null;
  document.body.dataset.running = String(controller !== null);
  watch.poke();
}

function announce(text) {
  byId("status").textContent = text;
  watch.poke();
}

// --- What the server says of itself ----------------------------------------------------------------------------------

async function look() {
  try {
    if (!isKnown) await meet();
    const { data } = await getJson("v1/adapters");
    const isNew = data.length !== listed.length || data.some((adapter, i) => adapter.id !== listed[i].id);
    listed = data;
    residency.show(listed, models.chosenAdapters);
    showHealth("ready", "ready");
    if (isNew) await models.refresh();
  } catch (error) {
    showProblem(error);
  }
}

async function meet() {
  const info = await getJson("info");
  parameters.fit(info.max_total_tokens);
  await models.refresh();
  const served = models.labelOf(models.base ?? info.model_id);
  byId("served").textContent = served;
  byId("served").title = info.model_id;
  document.title = `${served} · lorax playground`;
  isKnown = true;
  await startExamples();
}

function showProblem(error) {
  if (error.status === UNAUTHORIZED) showHealth("locked", "needs an API key");
  else if (error.status === UNREACHABLE) showHealth("lost", "The server cannot be reached; trying again");
  else showHealth("lost", error.message);
}

function showHealth(state, text) {
  byId("health").dataset.state = state;
  if (byId("health").textContent !== text) byId("health").textContent = text; // is read out when it changes
}

// --- Examples --------------------------------------------------------------------------------------------------------

async function startExamples() {
  const examples = await getJson("ui/examples.json");
  byId("examples").hidden = !examples.length;
  const buttons = examples.map((example) => button(example.title, () => fillIn(example), { class: "quiet" }));
  byId("examples").replaceChildren(make("span", { class: "note" }, "Try"), ...buttons);
  if (examples.length && !byId("prompt").value) fillIn(examples[0]);
}

function fillIn({ prompt, models: names }) {
  byId("prompt").value = prompt;
  if (names?.length) models.choose(names);
}

// --- The page itself -------------------------------------------------------------------------------------------------

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
      send();
    } else if (event.key === "Escape") {
      tooltip.hide();
      stop();
    }
  });
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("stop").addEventListener("click", stop);
startTheme();
startTint();
startKeyboard();
startKey(() => watch.poke());
watch.poke();
