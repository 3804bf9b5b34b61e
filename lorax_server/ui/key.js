// The API key: asked for when the server wants one, kept by this tab only.

import { UNAUTHORIZED, getJson, getKey, news, setKey } from "./api.js";
import { byId } from "./dom.js";

/** `onAccepted` is called when a key has been found to be right. */
export function startKey(onAccepted) {
  const [form, field, error, opener] = ["key-form", "key", "key-error", "key-open"].map(byId);
  const show = (isShown) => {
    form.hidden = !isShown;
    opener.hidden = isShown || !getKey();
  };
  const refuse = (message) => {
    error.textContent = message;
    field.setAttribute("aria-invalid", String(Boolean(message)));
  };

  news.addEventListener("unauthorized", () => {
    if (getKey()) refuse("The server does not know this key.");
    if (form.hidden) field.value = "";
    show(true);
  });
  opener.addEventListener("click", () => {
    show(true);
    field.focus();
  });
  byId("key-forget").addEventListener("click", () => {
    setKey("");
    location.reload();
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    refuse("");
    setKey(field.value.trim());
    try {
      await getJson("v1/models");
    } catch (problem) {
      if (problem.status !== UNAUTHORIZED) refuse(problem.message);
      else if (!getKey()) refuse("Type a key.");
      return;
    }
    field.value = "";
    show(false);
    onAccepted();
  });
  show(false);
}
