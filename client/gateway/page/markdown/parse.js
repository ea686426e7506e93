// Markdown to elements. What a model writes is hostile: its HTML stays text, the rest goes through DOMPurify, links open
// elsewhere and only on a click, and pictures are links.

import { Marked } from "../lib/marked.esm.js";
import DOMPurify from "../lib/purify.es.mjs";

const TAGS = "p br hr h3 h4 h5 h6 strong em del code pre blockquote ul ol li table thead tbody tr th td a sub sup kbd span";
const ALLOWED = {
  ALLOWED_TAGS: TAGS.split(" "),
  ALLOWED_ATTR: ["href", "class", "align", "start"],
  ADD_URI_SAFE_ATTR: ["align", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const HARMLESS_TAG = /^<(?:br|\/?(?:sub|sup|kbd))\s*\/?>/i;
// Marks within longer runs of text stay as they are: to pair them takes time that grows with the square of the length.
const MOST_INLINE = 4000;
// As in Pandoc: no space inside of a dollar sign, no digit behind the second. Bounded, for the same reason.
const INLINE_MATHS =
  /^(?:\$\$([^$]{1,1000}?)\$\$|\$((?!\s)(?:\\.|[^$\\\n]){1,1000}?)(?<!\s)\$(?!\d)|\\\(([\s\S]{1,1000}?)\\\)|\\\[([\s\S]{1,1000}?)\\\])/;
const BLOCK_MATHS = /^ {0,3}(?:\$\$([\s\S]{1,4000}?)\$\$|\\\[([\s\S]{1,4000}?)\\\])[ \t]*(?:\n+|$)/;

const escaped = (text) => text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
const mathsHtml = ({ text, display }) => `<code class="${display ? "maths display" : "maths"}">${escaped(text)}</code>`;

const marked = new Marked({
  gfm: true,
  breaks: true,
  tokenizer: {
    html: () => undefined,
    emStrong: (source, masked) => (masked.length > MOST_INLINE ? undefined : false),
    del: (source, masked = source) => (masked.length > MOST_INLINE ? undefined : false),
    tag: (source) => (HARMLESS_TAG.test(source) ? false : undefined), // false: as ever
  },
  renderer: {
    // `level` is the heading's place in the page, `depth` what it looks like.
    heading({ tokens, depth, level = 6 }) {
      return `<h${level} class="depth-${depth}">${this.parser.parseInline(tokens)}</h${level}>\n`;
    },
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
  extensions: [
    {
      name: "maths",
      level: "inline",
      start: (source) => found(source.search(/\$|\\[([]/)),
      tokenizer(source) {
        const match = INLINE_MATHS.exec(source);
        if (!match) return undefined;
        const [raw, dollars, dollar, round, square] = match;
        const display = dollars !== undefined || square !== undefined;
        return { type: "maths", raw, text: (dollars ?? dollar ?? round ?? square).trim(), display };
      },
      renderer: mathsHtml,
    },
    {
      name: "mathsBlock",
      level: "block",
      start: (source) => found(source.search(/(?<=\n) {0,3}(?:\$\$|\\\[)/)),
      tokenizer(source) {
        const match = BLOCK_MATHS.exec(source);
        return match ? { type: "mathsBlock", raw: match[0], text: (match[1] ?? match[2]).trim(), display: true } : undefined;
      },
      renderer: (token) => `<p>${mathsHtml(token)}</p>`,
    },
  ],
});

const found = (index) => (index < 0 ? undefined : index);

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.nodeName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
});

/** The blocks of a text. Their `raw` texts together are the text. */
export const blocksOf = (text) => marked.lexer(text);

/** The blocks as elements, without the colours of code and without formulas. */
export const fragmentOf = (blocks) => DOMPurify.sanitize(marked.parser(blocks), ALLOWED);

/** Coloured code as elements: spans with classes, nothing else. */
export const fragmentOfCode = (html) =>
  DOMPurify.sanitize(html, { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], ALLOW_DATA_ATTR: false, RETURN_DOM_FRAGMENT: true });
