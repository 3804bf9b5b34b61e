// Markdown as DOM nodes. All text is inserted as text: model output never becomes markup.

import { copyButton, make } from "./dom.js";

const MAX_DEPTH = 12; // deeper nesting is shown as text
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.+?)\s*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
const TABLE_RULE = /^\s*\|?(\s*:?-+:?\s*\|)+\s*(:?-+:?\s*)?$/;
const SAFE_LINK = /^(https?:|mailto:)/i;
// Lengths are limited, because an unclosed marker would otherwise be searched to the end of the text.
const INLINE = new RegExp(
  [
    /(?<ticks>`+)(?<code>[^`](?:[^]{0,2000}?[^`])?)\k<ticks>(?!`)/,
    /\\(?<escaped>[\\`*_{}[\]()#+\-.!|~<>])/,
    /!?\[(?<label>[^\]\n]{0,500})\]\((?<target>[^\s()]{1,2000}(?:\([^\s()]{0,200}\))?)(?: "[^"\n]{0,200}")?\)/,
    /\*\*\*(?=[^\s*])(?<both>[^]{0,1000}?[^\s*])\*\*\*/,
    /(?<strongMark>\*\*|(?<!\w)__)(?=[^\s*_])(?<strong>[^]{0,1000}?[^\s(])\k<strongMark>/,
    /(?<emMark>\*|(?<!\w)_)(?=[^\s*_)])(?<em>[^]{0,1000}?[^\s(])\k<emMark>(?!\w)/,
    /~~(?=\S)(?<deleted>[^]{0,1000}?\S)~~/,
    /(?<url>\bhttps?:\/\/[^\s<>"'`]{1,2000}[^\s<>"'`.,;:!?)\]*_~])/,
  ].map((pattern) => pattern.source).join("|"),
  "g",
);

const rendered = new WeakMap(); // the block sources of a container

/** Renders Markdown into a container. Blocks that have not changed since the last call keep their elements. */
export function renderMarkdown(container, text) {
  const blocks = blocksOf(text.split("\n"));
  const before = rendered.get(container) ?? [];
  const sources = blocks.map(({ lines }) => lines.join("\n"));
  let same = 0;
  while (same < sources.length && sources[same] === before[same]) same += 1;
  while (container.childNodes.length > same) container.lastChild.remove();
  container.append(...blocks.slice(same).map((block) => elementOf(block, 0)));
  rendered.set(container, sources);
}

/** Splits lines into blocks `{kind, lines}`. */
function blocksOf(lines) {
  const blocks = [];
  for (let start = 0; start < lines.length; ) {
    const kind = kindOf(lines, start);
    const end = endOf(kind, lines, start);
    if (kind !== "blank") blocks.push({ kind, lines: lines.slice(start, end) });
    start = end;
  }
  return blocks;
}

function kindOf(lines, i) {
  const line = lines[i];
  if (!line.trim()) return "blank";
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "list";
  return line.includes("|") && TABLE_RULE.test(lines[i + 1] ?? "") ? "table" : "text";
}

function endOf(kind, lines, start) {
  let end = start + 1;
  const more = (condition) => {
    while (end < lines.length && condition(lines[end], end)) end += 1;
    return end;
  };
  if (kind === "code") {
    const fence = lines[start].match(FENCE)[1];
    more((line) => !isFenceEnd(line, fence));
    return Math.min(end + 1, lines.length); // an unclosed block ends with the text
  }
  if (kind === "quote") return more((line) => QUOTE.test(line));
  if (kind === "table") return more((line) => line.includes("|"));
  if (kind === "text") return more((_, i) => kindOf(lines, i) === "text");
  if (kind !== "list") return end;
  const isOrdered = isOrderedItem(lines[start]);
  const belongs = (line) => /^\s{2,}\S/.test(line) || (ITEM.test(line) && isOrderedItem(line) === isOrdered);
  return more((line, i) => {
    if (!line.trim()) return belongs(lines[i + 1] ?? "");
    return belongs(line) || (kindOf(lines, i) === "text" && lines[i - 1].trim() !== "");
  });
}

const isFenceEnd = (line, fence) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");
const isOrderedItem = (line) => /\d/.test(line.match(ITEM)[2]);

function elementOf({ kind, lines }, depth) {
  if (depth > MAX_DEPTH) return make("p", {}, lines.join("\n"));
  if (kind === "code") return codeBlock(lines);
  if (kind === "rule") return make("hr");
  if (kind === "table") return table(lines);
  if (kind === "list") return list(lines, depth);
  if (kind === "quote") return make("blockquote", {}, ...children(lines.map((line) => line.replace(QUOTE, "")), depth));
  if (kind === "text") return make("p", {}, ...inline(lines.map((line) => line.trim()).join("\n")));
  const [, marks, title] = lines[0].match(HEADING);
  // The page's own headings use levels 1 to 3.
  return make(`h${Math.min(marks.length + 3, 6)}`, { "data-level": marks.length }, ...inline(title));
}

const children = (lines, depth) => blocksOf(lines).map((block) => elementOf(block, depth + 1));

function codeBlock(lines) {
  const [, fence, language] = lines[0].match(FENCE);
  const isClosed = lines.length > 1 && isFenceEnd(lines.at(-1), fence);
  const text = lines.slice(1, isClosed ? -1 : undefined).join("\n");
  const name = make("span", {}, language || "code");
  const head = make("div", { class: "code-head" }, name, copyButton(() => text, "code"));
  return make("div", { class: "code" }, head, make("pre", { tabindex: 0 }, make("code", {}, text)));
}

function list(lines, depth) {
  const [, indent, marker] = lines[0].match(ITEM);
  const items = [];
  let offset = 0; // indentation of the current item's text
  for (const line of lines) {
    const match = line.match(ITEM);
    if (match && (!items.length || match[1].length < Math.max(offset, indent.length + 1))) {
      offset = match[1].length + match[2].length + 1;
      items.push([line.slice(match[0].length)]);
    } else {
      items.at(-1).push(line.slice(Math.min(offset, line.length - line.trimStart().length)));
    }
  }
  const isOrdered = isOrderedItem(lines[0]);
  const elements = items.map((item) => {
    const [first, ...others] = children(item, depth);
    const isText = first?.tagName === "P"; // shown without paragraph spacing
    return make("li", {}, ...(isText ? first.childNodes : first ? [first] : []), ...others);
  });
  return make(isOrdered ? "ol" : "ul", { start: isOrdered && parseInt(marker, 10) }, ...elements);
}

function table([head, , ...rows]) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|");
  const row = (line, tag) => make("tr", {}, ...cells(line).map((cell) => make(tag, {}, ...inline(cell.trim()))));
  const body = make("tbody", {}, ...rows.map((line) => row(line, "td")));
  const element = make("table", {}, make("thead", {}, row(head, "th")), body);
  return make("div", { class: "table", tabindex: 0, role: "group", "aria-label": "Table" }, element);
}

/** Returns the nodes for a text with code, emphasis, links and line breaks. */
function inline(text, depth = 0) {
  if (depth > MAX_DEPTH) return [text];
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    nodes.push(...withBreaks(text.slice(end, match.index)), ...span(match, depth + 1));
    end = match.index + match[0].length;
  }
  return [...nodes, ...withBreaks(text.slice(end))];
}

function span({ 0: source, groups }, depth) {
  const { code, escaped, label, target, both, strong, em, deleted, url } = groups;
  if (code !== undefined) return [make("code", {}, code.trim() || code)];
  if (escaped) return [escaped];
  if (both) return [make("strong", {}, make("em", {}, ...inline(both, depth)))];
  if (strong) return [make("strong", {}, ...inline(strong, depth))];
  if (em) return [make("em", {}, ...inline(em, depth))];
  if (deleted) return [make("del", {}, ...inline(deleted, depth))];
  if (url) return [link(url, [url])];
  return SAFE_LINK.test(target) ? [link(target, label ? inline(label, depth) : [target])] : [source];
}

const link = (href, content) => make("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...content);

const withBreaks = (text) => text.split("\n").flatMap((line, i) => (i ? [make("br"), line] : [line])).filter(Boolean);
