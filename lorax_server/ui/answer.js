// One model's completion in a conversation: its text, tool calls, error and statistics.

import { complete, curlOf, requestOf, usesChat } from "./completion.js";
import { button, copyButton, make, oncePerFrame } from "./dom.js";
import { explain } from "./errors.js";
import { milliseconds, rate } from "./format.js";
import { treeOf } from "./json-tree.js";
import { renderMarkdown } from "./markdown.js";
import { addCalls, callItems } from "./tool-calls.js";

const NUM_TINTS = 5;
const MIN_RATE_MS = 20; // tokens that arrive faster give no meaningful rate
const TIERS = { device: "on the device", host: "in host memory", disk: "on disk", fetched: "downloaded" };
const THOUGHT = /^\s*<think>([^]*?)(?:<\/think>\s*|$)/;

/** Returns the stored part of an answer. */
export const newRecord = (model, label, kind) => ({ model, label, kind, ...unsent() });

const unsent = () => ({ state: "waiting", text: "", reasoning: "", calls: [], count: 0, error: null, reason: null });

/** Splits text into reasoning in `<think>` and the answer. */
export function splitReasoning({ text, reasoning }) {
  const thought = reasoning ? null : text.match(THOUGHT);
  return thought ? { reasoning: thought[1].trim(), text: text.slice(thought[0].length) } : { reasoning, text };
}

export class Answer {
  /** `actions` has `retry`, `proceed` (continue text) and `onChange`. */
  constructor(record, { tokenDetails, actions }) {
    this.record = record;
    this.tokenDetails = tokenDetails;
    this.onChange = actions.onChange;
    this.tokens = []; // not stored
    this.drawnTokens = 0;
    this.draw = oncePerFrame(() => this.#draw());
    this.#build(actions);
    this.#draw();
  }

  get isRunning() {
    return this.record.state === "waiting" || this.record.state === "running";
  }

  /** Never rejects. With `isContinuation`, appends to the text. */
  async run(input, parameters, signal, isContinuation = false) {
    const { record } = this;
    const text = isContinuation ? record.text : "";
    if (!isContinuation) this.tokens = [];
    else if (!this.tokens.length) this.tokens = [{ token: text, text, logprob: null, top: [] }];
    Object.assign(record, unsent(), { text, firstMs: undefined, rate: undefined, tier: undefined });
    Object.assign(record, { isJson: Boolean(parameters.schema), limit: parameters.sampling.max_tokens });
    record.isText = !usesChat(record.model, parameters);
    this.tokenDetails.hide();
    this.#clearBody();
    this.draw();
    try {
      await this.#receive(input, parameters, signal);
      record.state = "done";
    } catch (error) {
      record.state = error.name === "AbortError" ? "stopped" : "failed";
      if (record.state === "failed") record.error = explain(error);
    }
    // Known after the response: models without a chat template continue the text instead.
    record.isText = !usesChat(record.model, parameters);
    record.lacksTemplate = record.isText && parameters.mode === "chat";
    this.curl = curlOf(requestOf(record.model, input, parameters));
    this.#draw();
  }

  async #receive(input, parameters, signal) {
    const { record } = this;
    const sentAt = performance.now();
    let firstAt;
    for await (const event of complete(record.model, input, parameters, signal)) {
      record.text += event.text;
      record.reasoning += event.reasoning ?? "";
      this.tokens.push(...event.tokens);
      addCalls(record.calls, event.calls);
      if (event.tier) record.tier = event.tier;
      if (event.reason) record.reason = event.reason;
      const isContent = event.text || event.reasoning || event.tokens.length || event.calls.length;
      if (isContent) {
        const now = performance.now();
        firstAt ??= now;
        record.state = "running";
        record.firstMs = firstAt - sentAt;
        record.count += event.tokens.length || 1; // without probabilities, an event is about one token
        record.elapsedMs = now - firstAt;
      }
      if (event.usage) record.count = event.usage.completion_tokens;
      if (event.usage) record.drafts = event.usage.completion_tokens_details?.accepted_prediction_tokens ?? 0;
      if (record.elapsedMs >= MIN_RATE_MS) record.rate = (1000 * (record.count - 1)) / record.elapsedMs;
      this.draw();
    }
  }

  // --- Display ------------------------------------------------------------------------------------------------------

  #draw() {
    const { record, element } = this;
    const { text, reasoning } = splitReasoning(record);
    element.dataset.state = record.state;
    element.setAttribute("aria-busy", String(this.isRunning));
    this.badge.textContent = badgeOf(record);
    this.badge.hidden = !this.badge.textContent;
    this.reasoning.hidden = !reasoning;
    this.reasoning.lastChild.textContent = reasoning;
    this.#drawBody(text);
    this.#drawTree(text);
    this.calls.hidden = !record.calls.length;
    this.calls.replaceChildren(...callItems(record.calls, this.isRunning));
    this.#drawNotes();
    this.footer.hidden = this.isRunning;
    this.copy.hidden = !text && !record.calls.length;
    this.retry.textContent = record.state === "failed" ? "Try again" : "Regenerate";
    this.proceed.hidden = !record.isText || record.state === "failed";
    this.details.replaceChildren(...detailsOf(record, this.curl));
    this.onChange(this);
  }

  #drawBody(text) {
    const { record, body } = this;
    const isOn = document.body.dataset.probabilities === "on";
    const hasTokens = isOn && this.tokens.some(({ top }) => top.length);
    const view = hasTokens ? "tokens" : record.isJson || record.isText ? "text" : "markdown";
    if (body.dataset.view !== view) this.#clearBody();
    body.dataset.view = view;
    if (view === "markdown") renderMarkdown(body, text);
    else if (view === "text") body.textContent = text;
    else this.#drawTokens();
    body.hidden = !body.hasChildNodes() && !this.isRunning;
  }

  #clearBody() {
    renderMarkdown(this.body, "");
    this.body.replaceChildren();
    this.drawnTokens = 0;
  }

  #drawTokens() {
    this.body.append(...this.tokens.slice(this.drawnTokens).map((token) => this.#span(token)));
    this.drawnTokens = this.tokens.length;
    if (this.body.firstChild && !this.body.querySelector("[tabindex='0']")) this.body.firstChild.tabIndex = 0;
  }

  #span(token) {
    const tint = token.logprob === null ? 0 : Math.floor((1 - Math.exp(token.logprob)) * NUM_TINTS);
    const level = Math.min(Math.max(tint, 0), NUM_TINTS - 1);
    const span = make("span", { class: "token", tabindex: -1, "data-tint": level }, token.text);
    this.tokenDetails.tokens.set(span, token);
    return span;
  }

  /** Also shows complete JSON as a tree. */
  #drawTree(text) {
    const isComplete = this.record.isJson && !this.isRunning && !this.record.calls.length;
    const tree = isComplete ? treeOf(text) : null;
    this.tree.hidden = !tree;
    this.tree.replaceChildren(...(tree ? [tree] : []));
  }

  #drawNotes() {
    const { state, reason, limit, text, calls, error, lacksTemplate } = this.record;
    const notes = [
      lacksTemplate && state !== "failed" && "This model has no chat template, so it continues your text.",
      reason === "length" && `Stopped at the limit of ${limit} tokens. Raise Max tokens in the settings.`,
      state === "done" && !text && !calls.length && "The model returned an empty completion.",
    ].filter(Boolean);
    this.notes.replaceChildren(...notes.map((note) => make("p", { class: "note" }, note)));
    this.error.hidden = !error;
    this.error.replaceChildren(...(error ? [make("span", {}, error.message), make("strong", {}, error.advice)] : []));
  }

  #build({ retry, proceed }) {
    const { label, kind, model } = this.record;
    this.badge = make("span", { class: "badge" });
    this.reasoning = make("details", { class: "reasoning" }, make("summary", {}, "Reasoning"), make("div"));
    this.body = make("div", { class: "body", role: "group", "aria-label": `Completion of ${label}` });
    this.tree = make("div", { class: "tree", role: "group", "aria-label": `JSON tree of ${label}` });
    this.calls = make("ol", { class: "calls", "aria-label": `Tool calls of ${label}` });
    this.notes = make("div", { class: "notes" });
    this.error = make("p", { class: "error box", role: "alert" });
    const { record } = this;
    const copied = () => splitReasoning(record).text || JSON.stringify(record.calls);
    this.copy = copyButton(copied, `completion of ${label}`);
    this.retry = button("Regenerate", () => retry(this), { class: "quiet retry" });
    this.proceed = button("Continue", () => proceed(this), { class: "quiet" });
    this.details = make("div", { class: "details" });
    this.footer = make(
      "footer",
      {},
      this.copy,
      this.retry,
      this.proceed,
      make("details", { class: "more" }, make("summary", {}, "Details"), this.details),
    );
    this.element = make(
      "article",
      { class: "answer", "aria-label": label, "data-model": model },
      make("header", {}, make("h3", {}, label), make("span", { class: "note" }, kind), this.badge),
      this.reasoning,
      this.body,
      this.tree,
      this.calls,
      this.notes,
      this.error,
      this.footer,
    );
    this.tokenDetails.attach(this.body);
  }
}

function badgeOf({ state, reason }) {
  if (state === "done") return reason === "length" ? "cut off" : "";
  return { waiting: "waiting", running: "writing", stopped: "stopped by you", failed: "failed" }[state];
}

function detailsOf({ rate: speed, firstMs, count, drafts, reason, tier }, curl) {
  const facts = [
    ["Speed", speed === undefined ? "not measured" : `${rate(speed)} tokens/s`, "rate"],
    ["First token after", firstMs === undefined ? "–" : milliseconds(firstMs), "first"],
    ["Tokens", String(count), "count"],
    drafts && ["Tokens from drafts", String(drafts), "drafts"],
    ["Finish reason", reason ?? "none", "reason"],
    tier && ["Adapter before the request", TIERS[tier] ?? tier, "tier"],
  ].filter(Boolean);
  const rows = facts.map(([name, value, id]) => [make("dt", {}, name), make("dd", { "data-fact": id }, value)]);
  const command = curl && make("pre", { class: "curl", tabindex: 0 }, make("code", {}, curl));
  return [make("dl", {}, ...rows.flat()), ...(command ? [command, copyButton(() => curl, "the request as curl")] : [])];
}
