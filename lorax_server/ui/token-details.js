// Token details (probability and alternatives), shown on hover, focus or tap.

import { make } from "./dom.js";
import { percent } from "./format.js";

const GAP = 8;
const STEPS = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };

export class TokenDetails {
  constructor(element) {
    this.element = element;
    this.tokens = new WeakMap(); // tokens by element
    addEventListener("scroll", () => this.#place(), { passive: true, capture: true });
  }

  /** Attaches to an element with token children. It is one tab stop; arrow keys move between tokens. */
  attach(body) {
    body.addEventListener("pointerover", (event) => this.show(event.target));
    body.addEventListener("pointerout", () => this.show(document.activeElement));
    body.addEventListener("focusin", (event) => this.show(event.target));
    body.addEventListener("focusout", () => this.hide());
    body.addEventListener("keydown", (event) => this.#step(event, body));
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

  /** Positions the tooltip next to the token's first line. */
  #place() {
    if (!this.described) return;
    const at = this.described.getClientRects()[0] ?? this.described.getBoundingClientRect();
    const { width, height } = this.element.getBoundingClientRect();
    const left = Math.min(Math.max(GAP, at.left), innerWidth - width - GAP);
    const fitsBelow = at.bottom + GAP + height < innerHeight;
    this.element.style.left = `${Math.max(0, left)}px`;
    this.element.style.top = `${Math.max(0, fitsBelow ? at.bottom + GAP : at.top - GAP - height)}px`;
  }

  #step(event, body) {
    const step = STEPS[event.key];
    const here = event.target;
    if (step === undefined || isModified(event) || here.parentElement !== body) return;
    event.preventDefault();
    const all = [...body.children];
    const place = Math.min(Math.max(all.indexOf(here) + step, 0), all.length - 1);
    here.tabIndex = -1;
    all[place].tabIndex = 0;
    all[place].focus();
  }
}

/** Arrow keys with modifiers are left to the browser. */
const isModified = (event) => event.altKey || event.ctrlKey || event.metaKey || event.shiftKey;

function describe({ token, logprob, top }) {
  const share = make("strong", {}, percent(logprob));
  const title = make("p", { class: "token-head" }, make("code", {}, visible(token)), share);
  if (!top.length) return [title];
  // Incomplete characters look the same.
  const rows = top.map((other) => row(other, other.token === token && other.logprob === logprob));
  return [title, make("table", {}, make("caption", {}, "Most likely tokens"), make("tbody", {}, ...rows))];
}

function row({ token, logprob }, isChosen) {
  const bar = make("span", { class: "bar-share" });
  bar.style.width = `${100 * Math.exp(logprob)}%`;
  const name = make("th", { scope: "row" }, make("code", {}, visible(token)));
  return make("tr", { class: isChosen && "chosen" }, name, make("td", {}, bar), make("td", {}, percent(logprob)));
}

/** Makes white space visible. */
function visible(text) {
  const shown = text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  return shown || "(empty)";
}
