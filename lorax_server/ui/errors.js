// Errors as two sentences: the cause, and what to do.

import { UNAUTHORIZED, UNREACHABLE } from "./api.js";

const FORBIDDEN = 403;
const NOT_FOUND = 404;
const FAILED_ADAPTER = 424;
const TOO_MANY_REQUESTS = 429;
const CONTEXT_LENGTH = "context_length_exceeded";

/** Returns `{message, advice}` for a failed completion. */
export function explain({ status, code, message }) {
  return { message, advice: adviceFor(status, code) };
}

function adviceFor(status, code) {
  if (status === UNREACHABLE) return "Check that the server is running, then try again.";
  if (status === UNAUTHORIZED) return "Enter an API key at the top of the page, then try again.";
  if (status === FORBIDDEN) return "Choose another model, or use an API key that may use this model.";
  if (status === NOT_FOUND) return "Choose another model.";
  if (status === FAILED_ADAPTER) return "Fix the adapter's files and try again, or choose another model.";
  if (status === TOO_MANY_REQUESTS) return "Wait a few seconds, then try again.";
  if (code === CONTEXT_LENGTH) return "Start a new chat, shorten the message, or lower Max tokens in the settings.";
  if (status >= 400 && status < 500) return "Change the message or the settings, then try again.";
  return "Try again. If the error persists, look at the server's log.";
}
