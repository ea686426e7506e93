// Formulas, set by KaTeX once there is one.

import { element } from "../dom.js";

const MOST_CHARACTERS = 5000;
const MOST_KNOWN = 500;
const SLICE_MS = 12; // then the rest of the page has its turn

const known = new Map(); // the formulas that were set last

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
  let began = performance.now();
  for (const code of found) {
    if (performance.now() - began > SLICE_MS) {
      await new Promise((then) => setTimeout(then));
      began = performance.now();
    }
    if (!code.isConnected) return; // the block was set anew
    const formula = formulaOf(katex, code.textContent, code.classList.contains("display"));
    if (formula) code.replaceWith(formula);
    else code.classList.add("wrong");
  }
}

/** A formula as an element, or null where it is none. A growing text asks for the same ones again and again. */
function formulaOf(katex, text, displayMode) {
  const name = `${displayMode} ${text}`;
  if (!known.has(name)) {
    if (known.size >= MOST_KNOWN) known.delete(known.keys().next().value);
    known.set(name, made(katex, text, displayMode));
  }
  return known.get(name)?.cloneNode(true) ?? null;
}

function made(katex, text, displayMode) {
  const place = element("span", { className: displayMode ? "formula display" : "formula" });
  if (displayMode) place.tabIndex = 0; // it may scroll
  try {
    // Elements, not HTML: sizes are then set as properties, which the page's policy allows.
    katex.render(text, place, { displayMode, throwOnError: true, trust: false, maxExpand: 500, maxSize: 20, strict: "ignore" });
    return place;
  } catch {
    return null;
  }
}
