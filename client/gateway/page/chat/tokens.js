// An answer's tokens as elements: each knows how likely it was, and what else might have come.

import { byId, element, speak } from "../dom.js";

const facts = new WeakMap();

/** Texts of tokens whose bytes may end within a character; the token that completes one has it. */
class Pieces {
  #decoder = new TextDecoder("utf-8");
  of(entries) {
    return entries.map((entry) =>
      this.#decoder.decode(new Uint8Array(entry.bytes ?? new TextEncoder().encode(entry.token)), { stream: true }),
    );
  }
}

/** Shows what events brought as tokens, not as Markdown, so that each can be looked at. */
export class TokenView {
  #pieces = new Pieces();
  #written = 0;
  element = element("div", { className: "text plain" });

  /** `events`: of each event so far, its content and its log-probabilities. */
  show(events) {
    for (; this.#written < events.length; this.#written++) this.#write(events[this.#written]);
  }

  #write({ content, logprobs }) {
    const entries = logprobs?.content ?? [];
    const pieces = this.#pieces.of(entries);
    const whole = pieces.join("");
    if (!entries.length || !whole.endsWith(content)) {
      this.element.append(content); // nothing is known of it, or a part was held back
      return;
    }
    let cut = whole.length - content.length; // a leading space that the server has left out
    pieces.forEach((piece, place) => {
      const text = piece.slice(cut);
      cut = Math.max(0, cut - piece.length);
      if (text) this.element.append(tokenElement(text, entries[place]));
    });
  }
}

function tokenElement(text, entry) {
  const chance = Math.exp(entry.logprob);
  const span = element("span", { className: chance < 0.05 ? "token low" : chance < 0.3 ? "token fair" : "token" }, text);
  facts.set(span, entry);
  return span;
}

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(logprob > -0.001 ? 0 : 1)} %`;
const shown = (token) => token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·") || "(nothing)";

function showTip(span) {
  const tip = byId("tip");
  const entry = facts.get(span);
  const rows = [...entry.top_logprobs];
  if (!rows.some((row) => row.token === entry.token)) rows.push(entry);
  const table = element("table");
  for (const row of rows.sort((a, b) => b.logprob - a.logprob)) {
    const line = table.insertRow();
    line.className = row.token === entry.token ? "chosen" : "";
    line.insertCell().textContent = shown(row.token);
    line.insertCell().textContent = percent(row.logprob);
  }
  tip.replaceChildren(table);
  tip.hidden = false;
  const place = span.getClientRects()[0];
  const below = place.bottom + 8 + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(4, Math.min(place.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${Math.max(4, below ? place.bottom + 6 : place.top - tip.offsetHeight - 6)}px`;
  return `${entry.token}: ${percent(entry.logprob)}; ${rows.map((row) => `${row.token} ${percent(row.logprob)}`).join(", ")}`;
}

/** Hovering shows a token's chances; with the log in focus, the arrow keys walk through the tokens. */
export function explainTokens(log) {
  let current = null;
  const leave = () => {
    current?.classList.remove("current");
    current = null;
    byId("tip").hidden = true;
  };
  log.addEventListener("mouseover", (event) => {
    const span = event.target.closest?.(".token");
    leave();
    if (span && facts.has(span)) showTip(span);
  });
  log.addEventListener("mouseleave", leave);
  log.addEventListener("blur", leave);
  log.addEventListener("scroll", () => (byId("tip").hidden = true));
  log.addEventListener("keydown", (event) => {
    if (event.key === "Escape") leave();
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || event.target !== log || event.altKey || event.ctrlKey || event.metaKey) return;
    const spans = [...log.querySelectorAll(".token")];
    const begin = step > 0 ? 0 : spans.length - 1;
    const span = spans[current ? spans.indexOf(current) + step : begin];
    if (!span) return;
    event.preventDefault();
    leave();
    current = span;
    span.classList.add("current");
    span.scrollIntoView({ block: "nearest" });
    speak(showTip(span));
  });
}
