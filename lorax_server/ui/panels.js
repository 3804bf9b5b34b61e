// Side panels: closed at first, and at most one is open. On phones, a panel covers the page.

import { byId } from "./dom.js";

const NAMES = ["sidebar", "settings", "activity"];

export function startPanels(onOpen) {
  const close = (name, isFocused) => {
    byId(name).dataset.open = "false";
    const opener = byId(`${name}-open`);
    opener.setAttribute("aria-expanded", "false");
    if (isFocused) opener.focus();
  };
  for (const name of NAMES) {
    byId(`${name}-open`).addEventListener("click", () => {
      if (byId(name).dataset.open === "true") return close(name, true);
      openPanel(name);
      onOpen();
    });
    byId(`${name}-close`).addEventListener("click", () => close(name, true));
    byId(name).addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || event.defaultPrevented || event.target.type === "search") return;
      event.stopPropagation();
      close(name, true);
    });
  }
  byId("chats").addEventListener("click", () => close("sidebar", false));
  byId("new-chat").addEventListener("click", () => close("sidebar", false));
}

export function openPanel(name) {
  for (const each of NAMES) {
    byId(each).dataset.open = String(each === name);
    byId(`${each}-open`).setAttribute("aria-expanded", String(each === name));
  }
  byId(`${name}-close`).focus();
}

export const isPanelOpen = (name) => byId(name).dataset.open === "true";
