// How answers are drawn. Remembered by this browser; what the server would refuse is refused here.

import { byId } from "./dom.js";
import { recall, remember } from "./store.js";

const { MAX_SAFE_INTEGER } = Number;
const NUMBERS = {
  max_tokens: { holds: (n) => whole(n) && n >= 1, rule: "a whole number, at least 1", isNeeded: true },
  temperature: { holds: (n) => n >= 0 && n <= 2, rule: "a number from 0 (greedy) to 2" },
  top_p: { holds: (n) => n > 0 && n <= 1, rule: "a number above 0, at most 1" },
  top_k: { holds: (n) => whole(n) && n >= 0 && n < 2 ** 31, rule: "a whole number; 0 means all" },
  seed: { holds: whole, rule: "a whole number" },
};
const NAMES = [...Object.keys(NUMBERS), "mode", "system", "schema"];

export class Parameters {
  constructor() {
    const before = recall("parameters", {});
    for (const name of NAMES) {
      if (typeof before[name] === "string") byId(name).value = before[name];
      byId(name).addEventListener("input", () => this.#changed());
    }
    if (!byId("mode").value) byId("mode").value = "chat";
    this.fitted = byId("max_tokens").defaultValue; // what nobody typed
    this.#summarize();
  }

  /** Leave room for a prompt where a request may have few tokens in all. */
  fit(maxTotalTokens) {
    const field = byId("max_tokens");
    const isTyped = field.value !== this.fitted;
    this.fitted = String(Math.min(field.defaultValue, Math.ceil(maxTotalTokens / 2)));
    if (!isTyped) field.value = this.fitted;
    this.#summarize();
  }

  /** What to ask with; null if something is wrong, which is then shown. */
  read() {
    const wrong = Object.keys(NUMBERS).filter((name) => !this.#check(name));
    if (!this.#checkSchema()) wrong.push("schema");
    if (wrong.length) {
      byId("parameters").open = true;
      byId(wrong[0]).focus();
      return null;
    }
    const given = Object.keys(NUMBERS).filter((name) => byId(name).value !== "");
    const sampling = Object.fromEntries(given.map((name) => [name, Number(byId(name).value)]));
    return { sampling, mode: byId("mode").value, system: byId("system").value.trim(), schema: schemaOf() };
  }

  #changed() {
    remember("parameters", Object.fromEntries(NAMES.map((name) => [name, byId(name).value])));
    for (const name of Object.keys(NUMBERS)) this.#check(name);
    this.#checkSchema();
    this.#summarize();
  }

  #checkSchema() {
    const isRight = schemaOf() !== undefined;
    byId("schema-error").textContent = isRight ? "" : "This is a JSON object.";
    byId("schema").setAttribute("aria-invalid", String(!isRight));
    return isRight;
  }

  #check(name) {
    const field = byId(name);
    const { holds, rule, isNeeded } = NUMBERS[name];
    const isEmpty = field.value === "" && !field.validity.badInput; // what is no number is empty too
    const isRight = isEmpty ? !isNeeded : !field.validity.badInput && holds(Number(field.value));
    byId(`${name}-error`).textContent = isRight ? "" : `This is ${rule}.`;
    field.setAttribute("aria-invalid", String(!isRight));
    return isRight;
  }

  #summarize() {
    const names = ["mode", "max_tokens", "temperature", "seed"];
    const [mode, most, temperature, seed] = names.map((name) => byId(name).value);
    const shown = [
      mode === "chat" ? "chat" : "plain text",
      most && `${most} tokens`,
      temperature === "0" ? "greedy" : temperature && `temperature ${temperature}`,
      seed && `seed ${seed}`,
      byId("schema").value.trim() && "by a schema",
    ];
    byId("parameters-note").textContent = shown.filter(Boolean).join(" · ");
  }
}

/** The schema that is typed; null if there is none, undefined if it is no object. */
function schemaOf() {
  const text = byId("schema").value.trim();
  if (!text) return null;
  try {
    const schema = JSON.parse(text);
    return schema !== null && typeof schema === "object" && !Array.isArray(schema) ? schema : undefined;
  } catch {
    return undefined;
  }
}

function whole(number) {
  return Number.isInteger(number) && Math.abs(number) <= MAX_SAFE_INTEGER;
}
