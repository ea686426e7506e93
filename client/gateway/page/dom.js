// Small helpers to build elements.

export const byId = (id) => document.getElementById(id);

/** An element. `properties` are set as properties, those with a hyphen as attributes; `children` are nodes and texts. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

/** One of the symbols at the top of index.html. */
export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#i-${name}`);
  svg.setAttribute("aria-hidden", "true");
  svg.append(use);
  return svg;
}

/** A button that shows an icon alone; `label` is its name and its tip. */
export function iconButton(name, label, onClick, className = "quiet") {
  const made = element("button", { type: "button", className, title: label, "aria-label": label }, icon(name));
  made.addEventListener("click", onClick);
  return made;
}

/** Copies a text and shows for a moment on the button that it did. */
export async function copyFrom(button, text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyWithoutPermission(text); // no HTTPS, so no clipboard interface
  }
  const use = button.querySelector("use");
  use.setAttribute("href", "#i-check");
  speak("Copied");
  setTimeout(() => use.setAttribute("href", "#i-copy"), 1500);
}

function copyWithoutPermission(text) {
  const field = element("textarea", { value: text, className: "unseen" });
  (document.querySelector("dialog[open]") ?? document.body).append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

/** Whether this is a screen to touch: there Enter begins a line, and a focused field covers half of it with keys. */
export const isTouched = () => matchMedia("(hover: none) and (pointer: coarse)").matches;

export function focusPrompt() {
  if (!isTouched()) byId("prompt").focus();
}

/** Says a text to screen readers. */
export function speak(text) {
  byId("spoken").textContent = text;
}

/** The value under a name in the browser's storage, undefined where there is none or nothing may be kept. */
export function kept(name, storage = "localStorage") {
  try {
    return window[storage].getItem(name) ?? undefined;
  } catch {
    return undefined;
  }
}

/** Keeps a text under a name, or forgets it when it is empty. */
export function keep(name, text, storage = "localStorage") {
  try {
    if (text) window[storage].setItem(name, text);
    else window[storage].removeItem(name);
  } catch {
    // full, or the browser keeps nothing for this page: it holds until the tab is closed
  }
}

/** Offers a value as a JSON file. */
export function saveFile(name, value) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(value, null, 1)], { type: "application/json" }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
