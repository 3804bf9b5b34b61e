// Sends a prompt to one model and yields the completion as tokens, for both OpenAI routes.

import { ApiError, getKey, postJson, stream, urlOf } from "./api.js";

const ALTERNATIVES = 5;
const NO_TEMPLATE = "no_chat_template";
const withoutTemplate = new Set();

/** Call after a reconnect: another server may have different models with the same names. */
export const forgetTemplates = () => withoutTemplate.clear();

/** Returns true for the chat route. Models without a chat template use it only for tools. */
export const isChat = (model, { mode, tools }) => mode === "chat" && (tools || !withoutTemplate.has(model));

export function requestOf(model, prompt, parameters) {
  const common = { model, ...parameters.sampling, stream: true, stream_options: { include_usage: true } };
  if (parameters.schema) {
    const named = { name: "answer", schema: parameters.schema, strict: true };
    common.response_format = { type: "json_schema", json_schema: named };
  }
  if (!isChat(model, parameters)) {
    return { path: "v1/completions", body: { ...common, prompt, logprobs: ALTERNATIVES } };
  }
  const system = parameters.system ? [{ role: "system", content: parameters.system }] : [];
  const messages = [...system, { role: "user", content: prompt }];
  const tools = parameters.tools ? { tools: parameters.tools, tool_choice: parameters.choice } : {};
  return {
    path: "v1/chat/completions",
    body: { ...common, messages, ...tools, logprobs: true, top_logprobs: ALTERNATIVES },
  };
}

/**
 * Yields `{tokens, text, calls, reason, usage, tier}`. All fields except `tokens` are optional. `tier` is the adapter's
 * tier at the start of the request.
 */
export async function* ask(model, prompt, parameters, signal) {
  const request = requestOf(model, prompt, parameters);
  try {
    for await (const event of stream(request.path, request.body, signal)) yield read(event, parameters.tools);
  } catch (error) {
    const isPlain = error instanceof ApiError && error.code === NO_TEMPLATE && isChat(model, parameters);
    if (!isPlain || parameters.tools) throw error;
    withoutTemplate.add(model);
    yield* ask(model, prompt, parameters, signal);
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
  const tier = event.adapter_tier;
  if (!choice) return { tokens: [], usage: event.usage, tier };
  const text = choice.delta ? choice.delta.content ?? "" : choice.text;
  const tokens = tokensOf(choice.logprobs);
  // With tools, the event text can differ from the token text. Show the tokens.
  const parts = tools && tokens.length ? tokens.map((token) => ({ ...token, text: token.token })) : null;
  const calls = choice.delta?.tool_calls ?? [];
  return { tokens: parts ?? divide(tools ? "" : text, tokens), text, calls, reason: choice.finish_reason, tier };
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
export function divide(text, tokens) {
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
