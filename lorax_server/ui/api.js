// HTTP calls to the server of this page, including its path prefix.

import { tab } from "./storage.js";

const ROOT = new URL("..", import.meta.url);
const KEY = "key";
const TIMEOUT_MS = 10_000; // timeout for requests other than completions

export const UNREACHABLE = 0;
export const UNAUTHORIZED = 401;

/** An error response, or a missing response. */
export class ApiError extends Error {
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code; // machine-readable error code
  }
}

/** Dispatches "unauthorized" if the key is missing or invalid. */
export const authorization = new EventTarget();

export const urlOf = (path) => new URL(path, ROOT).href;

export const getKey = () => tab.get(KEY) ?? "";
export const setKey = (key) => (key ? tab.set(KEY, key) : tab.remove(KEY));

export async function getJson(path, key = getKey()) {
  const response = await send(path, { signal: AbortSignal.timeout(TIMEOUT_MS) }, key);
  return response.json();
}

export async function postJson(path, body, signal) {
  const response = await post(path, body, signal);
  return response.json();
}

/** Yields the parsed events of a stream. */
export async function* stream(path, body, signal) {
  const response = await post(path, body, signal);
  for await (const line of linesOf(response)) {
    if (!line.startsWith("data: ")) continue; // keep-alive comment
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
  const isCurrent = key === getKey(); // the key may have changed since
  if (response.status === UNAUTHORIZED && isCurrent) authorization.dispatchEvent(new Event("unauthorized"));
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
    reader.cancel().catch(() => {}); // stop generation on the server if the reader stops early
  }
}

/** Converts browser-specific network errors to one message. Aborts are passed on. */
async function reach(act) {
  try {
    return await act();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(UNREACHABLE, "Cannot reach the server.");
  }
}

/** LoRAX routes return the error as a string, OpenAI routes as an object. */
function messageOf(body) {
  const error = body?.error;
  return typeof error === "string" ? error : error?.message;
}
