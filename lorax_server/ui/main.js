// Starts the page and connects its parts: server status, examples, keyboard.

import { UNAUTHORIZED, UNREACHABLE, getJson } from "./api.js";
import { Activity } from "./activity.js";
import { startApiKey } from "./api-key.js";
import { Chats } from "./chats.js";
import { forgetTemplates } from "./completion.js";
import { Conversation, isSendKey } from "./conversation.js";
import { announce, button, byId, isTouch, make, oncePerFrame } from "./dom.js";
import { ModelPicker } from "./model-picker.js";
import { Models } from "./models.js";
import { isPanelOpen, startPanels } from "./panels.js";
import { Parameters } from "./parameters.js";
import { Polling } from "./polling.js";
import { startTheme } from "./theme.js";
import { TokenDetails } from "./token-details.js";

let isKnown = false; // server info is loaded

const tokenDetails = new TokenDetails(byId("tooltip"));
const parameters = new Parameters(showProbabilities);
const models = new Models(showModels);
const polling = new Polling(poll, () => conversation.isRunning || picker.isLoading);
const searched = () => models.hasMore && polling.now();
const picker = new ModelPicker(models, { onSearch: searched, onLoading: () => polling.now() });
const activity = new Activity(models, searched);
const showSpeeds = oncePerFrame(() => isPanelOpen("activity") && activity.renderSpeeds(conversation.latest));
const conversation = new Conversation({
  models, parameters, tokenDetails, onRun: showRunning, onChange: chatChanged, onProgress: showSpeeds,
});
const chats = new Chats((chat) => {
  conversation.open(chat);
  showSpeeds();
  if (!isTouch()) byId("prompt").focus(); // phones would open the keyboard
});
const closeKeyForm = startApiKey(() => polling.now());

function chatChanged() {
  chats.save();
  polling.now();
}

function showModels() {
  picker.render();
  if (isPanelOpen("activity")) activity.render();
}

function showProbabilities() {
  document.body.dataset.probabilities = parameters.hasProbabilities ? "on" : "off";
  conversation.redraw();
}

function showRunning(isRunning) {
  document.body.dataset.running = String(isRunning);
  const [stopButton, sendButton] = [byId("stop"), byId("send")];
  const { activeElement: focused } = document;
  const isLost = focused === sendButton || focused === stopButton || focused.closest(".answer footer") !== null;
  stopButton.hidden = !isRunning;
  sendButton.hidden = isRunning;
  if (isLost) (isRunning ? stopButton : isTouch() ? sendButton : byId("prompt")).focus(); // the control is hidden now
  if (isRunning) chats.save();
  polling.now();
}

function stop() {
  conversation.stop();
  picker.stop();
}

function send() {
  if (conversation.isRunning) return;
  const error = conversation.send(byId("prompt").value);
  byId("prompt-error").textContent = error;
  if (!error) byId("prompt").value = "";
}

// --- Server status ---------------------------------------------------------------------------------------------------

async function poll() {
  try {
    if (!isKnown) await meetServer();
    await models.refreshAdapters(picker.isOpen ? picker.wanted : activity.wanted);
    if (!isKnown && !models.selected.length) models.selectDefault();
    isKnown = true;
    showHealth("ready", "ready");
    closeKeyForm();
  } catch (error) {
    isKnown = false; // the next response may come from another server
    forgetTemplates();
    showProblem(error);
  }
}

async function meetServer() {
  const info = await getJson("info");
  parameters.fit(info.max_total_tokens);
  await models.refresh();
  const served = models.labelOf(models.base ?? info.model_id);
  byId("served").textContent = served;
  byId("served").title = info.model_id;
  byId("welcome-model").textContent = served;
  document.title = `${served} · lorax playground`;
  showExamples(await getJson("ui/examples.json"));
}

function showProblem(error) {
  if (error.status === UNAUTHORIZED) showHealth("locked", "API key required");
  else if (error.status !== UNREACHABLE) showHealth("lost", `The server reports an error: ${error.message}`);
  else showHealth("lost", "Cannot reach the server. Check that it is running; this page retries every five seconds.");
}

function showHealth(state, text) {
  byId("health").dataset.state = state;
  announce(byId("health"), text);
}

// --- Examples --------------------------------------------------------------------------------------------------------

function showExamples(examples) {
  const items = examples.map((example) => {
    const title = make("strong", {}, example.title);
    const control = button(title, () => fillIn(example), { class: "example" });
    control.append(make("span", { class: "note" }, example.prompt));
    return make("li", {}, control);
  });
  byId("examples").replaceChildren(...items);
}

function fillIn(example) {
  byId("prompt").value = example.prompt;
  parameters.fillExample(example);
  if (example.models?.length) models.select(example.models);
  if (!isTouch()) byId("prompt").focus();
}

// --- Page ------------------------------------------------------------------------------------------------------------

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.repeat && !event.shiftKey) event.preventDefault(); // a held key sends once
  if (!isSendKey(event)) return;
  event.preventDefault();
  send();
});
byId("prompt").addEventListener("input", () => (byId("prompt-error").textContent = ""));
byId("stop").addEventListener("click", stop);
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing || picker.isOpen) return; // the browser closes the picker
  const isFilter = event.target.type === "search" && event.target.value !== "";
  if (tokenDetails.isShown) tokenDetails.hide();
  else if (!isFilter) stop(); // otherwise the browser clears the filter
});
startPanels(() => {
  activity.render();
  activity.renderSpeeds(conversation.latest);
});
startTheme();
document.body.dataset.running = "false";
showProbabilities();
chats.open(chats.list[0]);
polling.now();
