// The list of chats, stored in this tab, or in this browser if the user wants that.

import { button, byId, make } from "./dom.js";
import { browser, tab } from "./storage.js";

const NAME = "chats";
const MAX_CHATS = 50;
const MAX_TITLE = 60; // characters

export class Chats {
  constructor(onOpen) {
    this.onOpen = onOpen;
    this.keep = byId("keep-chats");
    this.keep.checked = browser.recall(NAME, null) !== null;
    this.list = this.#storage.recall(NAME, []);
    for (const { turns } of this.list) turns.forEach(({ answers }) => answers.forEach(restore));
    this.keep.addEventListener("change", () => {
      (this.keep.checked ? tab : browser).remove(NAME);
      this.save();
    });
    byId("new-chat").addEventListener("click", () => this.open(null));
    this.current = { turns: [] };
  }

  get #storage() {
    return this.keep?.checked ? browser : tab;
  }

  /** Opens a chat, or a new one. */
  open(chat) {
    this.current = chat ?? { turns: [] };
    this.onOpen(this.current);
    this.#render();
  }

  /** Stores the chats after a change of the current one. Empty chats are not stored. */
  save() {
    const others = this.list.filter((chat) => chat !== this.current);
    const isUsed = this.current.turns.length > 0;
    if (isUsed && !this.list.includes(this.current)) this.list.unshift(this.current);
    if (!isUsed) this.list = others;
    this.list.length = Math.min(this.list.length, MAX_CHATS);
    this.#storage.remember(NAME, this.list);
    this.#render();
  }

  #delete(chat) {
    this.list = this.list.filter((each) => each !== chat);
    if (chat === this.current) this.open(null);
    this.save();
    byId("new-chat").focus();
  }

  #render() {
    const shown = JSON.stringify([this.list.indexOf(this.current), this.list.map(titleOf)]);
    if (shown === this.shown) return; // keeps the keyboard focus
    this.shown = shown;
    byId("chats").replaceChildren(...this.list.map((chat) => this.#item(chat)));
    byId("chats-note").hidden = this.list.length > 0;
  }

  #item(chat) {
    const title = titleOf(chat);
    const isCurrent = chat === this.current;
    const open = button(title, () => this.open(chat), { class: "chat", "aria-current": isCurrent && "page", title });
    const label = `Delete chat: ${title}`;
    const remove = button("✕", () => this.#delete(chat), { class: "quiet icon", "aria-label": label });
    return make("li", {}, open, remove);
  }
}

const titleOf = (chat) => chat.turns[0].prompt.trim().slice(0, MAX_TITLE);

/** Requests end when the page is closed. */
function restore(record) {
  if (record.state === "waiting" || record.state === "running") record.state = "stopped";
}
