// Light, dark, or as the system has it. Runs before the page is drawn, so that it does not flash.

import { recall, remember } from "./store.js";

const THEMES = ["auto", "light", "dark"];

function show(theme) {
  document.documentElement.dataset.theme = theme;
  const control = document.getElementById("theme");
  if (control) control.textContent = `Theme: ${theme}`;
}

/** To be called once there is a button. */
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
