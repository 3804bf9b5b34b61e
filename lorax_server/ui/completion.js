// Sends a conversation to one model and yields its completion, for both OpenAI routes.

import { ApiError, getKey, postJson, stream, urlOf } from "./api.js";

const NUM_ALTERNATIVES = 5;
const NO_TEMPLATE = "no_chat_template";
const withoutTemplate = new Set(); // models that can only continue text

/** Call after a reconnect: another server may have different models with the same names. */
export const forgetTemplates = () => withoutTemplate.clear();

/** Returns true for the chat route. Models without a chat template use it only for tools. */
export const usesChat = (model, { mode, tools }) => mode === "chat" && (tools || !withoutTemplate.has(model));

/** Returns the path and body for `input`: chat messages, and the text to continue without a chat template. */
export function requestOf(model, { messages, prompt }, parameters) {
  const common = { model, ...parameters.sampling, stream: true, stream_options: { include_usage: true } };
  if (parameters.schema) {
    const named = { name: "answer", schema: parameters.schema, strict: true };
    common.response_format = { type: "json_schema", json_schema: named };
  }
  const { probabilities, system, tools, choice } = parameters;
  if (!usesChat(model, parameters)) {
    const logprobs = probabilities ? { logprobs: NUM_ALTERNATIVES } : {};
    return { path: "v1/completions", body: { ...common, prompt, ...logprobs } };
  }
  const body = { ...common, messages: [...(system ? [{ role: "system", content: system }] : []), ...messages] };
  if (tools) Object.assign(body, { tools, tool_choice: choice });
  if (probabilities) Object.assign(body, { logprobs: true, top_logprobs: NUM_ALTERNATIVES });
  return { path: "v1/chat/completions", body };
}

/**
 * Yields `{text, reasoning, tokens, calls, reason, usage, tier}`. Without probabilities, each text is one token.
 * `tier` is the adapter's tier at the start of the request.
 */
export async function* complete(model, input, parameters, signal) {
  const { path, body } = requestOf(model, input, parameters);
  try {
    for await (const event of stream(path, body, signal)) yield read(event, parameters.tools);
  } catch (error) {
    const lacksTemplate = error instanceof ApiError && error.code === NO_TEMPLATE && usesChat(model, parameters);
    if (!lacksTemplate || parameters.tools) throw error;
    withoutTemplate.add(model);
    yield* complete(model, input, parameters, signal);
  }
}

/** Loads an adapter by generating one token with the completions route, which needs no chat template. */
export const load = (model, signal) => postJson("v1/completions", { model, prompt: "Hello", max_tokens: 1 }, signal);

/** Returns the request as a curl command, without the API key. */
export function curlOf({ path, body }) {
  const key = getKey() ? [`-H "authorization: Bearer $LORAX_API_KEY"`] : [];
  const data = `'${JSON.stringify(body).replaceAll("'", `'\\''`)}'`;
  return ["curl -N", urlOf(path), "-H 'content-type: application/json'", ...key, "-d", data].join(" ");
}

function read(event, tools) {
  const [choice] = event.choices;
  const common = { usage: event.usage, tier: event.adapter_tier };
  if (!choice) return { ...common, text: "", tokens: [], calls: [] };
  const text = (choice.delta ? choice.delta.content : choice.text) ?? "";
  const raw = tokensOf(choice.logprobs);
  // With tools, the event text can differ from the token text.
  const tokens = tools ? raw.map((token) => ({ ...token, text: token.token })) : divide(text, raw);
  const { reasoning_content: reasoning = "", tool_calls: calls = [] } = choice.delta ?? {};
  return { ...common, text, reasoning: reasoning ?? "", tokens, calls: calls ?? [], reason: choice.finish_reason };
}

function tokensOf(logprobs) {
  if (logprobs?.content) {
    return logprobs.content.map(({ token, logprob, top_logprobs: top }) => ({ token, logprob, top }));
  }
  return (logprobs?.tokens ?? []).map((token, i) => ({
    token,
    logprob: logprobs.token_logprobs[i],
    top: Object.entries(logprobs.top_logprobs?.[i] ?? {})
      .map(([other, logprob]) => ({ token: other, logprob }))
      .sort((a, b) => b.logprob - a.logprob),
  }));
}

/**
 * Splits an event's text into one part per token. The parts join to the text, even if tokens are empty or end inside a
 * character: text before the next token that is found belongs to the previous token.
 */
function divide(text, tokens) {
  if (!tokens.length) return text ? [{ token: text, text, logprob: null, top: [] }] : [];
  const parts = tokens.map((token) => ({ ...token, text: "" }));
  let rest = text;
  parts.forEach((part, i) => {
    const place = part.token ? rest.indexOf(part.token) : -1;
    if (place < 0 || (place > 0 && i === 0)) return;
    if (place > 0) parts[i - 1].text += rest.slice(0, place);
    part.text = part.token;
    rest = rest.slice(place + part.token.length);
  });
  parts.at(-1).text += rest;
  return parts;
}
