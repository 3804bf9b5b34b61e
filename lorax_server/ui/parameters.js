// Sampling parameters, stored in this browser and validated before sending.

import { byId } from "./dom.js";
import { recall, remember } from "./store.js";
import { EXAMPLE, isTools, namedTools } from "./tools.js";

const { MAX_SAFE_INTEGER } = Number;
const NUMBERS = {
  max_tokens: { holds: (n) => whole(n) && n >= 1, rule: "a whole number, at least 1", isNeeded: true },
  temperature: { holds: (n) => n >= 0 && n <= 2, rule: "a number from 0 (greedy) to 2" },
  top_p: { holds: (n) => n > 0 && n <= 1, rule: "a number above 0, at most 1" },
  top_k: { holds: (n) => whole(n) && n >= 0 && n < 2 ** 31, rule: "a whole number; 0 means all" },
  seed: { holds: whole, rule: "a whole number" },
};
const TEXTS = {
  schema: { holds: isObject, rule: () => "Must be a JSON object." },
  tools: {
    holds: (value) => isTools(value) && byId("mode").value === "chat",
    rule: (value) => (isTools(value) ? "Tools require chat mode." : "Must be a JSON list of named functions."),
  },
};
const NAMES = [...Object.keys(NUMBERS), ...Object.keys(TEXTS), "mode", "system", "tool_choice"];

export class Parameters {
  constructor() {
    const before = recall("parameters", {});
    for (const name of NAMES) {
      if (typeof before[name] === "string") byId(name).value = before[name];
      byId(name).addEventListener("input", () => this.#changed());
    }
    for (const name of ["mode", "tool_choice"]) {
      if (!byId(name).value) byId(name).selectedIndex = 0; // the stored option no longer exists
    }
    byId("tools-example").addEventListener("click", () => this.fill("tools", EXAMPLE));
    this.fitted = byId("max_tokens").defaultValue; // default value
    this.#summarize();
  }

  /** Reduces the default `max_tokens` to fit the context length. */
  fit(maxTotalTokens) {
    const field = byId("max_tokens");
    const isTyped = field.value !== this.fitted;
    this.fitted = String(Math.min(field.defaultValue, Math.ceil(maxTotalTokens / 2)));
    if (!isTyped) field.value = this.fitted;
    this.#summarize();
  }

  /** Sets a field value like user input. */
  fill(name, value) {
    byId(name).value = typeof value === "string" ? value : value ? JSON.stringify(value) : "";
    byId(name).dispatchEvent(new Event("input"));
  }

  /** Sets an example's temperature until the next example. Keeps a user value otherwise. */
  fillTemperature(given) {
    const isGiven = typeof given === "number";
    if (isGiven || this.isLent) this.fill("temperature", isGiven ? String(given) : byId("temperature").defaultValue);
    this.isLent = isGiven;
  }

  /** Returns the request parameters, or null after showing an error. */
  read() {
    const wrong = Object.keys(NUMBERS).filter((name) => !this.#check(name));
    wrong.push(...Object.keys(TEXTS).filter((name) => !this.#checkText(name)));
    if (wrong.length) {
      byId("parameters").open = true;
      byId(wrong[0]).focus();
      return null;
    }
    const given = Object.keys(NUMBERS).filter((name) => byId(name).value !== "");
    const sampling = Object.fromEntries(given.map((name) => [name, Number(byId(name).value)]));
    const [schema, tools] = [jsonOf("schema"), jsonOf("tools")];
    const [mode, choice] = [byId("mode").value, byId("tool_choice").value];
    const system = byId("system").value.trim();
    return { sampling, mode, system, schema, tools: tools && namedTools(tools), choice };
  }

  #changed() {
    remember("parameters", Object.fromEntries(NAMES.map((name) => [name, byId(name).value])));
    for (const name of Object.keys(NUMBERS)) this.#check(name);
    for (const name of Object.keys(TEXTS)) this.#checkText(name);
    this.#summarize();
  }

  #checkText(name) {
    const { holds, rule } = TEXTS[name];
    const value = jsonOf(name);
    const isRight = value === null || holds(value);
    byId(`${name}-error`).textContent = isRight ? "" : rule(value);
    byId(name).setAttribute("aria-invalid", String(!isRight));
    return isRight;
  }

  #check(name) {
    const field = byId(name);
    const { holds, rule, isNeeded } = NUMBERS[name];
    const isEmpty = field.value === "" && !field.validity.badInput; // invalid numbers are also empty
    const isRight = isEmpty ? !isNeeded : !field.validity.badInput && holds(Number(field.value));
    byId(`${name}-error`).textContent = isRight ? "" : `Must be ${rule}.`;
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
      byId("schema").value.trim() && "with schema",
      byId("tools").value.trim() && `tools: ${byId("tool_choice").value}`,
    ];
    byId("parameters-note").textContent = shown.filter(Boolean).join(" · ");
  }
}

/** Returns the parsed JSON, null if empty, or undefined if invalid or null. */
function jsonOf(name) {
  const text = byId(name).value.trim();
  if (!text) return null;
  try {
    return JSON.parse(text) ?? undefined;
  } catch {
    return undefined;
  }
}

function isObject(value) {
  return typeof value === "object" && !Array.isArray(value);
}

function whole(number) {
  return Number.isInteger(number) && Math.abs(number) <= MAX_SAFE_INTEGER;
}
