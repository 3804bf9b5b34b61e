// Functions that a model may call, and the calls in its answer.

import { make } from "./dom.js";
import { treeOf } from "./tree.js";

/** A function to begin with. */
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

/** Whether it is a list of functions, in the words of OpenAI's chats or of its responses. */
export const isTools = (value) =>
  Array.isArray(value) && value.length > 0 && value.every((tool) => typeof functionOf(tool)?.name === "string");

/** As chats want them. */
export const namedTools = (tools) => tools.map((tool) => ({ type: "function", function: functionOf(tool) }));

function functionOf(tool) {
  if (tool?.function) return tool.function;
  const { type, ...bare } = tool ?? {};
  return bare;
}

/** The calls of an answer, put together from the deltas of a stream. */
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

  /** Arguments as a tree; those that were cut off as they are. */
  show() {
    this.element.hidden = !this.list.length;
    this.element.replaceChildren(...this.list.map(itemOf));
  }
}

function itemOf({ name, written }) {
  const tree = treeOf(written) ?? make("code", {}, written);
  return make("li", { class: "call" }, make("code", { class: "name" }, name), make("div", { class: "tree" }, tree));
}
