// The dialogs, the panels at the side, and short messages at the bottom.

import { getJson, key } from "./api.js";
import { byId, element, focusPrompt, speak } from "./dom.js";

const TOAST_MS = 8000;
const NARROW = matchMedia("(max-width: 56rem)");

let leaving = null;

/** A short message; `action` is the name of a button that calls `onAction`. */
export function toast(text, action = "", onAction = null) {
  const place = byId("toast");
  clearTimeout(leaving);
  place.replaceChildren(element("span", {}, text));
  if (action) {
    const button = element("button", { type: "button" }, action);
    button.addEventListener("click", () => {
      place.hidden = true;
      onAction();
    });
    place.append(button);
  }
  place.hidden = false;
  leaving = setTimeout(() => (place.hidden = true), TOAST_MS);
}

/** Opens or closes a panel at the side; the other one closes. */
export function togglePanel(name, isOpen = byId(name).hidden) {
  for (const panel of ["settings", "cluster"]) {
    const opened = panel === name && isOpen;
    byId(panel).hidden = !opened;
    byId(`${panel}-open`).setAttribute("aria-expanded", String(opened));
  }
  document.body.classList.toggle("with-panel", isOpen);
  if (isOpen) byId(name).querySelector("[data-close]").focus();
  else byId(`${name}-open`).focus();
  covered();
}

/** Shows or hides the list of conversations. */
export function toggleList(isOpen = !isListOpen()) {
  document.body.classList.toggle(NARROW.matches ? "list-over" : "list-away", NARROW.matches ? isOpen : !isOpen);
  byId("list-open").setAttribute("aria-expanded", String(isOpen));
  covered();
  if (isOpen) byId("new").focus();
  else focusPrompt();
}

export const isListOpen = () => (NARROW.matches ? document.body.classList.contains("list-over") : !document.body.classList.contains("list-away"));

/** On a narrow screen the list and the panels lie over the conversation, which is then out of reach. */
function covered() {
  const isList = document.body.classList.contains("list-over");
  const isPanel = document.body.classList.contains("with-panel");
  const isCovered = NARROW.matches && (isList || isPanel);
  byId("shade").hidden = !isCovered;
  byId("middle").inert = isCovered;
}

export function closeCovers() {
  if (document.body.classList.contains("list-over")) toggleList(false);
  const open = ["settings", "cluster"].find((name) => !byId(name).hidden);
  if (open) togglePanel(open, false);
  return Boolean(open);
}

export function listenToPanels() {
  for (const name of ["settings", "cluster"]) {
    byId(`${name}-open`).addEventListener("click", () => togglePanel(name));
    byId(name).querySelector("[data-close]").addEventListener("click", () => togglePanel(name, false));
  }
  byId("list-open").addEventListener("click", () => toggleList());
  byId("list-close").addEventListener("click", () => toggleList(false));
  byId("shade").addEventListener("click", closeCovers);
  NARROW.addEventListener("change", covered);
}

/** Asks for the API key. */
export function askForKey() {
  const dialog = byId("key-dialog");
  if (dialog.open) return;
  byId("key").value = "";
  byId("key-remember").checked = key.isRemembered();
  byId("key-error").hidden = true;
  dialog.showModal();
}

/** `onKey` is called when a key was taken. */
export function listenToKeyDialog(onKey) {
  const dialog = byId("key-dialog");
  byId("key-cancel").addEventListener("click", () => dialog.close());
  byId("key-open").addEventListener("click", askForKey);
  byId("key-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const before = key.get();
    key.set(byId("key").value.trim(), byId("key-remember").checked);
    try {
      await getJson("v1/models");
      dialog.close();
      speak("The key was taken.");
      onKey();
      focusPrompt();
    } catch (error) {
      key.set(before, key.isRemembered());
      byId("key-error").textContent = error.message;
      byId("key-error").hidden = false;
      byId("key").select();
    }
  });
}
