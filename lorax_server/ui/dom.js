// DOM helpers. Server and model text is inserted as text, never as markup.

const COPIED_MS = 1500; // how long a copy button shows the result

/** Returns true if the page is mainly used with a touch screen. */
export const isTouch = () => matchMedia("(pointer: coarse)").matches;

export const byId = (id) => document.getElementById(id);

/** Creates an element with attributes and children or strings. Skips null, undefined and false. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function button(label, onClick, attributes = {}) {
  const element = make("button", { type: "button", ...attributes }, label);
  element.addEventListener("click", onClick);
  return element;
}

/** Returns a button that copies the text of `read`. */
export function copyButton(read, what) {
  const control = button("Copy", async () => {
    control.textContent = (await copy(read())) ? "Copied" : "Not allowed";
    setTimeout(() => (control.textContent = "Copy"), COPIED_MS);
  }, { class: "quiet copy", "aria-label": `Copy ${what}` });
  return control;
}

/** Returns true on success. Pages without https have no clipboard and use the older command. */
async function copy(text) {
  if (await navigator.clipboard?.writeText(text).then(() => true, () => false)) return true;
  const focused = document.activeElement;
  const field = make("textarea", { class: "unseen" });
  document.body.append(field);
  field.value = text;
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return isCopied;
}

/** Sets text only if it differs, because screen readers announce changes of live regions. */
export function announce(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Returns a function that runs `act` at most once per frame. */
export function oncePerFrame(act) {
  let isDue = false;
  return () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      act();
    });
  };
}
