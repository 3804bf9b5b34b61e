// Tool definitions and tool calls in completions.

import { make } from "./dom.js";
import { treeOf } from "./json-tree.js";

/** An example tool. */
export const EXAMPLE_TOOLS = [
  {
    name: "weather",
    description: "Get the weather in a city",
    parameters: {
      type: "object",
      properties: { city: { type: "string", maxLength: 40 }, days: { type: "integer", minimum: 1, maximum: 9 } },
      required: ["city", "days"],
      additionalProperties: false,
    },
  },
];

/** Returns true for a list of tools in the format of the chat or responses API. */
export const isTools = (value) =>
  Array.isArray(value) && value.length > 0 && value.every((tool) => typeof functionOf(tool)?.name === "string");

/** Converts tools to the chat format. */
export const namedTools = (tools) => tools.map((tool) => ({ type: "function", function: functionOf(tool) }));

function functionOf(tool) {
  if (tool?.function) return tool.function;
  const { type, ...bare } = tool ?? {};
  return bare;
}

/** Adds stream deltas to a list of calls `{name, written}`. */
export function addCalls(calls, deltas) {
  for (const { index, function: part } of deltas) {
    const call = (calls[index] ??= { name: "", written: "" });
    call.name += part.name ?? "";
    call.written += part.arguments ?? "";
  }
}

/** Returns list items with arguments as a tree, or as text if they are incomplete. */
export function callItems(calls, isRunning) {
  return calls.map(({ name, written }) => {
    const tree = (!isRunning && treeOf(written)) || make("code", {}, written);
    return make("li", { class: "call" }, make("code", { class: "name" }, name), make("div", { class: "tree" }, tree));
  });
}
