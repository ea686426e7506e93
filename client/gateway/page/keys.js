// The keyboard map: one row a shortcut, for the keys and for the dialog that lists them.

import { byId, element } from "./dom.js";

const IS_MAC = /^Mac|^iP/.test(navigator.platform);

/** `run` returns false to pass the key on. */
export function listenToKeys(rows) {
  byId("keys").replaceChildren(
    ...rows.map(({ shown, does }) => element("div", {}, element("dt", {}, ...shown.split(" ").map((name) => element("kbd", {}, IS_MAC && name === "Alt" ? "⌥" : name))), element("dd", {}, does))),
  );
  byId("keys-open").addEventListener("click", () => byId("keys-dialog").showModal());
  byId("keys-close").addEventListener("click", () => byId("keys-dialog").close());
  document.addEventListener("keydown", (event) => {
    if (event.isComposing || event.defaultPrevented || document.querySelector("dialog[open]")) return;
    const row = rows.find((each) => matches(each, event));
    if (row && row.run(event) !== false) event.preventDefault();
  });
}

function matches({ key, alt = false, outside = false }, event) {
  if (!key || event.ctrlKey || event.metaKey || event.altKey !== alt) return false;
  if (outside && event.target.closest("input, textarea, select")) return false;
  // On a Mac, and where letters are not Latin, Alt and a letter is another sign: then the key's place counts.
  const isLetter = /^[a-z]$/i.test(event.key);
  return alt && !isLetter ? event.code === `Key${key.toUpperCase()}` : event.key.toLowerCase() === key.toLowerCase();
}
