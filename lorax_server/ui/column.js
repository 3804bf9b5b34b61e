// One model's completion: streamed tokens, speed and finish reason.

import { ask, curlOf, divide, isChat, requestOf } from "./ask.js";
import { button, make, oncePerFrame } from "./dom.js";
import { milliseconds, rate } from "./numbers.js";
import { Calls } from "./tools.js";
import { treeOf } from "./tree.js";

const LEVELS = 5; // number of tint levels
const NOTHING = "–";
const TIERS = { device: "on the device", host: "in host memory", disk: "on disk", fetched: "fetched for this request" };
const SHORTEST_MS = 20; // minimum duration for showing a token rate

export class Column {
  constructor({ model, label, kind, tooltip }) {
    this.model = model;
    this.label = label;
    this.tooltip = tooltip;
    this.waiting = []; // tokens that are not rendered yet
    this.count = 0;
    this.drafts = 0; // tokens accepted from drafts; known at the end
    this.draw = oncePerFrame(() => this.#draw());
    this.#build(kind);
  }

  /** Resolves to a status text when the completion ends. Never rejects. */
  async run(prompt, parameters, signal) {
    this.sentAt = performance.now();
    this.curl.textContent = curlOf(requestOf(this.model, prompt, parameters));
    this.#say("waiting", "waiting");
    let said = "";
    try {
      for await (const event of ask(this.model, prompt, parameters, signal)) {
        const { tokens, text = "", calls = [], reason, usage, tier } = event;
        this.#take(tokens);
        said += text;
        this.calls.take(calls);
        if (tier) this.kind.textContent = `adapter, was ${TIERS[tier] ?? tier}`;
        if (reason) this.#say(reason, "done");
        if (usage) this.count = usage.completion_tokens;
        if (usage) this.drafts = usage.completion_tokens_details?.accepted_prediction_tokens ?? 0;
      }
    } catch (error) {
      this.#fail(error);
    }
    // Models without a chat template are retried with the completions route.
    this.curl.textContent = curlOf(requestOf(this.model, prompt, parameters));
    this.plain.hidden = parameters.mode !== "chat" || isChat(this.model, parameters);
    this.#draw();
    this.calls.show();
    if (parameters.tools && !this.calls.list.length) this.#retell(said);
    this.#showTree(parameters.schema && !this.calls.list.length);
    return `${this.label}: ${this.state.textContent}`;
  }

  #take(tokens) {
    if (!tokens.length) return;
    const now = performance.now();
    this.firstAt ??= now;
    this.lastAt = now;
    this.count += tokens.length;
    this.waiting.push(...tokens);
    if (this.element.dataset.state === "waiting") this.#say("answering", "running");
    this.draw();
  }

  #draw() {
    const isFirst = !this.answer.firstChild;
    this.answer.append(...this.waiting.map((token) => this.#span(token)));
    this.waiting = [];
    if (isFirst && this.answer.firstChild) this.answer.firstChild.tabIndex = 0;
    this.numbers.count.textContent = String(this.count);
    this.numbers.drafts.textContent = String(this.drafts);
    if (this.firstAt === undefined) return;
    this.numbers.first.textContent = milliseconds(this.firstAt - this.sentAt);
    const elapsed = this.lastAt - this.firstAt; // for all tokens except the first
    if (elapsed >= SHORTEST_MS) this.numbers.rate.textContent = rate((1000 * (this.count - 1)) / elapsed);
  }

  #span(token) {
    const level = token.logprob === null ? 0 : Math.floor((1 - Math.exp(token.logprob)) * LEVELS);
    const span = make("span", { class: "token", tabindex: -1, "data-level": Math.min(Math.max(level, 0), LEVELS - 1) });
    span.textContent = token.text;
    this.tooltip.tokens.set(span, token);
    return span;
  }

  /** Shows a completion without tool calls as text, without end markers. */
  #retell(text) {
    const spans = [...this.answer.children];
    const parts = divide(text, spans.map((span) => this.tooltip.tokens.get(span)));
    spans.forEach((span, i) => (span.textContent = parts[i].text));
  }

  /** Also shows a complete structured completion as a tree. */
  #showTree(schema) {
    const tree = schema ? treeOf(this.answer.textContent) : null;
    this.tree.hidden = !tree;
    this.tree.replaceChildren(...(tree ? [tree] : []));
  }

  #fail(error) {
    if (error.name === "AbortError") return this.#say("stopped", "done");
    this.#say("failed", "failed");
    this.error.textContent = error.message;
  }

  #say(word, state) {
    this.state.textContent = word;
    this.element.dataset.state = state;
  }

  async #copy(control) {
    const text = this.answer.textContent;
    const isCopied = await navigator.clipboard?.writeText(text).then(() => true, () => false);
    if (!isCopied) getSelection().selectAllChildren(this.answer); // no permission or no https
    control.textContent = isCopied ? "Copied" : "Selected";
    setTimeout(() => (control.textContent = "Copy"), 1500);
  }

  #build(kind) {
    this.state = make("span", { class: "state" });
    this.kind = make("p", { class: "note" }, kind);
    this.plain = make("p", { class: "note", hidden: true }, "No chat template: sent as plain text.");
    this.answer = make("div", { class: "answer", role: "group", "aria-label": `Completion of ${this.label}` });
    this.tree = make("div", { class: "tree", role: "group", "aria-label": `JSON tree of ${this.label}`, hidden: true });
    this.calls = new Calls(this.label);
    this.error = make("p", { class: "error", role: "alert" });
    this.curl = make("code", {});
    this.numbers = Object.fromEntries(
      ["rate", "first", "count", "drafts"].map((name) => [name, make("dd", { "data-number": name }, NOTHING)]),
    );
    this.element = make(
      "article",
      { class: "card column", "aria-label": this.label, "data-model": this.model },
      make("header", {}, make("h3", {}, this.label), this.state, this.kind),
      make(
        "dl",
        {},
        number("tokens per second", this.numbers.rate),
        number("to first token", this.numbers.first),
        number("tokens", this.numbers.count),
        number("from drafts", this.numbers.drafts),
      ),
      this.plain,
      this.answer,
      this.tree,
      this.calls.element,
      this.error,
      make(
        "footer",
        {},
        button("Copy", (event) => this.#copy(event.currentTarget), { class: "quiet" }),
        make("details", { class: "curl" }, make("summary", {}, "as curl"), make("pre", { tabindex: 0 }, this.curl)),
      ),
    );
    this.tooltip.attach(this.answer);
  }
}

const number = (label, value) => make("div", {}, make("dt", {}, label), value);
