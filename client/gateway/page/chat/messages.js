// Messages as elements.

import { copyFrom, element, icon, iconButton } from "../dom.js";
import { MarkdownView } from "../markdown/view.js";
import { TokenView } from "./tokens.js";

const ENDS = { length: "cut at the token limit", stopped: "stopped", broken: "broken off", content_filter: "filtered" };

/** `actions`: what the buttons do: again, continued, edited, versionShown; `versions`: those of this message. */
export function userMessage(node, versions, actions) {
  const bubble = element("div", { className: "bubble" });
  for (const file of node.files ?? []) {
    const text = element("pre", { tabIndex: 0, role: "region", "aria-label": file.name }, file.text);
    bubble.append(element("details", { className: "file" }, element("summary", {}, file.name), text));
  }
  if (node.content) bubble.append(element("div", { className: "text plain" }, node.content));
  const article = element("article", { className: "message user" }, element("h2", { className: "unseen" }, "You said"), bubble);
  const bar = element("div", { className: "bar" });
  const edit = iconButton("edit", "Edit and branch", () => editInPlace(article, node, actions));
  edit.classList.add("edit");
  bar.append(copyButton(() => node.content), edit, ...versionButtons(node, versions, actions));
  article.append(bar);
  return article;
}

function copyButton(textOf) {
  const button = iconButton("copy", "Copy", () => copyFrom(button, textOf()));
  return button;
}

function versionButtons(node, versions, actions) {
  if (versions.length < 2) return [];
  const place = versions.indexOf(node);
  const step = (name, label, by) => {
    const button = iconButton(name, label, () => actions.versionShown(versions[place + by]));
    button.disabled = !versions[place + by];
    return button;
  };
  const told = element("span", { className: "version" }, `${place + 1}/${versions.length}`);
  told.prepend(element("span", { className: "unseen" }, "Version "));
  return [element("span", { className: "versions" }, step("left", "Earlier version", -1), told, step("right", "Later version", 1))];
}

function editInPlace(article, node, actions) {
  const field = element("textarea", { value: node.content, rows: Math.min(12, node.content.split("\n").length + 1), "aria-label": "Edited message" });
  const cancel = element("button", { type: "button" }, "Cancel");
  const form = element("form", { className: "edit-form" }, field, element("div", { className: "row end" }, cancel, element("button", { type: "submit", className: "main" }, "Send")));
  const hidden = [...article.children].slice(1);
  const leave = () => {
    form.remove();
    for (const child of hidden) child.hidden = false;
    article.querySelector(".edit").focus();
  };
  cancel.addEventListener("click", leave);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (field.value.trim()) actions.edited(node, field.value.trim());
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      leave();
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  for (const child of hidden) child.hidden = true;
  article.append(form);
  field.focus();
}

/** An answer that may still grow. */
export class AnswerView {
  #body = element("div", { className: "body" });
  #thinking = null;
  #calls = null;
  #view;

  /** `events`: of its tokens, when their probabilities are shown; else null. */
  constructor(node, events, actions, onBlock) {
    this.node = node;
    this.events = events;
    this.actions = actions;
    this.#view = events ? new TokenView() : new MarkdownView(onBlock);
    this.#body.append(this.#view.element);
    this.element = element("article", { className: "message assistant" }, element("h2", { className: "unseen" }, "Answer"), this.#body);
  }

  show(isFinal = false) {
    const { node } = this;
    this.element.classList.toggle("running", !isFinal);
    this.element.classList.toggle("nothing-yet", !isFinal && !node.content && !node.thinking && !node.calls);
    if (node.thinking) this.#showThinking(isFinal);
    if (node.calls) this.#showCalls();
    this.#view.show(this.events ?? node.content, isFinal);
  }

  /** The line below a finished answer. */
  finish(versions) {
    this.show(true);
    const { node, actions } = this;
    this.element.querySelector(".bar")?.remove();
    const bar = element("div", { className: "bar" });
    bar.append(copyButton(() => node.content), iconButton("again", "Regenerate", () => actions.again(node)));
    if (["length", "stopped", "broken"].includes(node.reason) && node.content) {
      bar.append(iconButton("more", "Continue", () => actions.continued(node)));
    }
    bar.append(...versionButtons(node, versions, actions), endLine(node));
    this.element.append(bar);
  }

  #showThinking(isFinal) {
    if (!this.#thinking) {
      this.#thinking = { title: element("summary"), text: element("div", { className: "text plain" }) };
      this.#body.prepend(element("details", { className: "thinking" }, this.#thinking.title, this.#thinking.text));
    }
    const { title, text } = this.#thinking;
    const { node } = this;
    const seconds = Math.round((node.thinkingMs ?? 0) / 1000);
    const isOver = isFinal || node.content;
    title.textContent = isOver ? (seconds ? `Thought for ${seconds} s` : "Thinking") : "Thinking…";
    const known = text.textContent.length;
    if (node.thinking.length > known) text.append(node.thinking.slice(known));
  }

  #showCalls() {
    if (!this.#calls) {
      this.#calls = element("div", { className: "calls" });
      this.#body.append(this.#calls);
    }
    this.#calls.replaceChildren(
      ...this.node.calls.map(({ name, arguments: values }) =>
        element("div", { className: "call" }, element("span", { className: "small" }, "Calls the tool "), element("code", {}, name), element("pre", { tabIndex: 0, role: "region", "aria-label": `Arguments of ${name}` }, pretty(values))),
      ),
    );
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // not complete yet, or not JSON at all
  }
}

function endLine({ usage, reason, timing }) {
  const words = [];
  if (ENDS[reason]) words.push(ENDS[reason]);
  if (usage) words.push(`${usage.completion_tokens.toLocaleString("en")} tokens`);
  if (timing?.rate) words.push(`${timing.rate.toFixed(1)} tok/s`);
  const line = element("span", { className: "end" }, words.join(" · "));
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    const first = timing?.firstMs ? `, first token after ${Math.round(timing.firstMs)} ms` : "";
    line.title = `Prompt: ${usage.prompt_tokens} tokens${cached ? `, ${cached} of them cached` : ""}${first}`;
  }
  return line;
}

/** A folded line with the system prompt. */
export function systemMessage(text) {
  return element("details", { className: "system" }, element("summary", {}, "System prompt"), element("div", { className: "text plain" }, text));
}

/** What went wrong, with a button to try again where that may help. */
export function errorCard({ what, advice }, again) {
  const button = element("button", { type: "button" }, icon("again"), "Try again");
  button.addEventListener("click", again);
  return element("div", { className: "error-card" }, element("p", {}, element("strong", {}, what), ` ${advice}`), button);
}
