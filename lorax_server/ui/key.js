// The API key: asked for when the server wants one, used once the server has taken it, kept by this tab only.

import { UNAUTHORIZED, getJson, getKey, news, setKey } from "./api.js";
import { byId } from "./dom.js";

const POSSIBLE = /^[!-~]+$/; // what the server takes, and a header can carry
const UNKNOWN = "The server rejected this key.";

/** `onAccepted` is called when a key has been found to be right. The result is to be called when the server answers. */
export function startKey(onAccepted) {
  const [form, field, error, opener, cancel] = ["key-form", "key", "key-error", "key-open", "key-cancel"].map(byId);
  let isDemanded = false; // by the server; a form that was opened by hand can be closed again

  const refuse = (message) => {
    if (error.textContent !== message) error.textContent = message; // is read out when it changes
    field.setAttribute("aria-invalid", String(Boolean(message)));
  };
  const show = (isShown) => {
    form.hidden = !isShown;
    opener.hidden = isShown || !getKey();
    cancel.hidden = isDemanded;
  };
  const close = () => {
    isDemanded = false;
    field.value = "";
    refuse("");
    show(false);
  };

  news.addEventListener("unauthorized", () => {
    if (isDemanded) return; // and may have been refused for another reason since
    isDemanded = true;
    if (getKey()) refuse(UNKNOWN);
    show(true);
  });
  opener.addEventListener("click", () => {
    show(true);
    field.focus();
  });
  cancel.addEventListener("click", () => {
    close();
    opener.focus();
  });
  byId("key-forget").addEventListener("click", () => {
    setKey("");
    location.reload();
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    refuse("");
    const key = field.value.trim();
    const problem = await problemOf(key);
    if (problem) return refuse(problem);
    setKey(key);
    close();
    onAccepted();
  });
  close();
  return () => isDemanded && close();
}

/** What is wrong with a key; empty if the server takes it. Until then the one that is used stays. */
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
