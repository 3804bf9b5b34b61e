// The API key form. Keys are used after the server accepts them, and are stored in this tab only.

import { UNAUTHORIZED, authorization, getJson, getKey, setKey } from "./api.js";
import { byId } from "./dom.js";

const POSSIBLE = /^[!-~]+$/; // characters allowed in a key
const UNKNOWN = "The server rejected this key. Check it, or ask the operator of the server for a key.";

/** Calls `onAccepted` when the server accepts a key. Returns a function that closes the form after a response. */
export function startApiKey(onAccepted) {
  const [form, field, error, openButton, cancel] = ["key-form", "key", "key-error", "key-open", "key-cancel"].map(byId);
  let isDemanded = false; // the server requires a key; manually opened forms can be closed

  const showError = (message) => {
    if (error.textContent !== message) error.textContent = message; // screen readers announce changes
    field.setAttribute("aria-invalid", String(Boolean(message)));
  };
  const show = (isShown) => {
    form.hidden = !isShown;
    openButton.hidden = isShown || !getKey();
    cancel.hidden = isDemanded;
  };
  const close = () => {
    isDemanded = false;
    field.value = "";
    showError("");
    show(false);
  };

  authorization.addEventListener("unauthorized", () => {
    if (isDemanded) return; // the form is already open and may show another error
    isDemanded = true;
    if (getKey()) showError(UNKNOWN);
    show(true);
  });
  openButton.addEventListener("click", () => {
    show(true);
    field.focus();
  });
  cancel.addEventListener("click", () => {
    close();
    openButton.focus();
  });
  byId("key-forget").addEventListener("click", () => {
    setKey("");
    location.reload();
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    showError("");
    const key = field.value.trim();
    const problem = await problemOf(key);
    if (problem) return showError(problem);
    setKey(key);
    close();
    onAccepted();
  });
  close();
  return () => isDemanded && close();
}

/** Returns the error for a key, or an empty string. The current key stays until the new one is accepted. */
async function problemOf(key) {
  if (!key) return "Enter a key.";
  if (!POSSIBLE.test(key)) return "Invalid key: keys contain only ASCII characters without spaces.";
  try {
    await getJson("v1/models", key);
    return "";
  } catch (problem) {
    return problem.status === UNAUTHORIZED ? UNKNOWN : problem.message;
  }
}
