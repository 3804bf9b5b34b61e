// A conversation: turns of one user message and the completions of all selected models.

import { Answer, newRecord, splitReasoning } from "./answer.js";
import { announce, button, byId, copyButton, isTouch, make } from "./dom.js";

const NEAR_END_PX = 120; // follow new text only if the reader is this close to the end
const MAX_SPOKEN = 600; // longer completions are not read aloud

export class Conversation {
  /**
   * Calls `onRun(isRunning)` when requests start or end, `onChange` when the conversation changes,
   * and `onProgress` while text arrives.
   */
  constructor({ models, parameters, tokenDetails, onRun, onChange, onProgress }) {
    Object.assign(this, { models, parameters, tokenDetails, onRun, onChange, onProgress });
    this.element = byId("turns");
    this.scroller = byId("scroller");
    this.running = null; // AbortController of the running requests
    this.chat = null;
    this.answers = []; // one list per turn
    byId("latest").addEventListener("click", () => this.#scrollToEnd());
    this.scroller.addEventListener("scroll", () => this.#showScrollButton(), { passive: true });
  }

  get isRunning() {
    return this.running !== null;
  }

  /** The records of the last turn. */
  get latest() {
    return this.chat.turns.at(-1)?.answers ?? [];
  }

  open(chat) {
    this.stop();
    this.chat = chat;
    this.tokenDetails.hide();
    this.answers = [];
    this.element.replaceChildren();
    for (const turn of chat.turns) this.#append(turn);
    byId("welcome").hidden = chat.turns.length > 0;
    this.#scrollToEnd();
  }

  /** Draws all answers, for example with token probabilities. */
  redraw() {
    this.answers.flat().forEach((answer) => answer.draw());
  }

  stop() {
    this.running?.abort();
  }

  /** Sends a message to the selected models. Returns an error message, or "" on success. */
  send(prompt) {
    const problem = this.#problemWith(prompt);
    if (problem) return problem;
    const answers = this.models.selected.map((name) => newRecord(name, ...this.models.describe(name)));
    const turn = { prompt, answers };
    this.chat.turns.push(turn);
    const added = this.#append(turn);
    this.#scrollToEnd();
    this.#run(added, this.parameters.read());
    return "";
  }

  #problemWith(prompt) {
    if (!prompt.trim()) return "Enter a message.";
    if (!this.models.selected.length) return "Add a model at the top of the page.";
    return this.parameters.read() ? "" : "Correct the settings.";
  }

  // --- Requests -----------------------------------------------------------------------------------------------------

  async #run(answers, parameters, isContinuation = false) {
    this.stop();
    const controller = new AbortController();
    const { chat } = this;
    this.running = controller;
    this.onRun(true);
    const turn = this.answers.findIndex((list) => list.includes(answers[0]));
    announce(byId("status"), "");
    await Promise.all(
      answers.map(async (answer) => {
        const input = this.#inputFor(answer.record, chat.turns, turn, isContinuation);
        await answer.run(input, parameters, controller.signal, isContinuation);
        this.onChange(); // the chat's text and the adapter's tier have changed
      }),
    );
    if (this.running !== controller) return;
    this.running = null;
    this.onRun(false);
    announce(byId("status"), answers.map(({ record }) => spoken(record, answers.length)).join("; "));
  }

  /** A model sees the earlier turns that it completed, except turns with tool calls, which have no results. */
  #inputFor({ model, text }, turns, place, isContinuation) {
    const messages = [];
    for (const turn of turns.slice(0, place)) {
      const earlier = turn.answers.find((record) => record.model === model);
      if (!earlier?.text || earlier.state === "failed" || earlier.calls.length) continue;
      messages.push({ role: "user", content: turn.prompt });
      messages.push({ role: "assistant", content: splitReasoning(earlier).text });
    }
    const { prompt } = turns[place];
    messages.push({ role: "user", content: prompt });
    return { messages, prompt: isContinuation ? prompt + text : prompt };
  }

  #again(answer, isContinuation) {
    const parameters = this.parameters.read();
    if (parameters && !this.isRunning) this.#run([answer], parameters, isContinuation);
  }

  // --- Display ------------------------------------------------------------------------------------------------------

  #append(turn) {
    const actions = {
      retry: (answer) => this.#again(answer, false),
      proceed: (answer) => this.#again(answer, true),
      onChange: () => this.#follow(),
    };
    const answers = turn.answers.map((record) => new Answer(record, { tokenDetails: this.tokenDetails, actions }));
    this.answers.push(answers);
    const message = make("div", { class: "message" });
    const elements = answers.map((answer) => answer.element);
    const grid = make("div", { class: "answers", "data-count": answers.length }, ...elements);
    const label = `Turn ${this.answers.length}`;
    const element = make("section", { class: "turn", "aria-label": label }, message, grid);
    this.#showMessage(message, turn);
    this.element.append(element);
    byId("welcome").hidden = true;
    return answers;
  }

  #showMessage(message, turn) {
    const edit = button("Edit", () => this.#edit(message, turn), { class: "quiet", "aria-label": "Edit message" });
    message.replaceChildren(
      make("h2", { class: "unseen" }, "Your message"),
      make("p", { class: "bubble" }, turn.prompt),
      make("div", { class: "tools" }, edit, copyButton(() => turn.prompt, "message")),
    );
  }

  #edit(message, turn) {
    const field = make("textarea", { "aria-label": "Edit message", rows: 3 });
    field.value = turn.prompt;
    const error = make("p", { class: "error", role: "alert" });
    const cancel = () => {
      this.#showMessage(message, turn);
      message.querySelector("button").focus();
    };
    const send = () => (error.textContent = this.#resend(turn, field.value));
    field.addEventListener("keydown", (event) => {
      const isSend = isSendKey(event);
      if (!isSend && event.key !== "Escape") return;
      event.preventDefault();
      event.stopPropagation();
      isSend ? send() : cancel();
    });
    const note = make("span", { class: "note" }, "Later messages are removed.");
    const actions = [note, button("Cancel", cancel, { class: "quiet" }), button("Send", send, { class: "main" })];
    message.replaceChildren(field, error, make("div", { class: "tools shown" }, ...actions));
    field.focus();
  }

  /** Replaces a turn and removes the later turns. */
  #resend(turn, prompt) {
    if (this.isRunning) return "Stop the running requests first.";
    const problem = this.#problemWith(prompt);
    if (problem) return problem;
    const place = this.chat.turns.indexOf(turn);
    this.chat.turns.splice(place);
    this.answers.splice(place);
    while (this.element.children.length > place) this.element.lastChild.remove();
    byId("prompt").focus();
    return this.send(prompt);
  }

  #follow() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    if (this.isAtEnd && scrollHeight - scrollTop - clientHeight > 1) this.#scrollToEnd();
    this.onProgress();
  }

  #scrollToEnd() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
    this.isAtEnd = true;
  }

  #showScrollButton() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    this.isAtEnd = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    byId("latest").hidden = this.isAtEnd;
  }
}

/** Enter sends and Shift+Enter starts a line. On touch screens, Enter starts a line. Ctrl+Enter always sends. */
export function isSendKey(event) {
  if (event.key !== "Enter" || event.isComposing || event.repeat) return false;
  return event.ctrlKey || event.metaKey || (!event.shiftKey && !isTouch());
}

function spoken(record, numAnswers) {
  const { label, state } = record;
  const { text } = splitReasoning(record);
  const isRead = numAnswers === 1 && state === "done" && text.length <= MAX_SPOKEN;
  return `${label}: ${isRead ? text : state}`; // errors are alerts
}
