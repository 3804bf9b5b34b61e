// Calls to the server that this page came from, wherever that is mounted.

import { tab } from "./store.js";

const ROOT = new URL("..", import.meta.url);
const KEY = "key";
const PATIENCE_MS = 10_000; // for what is not an answer of a model

export const UNREACHABLE = 0;
export const UNAUTHORIZED = 401;

/** What the server said is wrong, or that it said nothing. */
export class ApiError extends Error {
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code; // what programs go by
  }
}

/** Tells of "unauthorized": the key that is used, or that there is none, will not do. */
export const news = new EventTarget();

export const urlOf = (path) => new URL(path, ROOT).href;

export const getKey = () => tab.get(KEY) ?? "";
export const setKey = (key) => (key ? tab.set(KEY, key) : tab.remove(KEY));

export async function getJson(path, key = getKey()) {
  const response = await send(path, { signal: AbortSignal.timeout(PATIENCE_MS) }, key);
  return response.json();
}

export async function postJson(path, body, signal) {
  const response = await post(path, body, signal);
  return response.json();
}

/** What a stream's events say, until it is done. */
export async function* stream(path, body, signal) {
  const response = await post(path, body, signal);
  for await (const line of linesOf(response)) {
    if (!line.startsWith("data: ")) continue; // a sign of life
    const content = line.slice("data: ".length);
    if (content === "[DONE]") return;
    const event = JSON.parse(content);
    if (event.error) throw new ApiError(response.status, messageOf(event), event.error.code);
    yield event;
  }
  throw new ApiError(UNREACHABLE, "The connection was lost before the response was complete.");
}

function post(path, body, signal) {
  const headers = { "content-type": "application/json" };
  return send(path, { method: "POST", headers, body: JSON.stringify(body), signal }, getKey());
}

async function send(path, options, key) {
  const headers = { ...options.headers, ...(key && { authorization: `Bearer ${key}` }) };
  const response = await reach(() => fetch(urlOf(path), { ...options, headers, cache: "no-store" }));
  if (response.ok) return response;
  const isCurrent = key === getKey(); // there may be another one since
  if (response.status === UNAUTHORIZED && isCurrent) news.dispatchEvent(new Event("unauthorized"));
  const body = await response.json().catch(() => null);
  throw new ApiError(response.status, messageOf(body) ?? response.statusText, body?.error?.code);
}

async function* linesOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reach(() => reader.read());
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      yield* lines;
    }
  } finally {
    reader.cancel().catch(() => {}); // whoever has read enough: the server need not go on
  }
}

/** Browsers have many words for a server that is not there; who stops a request did so on purpose. */
async function reach(act) {
  try {
    return await act();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(UNREACHABLE, "Cannot reach the server.");
  }
}

/** Routes of LoRAX have a string where those of OpenAI have an object. */
function messageOf(body) {
  const error = body?.error;
  return typeof error === "string" ? error : error?.message;
}
