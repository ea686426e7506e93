// A text in Markdown that may grow: what is complete is set once, only the last block is set again.

import { element } from "../dom.js";
import { CodeBlock } from "./code.js";
import { setMaths } from "./maths.js";
import { blocksOf, fragmentOf } from "./parse.js";

const OUTER_LEVEL = 2; // of the heading above each message
const REST = 4; // times as long as the last drawing took
const REFERENCE = /^ {0,3}\[[^\]\n]+\]:\s*\S/m;

export class MarkdownView {
  #settled = 0; // characters that stand in finished blocks
  #growing = null; // the element of the block behind them
  #code = null; // its CodeBlock, where it is one
  #level = OUTER_LEVEL; // of the last heading
  #restUntil = 0;
  #isPlain = false;

  constructor(onBlock = () => {}) {
    this.element = element("div", { className: "text markdown" });
    this.onBlock = onBlock;
  }

  /** Shows the whole text so far. `isFinal`: no more will come. What takes long is shown less often. */
  show(text, isFinal) {
    const began = performance.now();
    if (!isFinal && began < this.#restUntil) return;
    try {
      if (!this.#isPlain) this.#show(text, isFinal);
    } catch {
      // Thousands of marks within each other end the parser's stack.
      this.#isPlain = true;
      this.element.className = "text plain";
    }
    if (this.#isPlain) this.element.textContent = text;
    this.#restUntil = performance.now() + REST * (performance.now() - began);
  }

  #show(text, isFinal) {
    if (isFinal && this.#settled && REFERENCE.test(text)) this.#restart();
    const tail = text.replace(/\r\n?/g, "\n").slice(this.#settled);
    const blocks = blocksOf(tail);
    const last = isFinal ? blocks.length : blocks.findLastIndex((block) => block.type !== "space");
    for (const block of blocks.slice(0, Math.max(0, last))) this.#settle(block);
    if (!isFinal && last >= 0) this.#grow(blocks[last]);
  }

  #settle(block) {
    this.#settled += block.raw.length;
    if (block.type === "space" || block.type === "def") return;
    this.#grow(block);
    this.#code?.finish();
    if (!this.#code && this.#growing) decorate(this.#growing);
    if (block.type === "heading") this.#level = block.level;
    this.onBlock(block.raw);
    this.#growing = this.#code = null;
  }

  #grow(block) {
    if (block.type === "code") {
      this.#growCode(block);
      return;
    }
    this.#code = null;
    // No level is left out, whatever the model begins with.
    if (block.type === "heading") block.level = Math.min(block.depth + OUTER_LEVEL, this.#level + 1, 6);
    const made = element("div", { className: "block" }, fragmentOf([block]));
    for (const table of made.querySelectorAll("table")) {
      const scroller = element("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": "Table" });
      table.replaceWith(scroller);
      scroller.append(table);
    }
    this.#place(made);
    setMaths(made);
  }

  #growCode(block) {
    if (this.#code?.asked !== (block.lang ?? "")) {
      this.#code = new CodeBlock(block.lang);
      this.#place(this.#code.element);
    }
    this.#code.show(block.text);
  }

  /** Where a link names an address that comes later, its block was set without it. */
  #restart() {
    this.element.replaceChildren();
    this.#settled = 0;
    this.#growing = this.#code = null;
    this.#level = OUTER_LEVEL;
  }

  #place(made) {
    if (this.#growing) this.#growing.replaceWith(made);
    else this.element.append(made);
    this.#growing = made;
  }
}

/** Code within lists and quotations gets what code of its own has. */
function decorate(parent) {
  for (const pre of parent.querySelectorAll("pre")) {
    const code = pre.querySelector("code") ?? pre;
    const block = new CodeBlock(/language-(\S+)/.exec(code.className)?.[1]);
    block.show(code.textContent.replace(/\n$/, ""));
    block.finish();
    pre.replaceWith(block.element);
  }
}
