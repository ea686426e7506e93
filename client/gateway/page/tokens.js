// An answer's tokens as elements: each knows how likely it was, and what else might have come.

const tip = document.getElementById("tip");
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

/** Appends what one event brings to `element`; `content` is what counts, tokens are told of where they make it up. */
export class TokenWriter {
  #pieces = new Pieces();
  constructor(element) {
    this.element = element;
  }

  write(content, logprobs) {
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
  const span = document.createElement("span");
  const chance = Math.exp(entry.logprob);
  span.className = chance < 0.05 ? "token low" : chance < 0.3 ? "token fair" : "token";
  span.textContent = text;
  facts.set(span, entry);
  return span;
}

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(logprob > -0.001 ? 0 : 1)} %`;
const shown = (token) => token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·") || "(nothing)";

function showTip(span) {
  const entry = facts.get(span);
  const rows = [...entry.top_logprobs];
  if (!rows.some((row) => row.token === entry.token)) rows.push(entry);
  const table = document.createElement("table");
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

/** Hovering shows a token's chances; with the log in focus, the arrow keys walk through the tokens, and `say` tells. */
export function explainTokens(log, say) {
  let current = null;
  const leave = () => {
    current?.classList.remove("current");
    current = null;
    tip.hidden = true;
  };
  log.addEventListener("mouseover", (event) => {
    const span = event.target.closest?.(".token");
    leave();
    if (span) showTip(span);
  });
  log.addEventListener("mouseleave", leave);
  log.addEventListener("blur", leave);
  log.addEventListener("scroll", () => (tip.hidden = true));
  log.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || event.altKey || event.ctrlKey || event.metaKey) return;
    const spans = [...log.querySelectorAll(".token")];
    const begin = step > 0 ? 0 : spans.length - 1;
    const span = spans[current ? spans.indexOf(current) + step : begin];
    if (!span) return;
    event.preventDefault();
    leave();
    current = span;
    span.classList.add("current");
    span.scrollIntoView({ block: "nearest" });
    say(showTip(span));
  });
  return leave;
}
