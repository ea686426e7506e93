// The list of conversations: search, rename, export, delete.

import { byId, element, iconButton, saveFile } from "../dom.js";
import { toast } from "../dialogs.js";
import { current, forget, isRunning, open, remember, startNew } from "./chat.js";
import * as store from "./store.js";

const DAY_MS = 86_400_000;

/** Shows the list as it is now. */
export async function showList() {
  const words = byId("search").value;
  const found = await store.find(words);
  const groups = Map.groupBy ? Map.groupBy(found, dayOf) : grouped(found);
  const parts = [...groups].map(([day, entries]) =>
    element("section", { "aria-label": day }, element("h2", {}, day), element("ul", {}, ...entries.map(itemOf))),
  );
  const nothing = words ? "Nothing found." : "Conversations appear here. They stay in this browser.";
  byId("conversations").replaceChildren(...(parts.length ? parts : [element("p", { className: "small" }, nothing)]));
}

function grouped(entries) {
  const groups = new Map();
  for (const entry of entries) groups.set(dayOf(entry), [...(groups.get(dayOf(entry)) ?? []), entry]);
  return groups;
}

function dayOf({ updated }) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (updated >= midnight) return "Today";
  if (updated >= midnight - DAY_MS) return "Yesterday";
  return updated >= midnight - 6 * DAY_MS ? "Last seven days" : "Earlier";
}

function itemOf({ id, title }) {
  const name = title || "Untitled";
  const go = element("button", { type: "button", className: "go", title: name }, name);
  const item = element("li", { className: isRunning(id) ? "running" : "" }, go);
  if (id === current().id) go.setAttribute("aria-current", "true");
  go.addEventListener("click", async () => {
    await open(id);
    document.dispatchEvent(new CustomEvent("chosen"));
  });
  item.append(
    iconButton("edit", `Rename “${name}”`, () => rename(item, id, name)),
    iconButton("save", `Export “${name}”`, async () => saveFile(fileName(name), await store.exported([id]))),
    iconButton("trash", `Delete “${name}”`, () => remove(id, name)),
  );
  return item;
}

const fileName = (name) => `${name.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40)}.json`;

function rename(item, id, name) {
  const field = element("input", { value: name, maxLength: 200, "aria-label": "New name" });
  const before = [...item.children];
  item.replaceChildren(field);
  field.select();
  let isDone = false;
  const leave = async (isKept) => {
    if (isDone) return;
    isDone = true;
    const title = field.value.trim();
    if (isKept && title && title !== name) {
      const conversation = id === current().id ? current() : await store.load(id);
      conversation.title = title;
      await store.save(conversation);
      if (id === current().id) byId("title").textContent = title;
      await showList();
    } else item.replaceChildren(...before);
    byId("conversations").querySelector("[aria-current], .go")?.focus();
  };
  field.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    if (event.key === "Enter") leave(true);
    if (event.key === "Escape") {
      event.stopPropagation();
      leave(false);
    }
  });
  field.addEventListener("blur", () => leave(true));
}

async function remove(id, name) {
  const conversation = await store.load(id);
  forget(id);
  await store.remove(id);
  if (id === current().id) startNew();
  await showList();
  toast(`“${name}” was deleted.`, "Undo", async () => {
    remember(id);
    await store.save(conversation);
    await open(id);
    await showList();
  });
}

export async function exportAll() {
  const value = await store.exported();
  saveFile(`allspan-conversations-${new Date().toISOString().slice(0, 10)}.json`, value);
}

export async function deleteAll() {
  const { conversations } = await store.exported();
  for (const { id } of conversations) {
    forget(id);
    await store.remove(id);
  }
  startNew();
  await showList();
  toast(`${counted(conversations.length)} deleted.`, "Undo", async () => {
    for (const conversation of conversations) {
      remember(conversation.id);
      await store.save(conversation);
    }
    await showList();
  });
}

const counted = (count) => `${count} ${count === 1 ? "conversation was" : "conversations were"}`;

export async function importFrom(file) {
  try {
    const count = await store.take(await file.text());
    toast(`${counted(count)} imported.`);
  } catch (error) {
    toast(error.message);
  }
  await showList();
}

let waiting = null;
export function listenToSearch() {
  byId("search").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(showList, 120);
  });
  store.onChange(showList);
}
