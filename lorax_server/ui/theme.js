// Light, dark or system theme. Runs before the first paint to avoid a flash.

import { browser } from "./storage.js";

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
    browser.remember("theme", next);
    show(next);
  });
}

const stored = browser.recall("theme", "auto");
show(THEMES.includes(stored) ? stored : "auto");
