// The settings: request parameters, stored in this browser and validated before sending.

import { byId, button, make } from "./dom.js";
import { openPanel, isPanelOpen } from "./panels.js";
import { browser } from "./storage.js";
import { EXAMPLE_TOOLS, isTools, namedTools } from "./tool-calls.js";

const DEFAULT_MAX_TOKENS = 1024;
const isWhole = (number) => Number.isSafeInteger(number);
const NUMBERS = {
  max_tokens: {
    label: "Max tokens", value: String(DEFAULT_MAX_TOKENS), isNeeded: true,
    help: "The longest completion. A token is about four characters of English.",
    holds: (n) => isWhole(n) && n >= 1, rule: "a whole number, at least 1",
  },
  temperature: {
    label: "Temperature", value: "0",
    help: "0 always chooses the most likely token, so the same request gives the same text. Higher is more varied.",
    holds: (n) => n >= 0 && n <= 2, rule: "a number from 0 to 2",
  },
  top_p: {
    label: "Top p", help: "Samples only from the most likely tokens that together have this probability.",
    holds: (n) => n > 0 && n <= 1, rule: "a number above 0, at most 1",
  },
  top_k: {
    label: "Top k", help: "Samples only from this number of most likely tokens. 0 means all.",
    holds: (n) => isWhole(n) && n >= 0 && n < 2 ** 31, rule: "a whole number; 0 means all",
  },
  seed: {
    label: "Seed", help: "The same seed gives the same text again.", holds: isWhole, rule: "a whole number",
  },
};
const EXAMPLE_SCHEMA = {
  type: "object",
  properties: { name: { type: "string", maxLength: 40 }, age: { type: "integer", minimum: 0, maximum: 150 } },
  required: ["name", "age"],
  additionalProperties: false,
};
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const JSONS = {
  schema: {
    label: "JSON schema", example: EXAMPLE_SCHEMA,
    help: "Every completion is JSON that matches this schema.",
    errorOf: (value) => (isObject(value) ? "" : "Must be a JSON object."),
  },
  tools: {
    label: "Tools", example: EXAMPLE_TOOLS,
    help: "A JSON list of functions that the model may call.",
    errorOf: (value) => {
      if (!isTools(value)) return "Must be a JSON list of named functions.";
      return byId("mode").value === "chat" ? "" : "Tools require chat mode.";
    },
  },
};
const NAMES = [...Object.keys(NUMBERS), ...Object.keys(JSONS), "mode", "system", "tool_choice"];

export class Parameters {
  /** Calls `onProbabilities` when the display of token probabilities changes. */
  constructor(onProbabilities) {
    byId("numbers").append(...Object.entries(NUMBERS).map(([name, field]) => numberField(name, field)));
    byId("jsons").prepend(...Object.entries(JSONS).map(([name, field]) => this.#jsonField(name, field)));
    const stored = browser.recall("parameters", {});
    this.defaults = Object.fromEntries(NAMES.map((name) => [name, byId(name).value]));
    for (const name of NAMES) {
      if (typeof stored[name] === "string") byId(name).value = stored[name];
      byId(name).addEventListener("input", () => this.#changed());
    }
    for (const name of ["mode", "tool_choice"]) {
      if (!byId(name).value) byId(name).selectedIndex = 0; // the stored option no longer exists
    }
    byId("reset").addEventListener("click", () => NAMES.forEach((name) => this.fill(name, this.defaults[name])));
    byId("probabilities").checked = browser.recall("probabilities", false) === true;
    byId("probabilities").addEventListener("change", () => {
      browser.remember("probabilities", this.hasProbabilities);
      onProbabilities();
    });
    this.#summarize();
  }

  get hasProbabilities() {
    return byId("probabilities").checked;
  }

  /** Reduces the default `max_tokens` to half of the context length. */
  fit(maxTotalTokens) {
    const field = byId("max_tokens");
    const isTyped = field.value !== this.defaults.max_tokens;
    this.defaults.max_tokens = String(Math.min(DEFAULT_MAX_TOKENS, Math.ceil(maxTotalTokens / 2)));
    if (!isTyped) field.value = this.defaults.max_tokens;
    this.#summarize();
  }

  /** Sets a field value like user input. */
  fill(name, value) {
    byId(name).value = typeof value === "string" ? value : value ? JSON.stringify(value, null, 2) : "";
    byId(name).dispatchEvent(new Event("input"));
  }

  /** Sets the fields of an example. Its temperature applies until the next example. */
  fillExample({ schema, tools, tool_choice: choice, temperature }) {
    this.fill("schema", schema);
    this.fill("tools", tools);
    if (tools) this.fill("tool_choice", choice ?? "auto");
    const isGiven = typeof temperature === "number";
    if (isGiven || this.isLent) this.fill("temperature", isGiven ? String(temperature) : this.defaults.temperature);
    this.isLent = isGiven;
  }

  /** Returns the request parameters, or null after showing an error. */
  read() {
    const wrong = this.#invalid();
    if (wrong.length) {
      if (!isPanelOpen("settings")) openPanel("settings");
      byId(wrong[0]).focus();
      return null;
    }
    const given = Object.keys(NUMBERS).filter((name) => byId(name).value !== "");
    const sampling = Object.fromEntries(given.map((name) => [name, Number(byId(name).value)]));
    const [schema, tools] = ["schema", "tools"].map((name) => JSON.parse(byId(name).value.trim() || "null"));
    const [mode, choice] = [byId("mode").value, byId("tool_choice").value];
    const system = byId("system").value.trim();
    const { hasProbabilities: probabilities } = this;
    return { sampling, mode, system, schema, tools: tools && namedTools(tools), choice, probabilities };
  }

  #changed() {
    browser.remember("parameters", Object.fromEntries(NAMES.map((name) => [name, byId(name).value])));
    this.#invalid();
    this.#summarize();
  }

  /** Shows all errors and returns the names of invalid fields. */
  #invalid() {
    const errors = [
      ...Object.entries(NUMBERS).map(([name, field]) => [name, numberError(byId(name), field)]),
      ...Object.entries(JSONS).map(([name, { errorOf }]) => [name, jsonError(byId(name).value.trim(), errorOf)]),
    ];
    for (const [name, error] of errors) {
      byId(`${name}-error`).textContent = error;
      byId(name).setAttribute("aria-invalid", String(Boolean(error)));
    }
    return errors.filter(([, error]) => error).map(([name]) => name);
  }

  #summarize() {
    const names = ["mode", "max_tokens", "temperature", "seed"];
    const [mode, max, temperature, seed] = names.map((name) => byId(name).value);
    const shown = [
      mode === "chat" ? "" : "text completion",
      max && `up to ${max} tokens`,
      temperature && `temperature ${temperature}`,
      seed && `seed ${seed}`,
      byId("schema").value.trim() && "JSON schema",
      byId("tools").value.trim() && `tools: ${byId("tool_choice").value}`,
    ];
    byId("summary").textContent = shown.filter(Boolean).join(" · ");
    byId("prompt").placeholder = mode === "chat" ? "Write a message" : "Write text that the models continue";
  }

  #jsonField(name, { label, help, example }) {
    const format = () => {
      const isValid = !jsonError(byId(name).value.trim(), () => "");
      if (isValid && byId(name).value.trim()) this.fill(name, JSON.parse(byId(name).value));
    };
    const actions = [
      button("Example", () => this.fill(name, example), { class: "quiet", "aria-label": `Example for ${label}` }),
      button("Format", format, { class: "quiet", "aria-label": `Format ${label}` }),
      button("Clear", () => this.fill(name, ""), { class: "quiet", "aria-label": `Clear ${label}` }),
    ];
    const area = make("textarea", { id: name, rows: 6, spellcheck: "false", class: "mono", placeholder: "none" });
    return field(name, label, help, area, make("div", { class: "tools shown" }, ...actions));
  }
}

function numberField(name, { label, value, help }) {
  const placeholder = name === "seed" ? "random" : "model default";
  return field(name, label, help, make("input", { id: name, type: "number", step: "any", value, placeholder }));
}

function field(name, label, help, control, ...others) {
  control.setAttribute("aria-describedby", `${name}-help ${name}-error`);
  const note = make("p", { class: "note", id: `${name}-help` }, help);
  const error = make("p", { class: "error", id: `${name}-error` });
  return make("div", { class: "field" }, make("label", { for: name }, label), control, ...others, error, note);
}

function numberError(input, { holds, rule, isNeeded }) {
  const isEmpty = input.value === "" && !input.validity.badInput; // invalid numbers are also empty
  const isRight = isEmpty ? !isNeeded : !input.validity.badInput && holds(Number(input.value));
  return isRight ? "" : `Must be ${rule}.`;
}

function jsonError(text, errorOf) {
  if (!text) return "";
  try {
    return errorOf(JSON.parse(text));
  } catch (error) {
    return `Not valid JSON: ${error.message}`;
  }
}
