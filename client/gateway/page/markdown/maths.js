// Formulas, set by KaTeX once there is one.

import { element } from "../dom.js";

const MOST_CHARACTERS = 5000;

let library = null;

function loaded() {
  library ??= import("../lib/katex.min.js").then(() => {
    const href = new URL("../lib/katex.min.css", import.meta.url).href;
    document.head.append(element("link", { rel: "stylesheet", href }));
    return globalThis.katex;
  });
  return library;
}

/** Sets the formulas below `parent`. What is no formula stays as it was written. */
export async function setMaths(parent) {
  const found = [...parent.querySelectorAll("code.maths")].filter((code) => code.textContent.length <= MOST_CHARACTERS);
  if (!found.length) return;
  const katex = await loaded();
  for (const code of found) {
    const displayMode = code.classList.contains("display");
    const place = element("span", { className: displayMode ? "formula display" : "formula" });
    if (displayMode) place.tabIndex = 0; // it may scroll
    try {
      // Elements, not HTML: sizes are then set as properties, which the page's policy allows.
      katex.render(code.textContent, place, { displayMode, throwOnError: true, trust: false, maxExpand: 500, maxSize: 20, strict: "ignore" });
      code.replaceWith(place);
    } catch {
      code.classList.add("wrong");
    }
  }
}
