// The conversation that is shown: what is sent, which branch is seen, and the answers that come.

import { toast } from "../dialogs.js";
import { byId, focusPrompt, keep, kept, speak } from "../dom.js";
import { server } from "../server.js";
import { defaultSystem, requestFields, showsProbabilities } from "../settings.js";
import { adviceOn } from "./advice.js";
import { attached, setAttached } from "./attachments.js";
import { addNode, newConversation, path, removeNode, requestMessages, showBranch, versions } from "./conversation.js";
import { AnswerView, errorCard, systemMessage, userMessage } from "./messages.js";
import { Run } from "./run.js";
import * as store from "./store.js";

const NEAR_THE_END = 80; // pixels
const DRAFT = "allspan-draft";

const log = byId("log");
const prompt = byId("prompt");
const runs = new Map(); // by conversation: an answer goes on while another conversation is looked at
const tokenEvents = new WeakMap(); // of messages whose probabilities were asked for
const deleted = new Set();
let conversation = newConversation();
let askForKey = () => {};

const actions = {
  again: (node) => answer(conversation, conversation.nodes[node.parent]),
  continued: (node) => continueAnswer(conversation, node),
  edited: (node, text) => {
    const own = conversation;
    if (canAsk(own)) answer(own, addNode(own, node.parent, { role: "user", content: text, ...(node.files && { files: node.files }) }));
  },
  versionShown: (node) => {
    showBranch(conversation, node);
    save(conversation);
    render();
  },
};

export const current = () => conversation;
export const isRunning = (id = conversation.id) => runs.has(id);
export const stop = () => runs.get(conversation.id)?.stop();

/** Shows the conversation of this id; a new one where there is none. */
export async function open(id) {
  const found = runs.get(id)?.conversation ?? (id ? await store.load(id) : null);
  show(found ?? newConversation(defaultSystem()));
  return Boolean(found);
}

/** Stops the answers of conversations that are deleted, so that none is kept again. */
export function forget(id) {
  deleted.add(id);
  runs.get(id)?.stop();
}

export const remember = (id) => deleted.delete(id);

export function startNew() {
  show(newConversation(defaultSystem()));
  focusPrompt();
}

function show(next) {
  if (conversation.id !== next.id && runs.has(conversation.id)) runs.get(conversation.id).view = null;
  conversation = next;
  byId("system").value = conversation.system;
  notice(null);
  render();
  toEnd();
  const last = conversation.nodes[conversation.leaf];
  if (last?.role === "user" && !isRunning()) {
    notice({ what: "This message has no answer yet.", advice: "" }, () => answer(conversation, last));
  }
  document.dispatchEvent(new CustomEvent("conversation"));
}

/** Keeps the system prompt with the conversation. */
export function setSystem(text) {
  conversation.system = text;
  if (conversation.leaf !== null) save(conversation);
  render();
}

async function save(changed) {
  if (changed.leaf === null || deleted.has(changed.id)) return;
  try {
    await store.save(changed);
  } catch (error) {
    notice({ what: `The browser could not keep this conversation (${error.message}).`, advice: "Export it from the settings, and delete others." });
  }
}

/** Sends what stands in the message field. */
export function submit() {
  const text = prompt.value.trim();
  const files = attached();
  if ((!text && !files.length) || isRunning()) return;
  const own = conversation;
  if (!canAsk(own)) return;
  own.updated = Date.now();
  const node = addNode(own, own.leaf, { role: "user", content: text, ...(files.length && { files }) });
  setPrompt("", []);
  answer(own, node, { text, files });
}

export function setPrompt(text, files = attached()) {
  prompt.value = text;
  setAttached(files);
  keep(DRAFT, text, "sessionStorage");
  fitPrompt();
}

export function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

export const restoreDraft = () => setPrompt(kept(DRAFT, "sessionStorage") ?? "");
prompt.addEventListener("input", () => {
  keep(DRAFT, prompt.value, "sessionStorage");
  fitPrompt();
});

/** The settings' fields, or null when one of them is wrong, which is then said. */
function checkedFields() {
  try {
    return requestFields();
  } catch (error) {
    notice({ what: error.message, advice: "Correct it in the settings; your message is kept." });
    return null;
  }
}

/** Whether a request of this conversation may be sent now; else the page says why not. */
function canAsk(own) {
  if (runs.has(own.id)) toast("An answer comes: stop it first.");
  return !runs.has(own.id) && checkedFields() !== null;
}

/** Asks for an answer to the message `asked`. `typed`: what goes back into the field when nothing comes. */
async function answer(own, asked, typed = null) {
  if (!canAsk(own)) return;
  const fields = requestFields();
  const node = addNode(own, asked.id, { role: "assistant" });
  const messages = requestMessages(own, asked.id);
  const error = await runTo(own, node, { messages, ...fields });
  if (!error) return;
  const isEmpty = !node.content && !node.thinking && !node.calls;
  if (isEmpty) removeNode(own, node);
  if (isEmpty && !typed) {
    const [before] = versions(own, { parent: asked.id, role: "assistant" }).slice(-1);
    if (before) showBranch(own, before); // the answer that there was
  }
  if (isEmpty && typed) removeNode(own, asked);
  await save(own);
  if (own.id !== conversation.id) return;
  render();
  if (isEmpty && typed && !prompt.value) setPrompt(typed.text, typed.files);
  fail(error, isEmpty && typed ? submit : () => answer(own, asked));
}

/** Goes on with an answer that was cut. */
async function continueAnswer(own, node) {
  if (!canAsk(own)) return;
  const fields = requestFields();
  own.leaf = node.id;
  const messages = requestMessages(own, node.id);
  const error = await runTo(own, node, { messages, ...fields, continue_final_message: true, add_generation_prompt: false });
  if (error && own.id === conversation.id) fail(error, () => continueAnswer(own, node));
}

/** Runs a request whose answer goes into `node`; returns what it failed with, or null. */
async function runTo(own, node, body) {
  if (body.logprobs && !tokenEvents.has(node)) tokenEvents.set(node, node.content ? [{ content: node.content }] : []);
  const run = new Run(node, tokenEvents.get(node), () => save(own));
  run.conversation = own;
  run.onFrame = (draw) => followed(draw);
  run.onStall = () => server.look(); // its ranks may be starting again
  runs.set(own.id, run);
  notice(null);
  render();
  toEnd();
  busy();
  await save(own);
  document.dispatchEvent(new CustomEvent("conversation"));
  let failure = null;
  try {
    await run.finish(body);
  } catch (error) {
    failure = error;
  }
  runs.delete(own.id);
  await save(own);
  if (own.id === conversation.id) {
    followed(() => run.view?.finish(versions(own, node)));
    if (!failure) run.sayRest();
    busy();
  }
  document.dispatchEvent(new CustomEvent("conversation"));
  return failure;
}

function fail(error, again) {
  const advice = adviceOn(error);
  notice(advice, again);
  if (advice.isDown || error.status === 0) server.look(); // a stream that broke off may be a server that ended
  if (advice.isKey) askForKey();
  focusPrompt();
}

/** A card above the message field; null takes it away. */
export function notice(advice, again = null) {
  const place = byId("notice");
  place.hidden = !advice;
  place.replaceChildren();
  if (!advice) return;
  const card = errorCard(advice, () => again?.());
  if (!again) card.querySelector("button").remove();
  place.append(card);
}

function busy() {
  const isBusy = isRunning();
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  log.setAttribute("aria-busy", String(isBusy));
  if (isBusy) speak("Answering");
  document.dispatchEvent(new CustomEvent("conversation"));
}

/** Shows the branch anew. */
export function render() {
  const shown = path(conversation);
  byId("empty").hidden = shown.length > 0;
  byId("title").textContent = conversation.title || "New chat";
  byId("messages").replaceChildren(...(shown.length && conversation.system.trim() ? [systemMessage(conversation.system.trim())] : []), ...shown.map(elementOf));
  busyButtons();
}

function busyButtons() {
  byId("send").hidden = isRunning();
  byId("stop").hidden = !isRunning();
}

function elementOf(node) {
  const own = versions(conversation, node);
  if (node.role === "user") return userMessage(node, own, actions);
  const run = runs.get(conversation.id)?.node === node ? runs.get(conversation.id) : null;
  const events = showsProbabilities() ? (tokenEvents.get(node) ?? null) : null;
  const view = new AnswerView(node, events, actions, (text) => run?.heard(text));
  if (run) {
    run.view = view;
    view.show();
  } else {
    node.reason ||= "broken"; // the page was left while it came
    view.finish(own);
  }
  return view.element;
}

const isAtEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_THE_END;

export function toEnd() {
  log.scrollTop = log.scrollHeight;
}

/** Draws, and stays at the end if the reader was there. */
function followed(draw) {
  const wasAtEnd = isAtEnd();
  draw();
  if (wasAtEnd) toEnd();
}

// Whoever is at the end stays there when the room changes: a panel opens, the message field grows.
let staysAtEnd = true;
log.addEventListener(
  "scroll",
  () => {
    staysAtEnd = isAtEnd();
    byId("to-end").hidden = staysAtEnd;
  },
  { passive: true },
);
new ResizeObserver(() => staysAtEnd && toEnd()).observe(log);

/** Answers the last message once more; does nothing while an answer comes. */
export function regenerateLast() {
  const last = conversation.nodes[conversation.leaf];
  if (last?.role === "assistant") actions.again(last);
}

export function editLast() {
  const buttons = log.querySelectorAll(".message.user .edit");
  buttons[buttons.length - 1]?.click();
}

export const onKeyWanted = (callback) => (askForKey = callback);
