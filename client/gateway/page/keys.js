// The keyboard map: one row a shortcut, for the keys and for the dialog that lists them.

import { byId, element } from "./dom.js";

/** `code` is the place of a key, so that Alt and a letter work on every layout; `run` returns false to pass the key on. */
export function listenToKeys(rows) {
  byId("keys").replaceChildren(
    ...rows.map(({ shown, does }) => element("div", {}, element("dt", {}, ...shown.split(" ").map((name) => element("kbd", {}, name))), element("dd", {}, does))),
  );
  byId("keys-open").addEventListener("click", () => byId("keys-dialog").showModal());
  byId("keys-close").addEventListener("click", () => byId("keys-dialog").close());
  document.addEventListener("keydown", (event) => {
    if (event.isComposing || event.defaultPrevented || document.querySelector("dialog[open]")) return;
    const row = rows.find((each) => matches(each, event));
    if (row && row.run(event) !== false) event.preventDefault();
  });
}

function matches({ code, key, alt = false, outside = false }, event) {
  if (event.ctrlKey || event.metaKey || event.altKey !== alt) return false;
  if (outside && event.target.closest("input, textarea, select")) return false;
  return code ? event.code === code : event.key === key;
}
