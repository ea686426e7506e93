// Code blocks: their language, a copy button, and colours once the library is there.

import { copyFrom, element, iconButton } from "../dom.js";
import { fragmentOfCode } from "./parse.js";

const MOST_COLOURED = 50_000; // characters: beyond, colours cost more than they tell
const WHILE_IT_GROWS_MS = 200;
const MOST_WHILE_IT_GROWS = 4000;

let library = null;
const loaded = () => (library ??= import("../lib/highlight.min.js").then((module) => module.default));

/** A block that may grow: `show` takes its whole text, `finish` says that there is no more. */
export class CodeBlock {
  #code = element("code");
  #text = "";
  #language;
  #colouredAt = -Infinity;

  constructor(language) {
    this.asked = language ?? "";
    this.#language = /^[\w+#.-]{1,30}/.exec(language ?? "")?.[0] ?? "";
    const copy = iconButton("copy", "Copy the code", () => copyFrom(copy, this.#text));
    const name = this.#language || "text";
    const scroller = element("pre", { tabIndex: 0, role: "region", "aria-label": `Code: ${name}` }, this.#code);
    this.element = element("div", { className: "code-block" }, element("div", { className: "code-head" }, element("span", {}, name), copy), scroller);
  }

  show(text) {
    if (text === this.#text) return;
    if (text.startsWith(this.#text)) this.#code.append(text.slice(this.#text.length));
    else this.#code.textContent = text;
    this.#text = text;
    if (performance.now() - this.#colouredAt > WHILE_IT_GROWS_MS && text.length < MOST_WHILE_IT_GROWS) this.#colour();
  }

  finish() {
    this.#colour();
  }

  async #colour() {
    this.#colouredAt = performance.now();
    if (!this.#language || this.#text.length > MOST_COLOURED) return;
    const highlighter = await loaded();
    if (!highlighter.getLanguage(this.#language)) return;
    const { value } = highlighter.highlight(this.#text, { language: this.#language, ignoreIllegals: true });
    this.#code.replaceChildren(fragmentOfCode(value));
  }
}
