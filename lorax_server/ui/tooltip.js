// What the model thought of a token: shown while a pointer is on it, or the keyboard, or after a tap.

import { make } from "./dom.js";
import { percent } from "./numbers.js";

const GAP = 8;
const STEPS = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };

export class Tooltip {
  constructor(element) {
    this.element = element;
    this.tokens = new WeakMap(); // by their elements
    addEventListener("scroll", () => this.#place(), { passive: true, capture: true });
  }

  /** Of an element whose children are tokens. It is one stop for the Tab key; arrows go from token to token. */
  attach(answer) {
    answer.addEventListener("pointerover", (event) => this.show(event.target));
    answer.addEventListener("pointerout", () => this.show(document.activeElement));
    answer.addEventListener("focusin", (event) => this.show(event.target));
    answer.addEventListener("focusout", () => this.hide());
    answer.addEventListener("keydown", (event) => this.#step(event, answer));
  }

  show(target) {
    const token = this.tokens.get(target);
    if (!token) return this.hide();
    this.element.replaceChildren(...describe(token));
    this.element.hidden = false;
    this.#describes(target);
    this.#place();
  }

  get isShown() {
    return !this.element.hidden;
  }

  hide() {
    this.element.hidden = true;
    this.#describes(null);
  }

  #describes(target) {
    this.described?.removeAttribute("aria-describedby");
    this.described = target;
    target?.setAttribute("aria-describedby", this.element.id);
  }

  /** Beside the first line of the token. */
  #place() {
    if (!this.described) return;
    const at = this.described.getClientRects()[0] ?? this.described.getBoundingClientRect();
    const { width, height } = this.element.getBoundingClientRect();
    const left = Math.min(Math.max(GAP, at.left), innerWidth - width - GAP);
    const fitsBelow = at.bottom + GAP + height < innerHeight;
    this.element.style.left = `${Math.max(0, left)}px`;
    this.element.style.top = `${Math.max(0, fitsBelow ? at.bottom + GAP : at.top - GAP - height)}px`;
  }

  #step(event, answer) {
    const step = STEPS[event.key];
    const here = event.target;
    if (step === undefined || isModified(event) || here.parentElement !== answer) return;
    event.preventDefault();
    const all = [...answer.children];
    const place = Math.min(Math.max(all.indexOf(here) + step, 0), all.length - 1);
    here.tabIndex = -1;
    all[place].tabIndex = 0;
    all[place].focus();
  }
}

/** With another key an arrow is the browser's: back, to the top, or one more letter of a selection. */
const isModified = (event) => event.altKey || event.ctrlKey || event.metaKey || event.shiftKey;

function describe({ token, logprob, top }) {
  const title = make("p", { class: "said" }, make("code", {}, visible(token)), make("strong", {}, percent(logprob)));
  if (!top.length) return [title];
  // Halves of characters all look alike.
  const rows = top.map((other) => row(other, other.token === token && other.logprob === logprob));
  return [title, make("table", {}, make("caption", {}, "Most likely tokens"), make("tbody", {}, ...rows))];
}

function row({ token, logprob }, isChosen) {
  const bar = make("span", { class: "bar" });
  bar.style.width = `${100 * Math.exp(logprob)}%`;
  const name = make("th", { scope: "row" }, make("code", {}, visible(token)));
  return make("tr", { class: isChosen && "chosen" }, name, make("td", {}, bar), make("td", {}, percent(logprob)));
}

/** White space, so that it can be told from nothing. */
function visible(text) {
  const shown = text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  return shown || "(empty)";
}
