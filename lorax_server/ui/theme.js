// Light, dark or system theme. Runs before the first paint to avoid a flash.

import { recall, remember } from "./store.js";

const THEMES = ["auto", "light", "dark"];

function show(theme) {
  document.documentElement.dataset.theme = theme;
  const control = document.getElementById("theme");
  if (control) control.textContent = `Theme: ${theme}`;
}

/** Call after the button exists. */
export function startTheme() {
  show(document.documentElement.dataset.theme);
  document.getElementById("theme").addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
    remember("theme", next);
    show(next);
  });
}

const remembered = recall("theme", "auto");
show(THEMES.includes(remembered) ? remembered : "auto");
