// Tool definitions and tool calls in completions.

import { make } from "./dom.js";
import { treeOf } from "./tree.js";

/** An example tool. */
export const EXAMPLE = JSON.stringify(
  [
    {
      name: "weather",
      description: "Get the weather in a city",
      parameters: {
        type: "object",
        properties: { town: { type: "string", maxLength: 40 }, days: { type: "integer", minimum: 1, maximum: 9 } },
        required: ["town", "days"],
        additionalProperties: false,
      },
    },
  ],
  null,
  2,
);

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

/** Tool calls assembled from stream deltas. */
export class Calls {
  constructor(label) {
    this.list = [];
    this.element = make("ol", { class: "calls", "aria-label": `Tool calls of ${label}`, hidden: true });
  }

  take(deltas) {
    for (const { index, function: part } of deltas) {
      const call = (this.list[index] ??= { name: "", written: "" });
      call.name += part.name ?? "";
      call.written += part.arguments ?? "";
    }
  }

  /** Shows arguments as a tree, or as text if they are truncated. */
  show() {
    this.element.hidden = !this.list.length;
    this.element.replaceChildren(...this.list.map(itemOf));
  }
}

function itemOf({ name, written }) {
  const tree = treeOf(written) ?? make("code", {}, written);
  return make("li", { class: "call" }, make("code", { class: "name" }, name), make("div", { class: "tree" }, tree));
}
