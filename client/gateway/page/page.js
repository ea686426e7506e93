// Puts the page together: what its parts tell each other.

import { ApiError, key } from "./api.js";
import * as chat from "./chat/chat.js";
import { listenForFiles } from "./chat/attachments.js";
import { deleteAll, exportAll, importFrom, listenToSearch, showList } from "./chat/list.js";
import { isLasting } from "./chat/store.js";
import { explainTokens } from "./chat/tokens.js";
import { followCluster } from "./cluster.js";
import { askForKey, closeCovers, isListOpen, listenToKeyDialog, listenToPanels, toast, toggleList, togglePanel } from "./dialogs.js";
import { byId, focusPrompt, isTouched, keep } from "./dom.js";
import { listenToKeys } from "./keys.js";
import { look, readModel, server } from "./server.js";
import { buildSettings, readLimits, setDefaultSystem, showsProbabilities } from "./settings.js";

const prompt = byId("prompt");

async function readServer() {
  try {
    const model = await readModel();
    byId("model").textContent = model.id;
    const context = model.max_model_len ? `, context of ${model.max_model_len.toLocaleString("en")} tokens` : "";
    byId("about-model").textContent = `${model.id}${context}`;
    await readLimits(model);
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) askForKey();
  }
  byId("key-told").textContent = key.get() ? `One is used, kept ${key.isRemembered() ? "in this browser" : "in this tab"}.` : "None is used.";
}

function serverChanged({ state, cause }) {
  if (state === "ready") {
    if (!server.model) readServer();
    if (byId("notice").dataset.of === "server") chat.notice(null);
    delete byId("notice").dataset.of;
  } else if (cause && !chat.isRunning()) {
    chat.notice(state === "down" ? { what: "The server does not answer.", advice: cause } : { what: "The server is not ready.", advice: sentence(cause) });
    byId("notice").dataset.of = "server";
  }
  if (state === "down") server.model = null; // another one may come back
}

const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;

function switchTheme() {
  const { dataset } = document.documentElement;
  const isDark = dataset.theme ? dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  dataset.theme = isDark ? "light" : "dark";
  keep("allspan-theme", dataset.theme);
}

function newChat() {
  chat.startNew();
  if (document.body.classList.contains("list-over")) toggleList(false);
  focusPrompt();
}

function escape() {
  if (closeCovers()) return true;
  if (!chat.isRunning()) return false;
  chat.stop();
  focusPrompt();
  return true;
}

const SHORTCUTS = [
  { shown: "Enter", does: "Send the message" },
  { shown: "Shift Enter", does: "Begin a line" },
  { shown: "Esc", does: "Stop the answer, or close what is open", key: "Escape", run: escape },
  { shown: "Alt N", does: "New chat", key: "n", alt: true, run: newChat },
  { shown: "Alt M", does: "Go to the message field", key: "m", alt: true, run: () => prompt.focus() },
  { shown: "Alt R", does: "Regenerate the last answer", key: "r", alt: true, run: () => chat.regenerateLast() },
  { shown: "↑", does: "Edit the last message, in an empty field", key: "ArrowUp", run: (event) => (event.target === prompt && !prompt.value ? chat.editLast() : false) },
  { shown: "Alt K", does: "Search the conversations", key: "k", alt: true, run: () => (isListOpen() || toggleList(true), byId("search").focus()) },
  { shown: "Alt L", does: "Show or hide the list", key: "l", alt: true, run: () => toggleList() },
  { shown: "Alt S", does: "Settings", key: "s", alt: true, run: () => togglePanel("settings") },
  { shown: "Alt C", does: "Cluster", key: "c", alt: true, run: () => togglePanel("cluster") },
  { shown: "← →", does: "Walk through token probabilities, with the conversation in focus" },
  { shown: "?", does: "This list", key: "?", outside: true, run: () => byId("keys-dialog").showModal() },
];

function listen() {
  byId("form").addEventListener("submit", (event) => {
    event.preventDefault();
    chat.submit();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.altKey || event.isComposing || isTouched()) return;
    event.preventDefault();
    chat.submit();
  });
  byId("stop").addEventListener("click", () => {
    chat.stop();
    focusPrompt();
  });
  byId("to-end").addEventListener("click", chat.toEnd);
  for (const id of ["new", "new-small"]) byId(id).addEventListener("click", newChat);
  byId("theme").addEventListener("click", switchTheme);
  byId("system").addEventListener("change", () => {
    chat.setSystem(byId("system").value);
    setDefaultSystem(byId("system").value);
  });
  byId("export").addEventListener("click", exportAll);
  byId("delete-all").addEventListener("click", deleteAll);
  byId("import").addEventListener("click", () => byId("import-input").click());
  byId("import-input").addEventListener("change", async () => {
    await importFrom(byId("import-input").files[0]);
    byId("import-input").value = "";
  });
  document.addEventListener("conversation", () => {
    const { id, leaf, title } = chat.current();
    document.title = title ? `${title} · allspan` : "allspan";
    history.replaceState(null, "", leaf === null ? location.pathname : `#/${id}`);
    showList();
  });
  document.addEventListener("chosen", () => {
    if (document.body.classList.contains("list-over")) toggleList(false);
    focusPrompt();
  });
  addEventListener("hashchange", () => {
    if (idInAddress()) chat.open(idInAddress());
  });
}

const idInAddress = () => /^#\/([\w-]+)$/.exec(location.hash)?.[1] ?? null;

function probabilitiesSwitched() {
  byId("legend").hidden = !showsProbabilities();
  byId("log").classList.toggle("with-probabilities", showsProbabilities());
  chat.render();
}

buildSettings(probabilitiesSwitched);
listen();
listenToPanels();
listenToKeyDialog(readServer);
listenToKeys(SHORTCUTS);
listenToSearch();
listenForFiles((text) => chat.notice(text ? { what: text, advice: "" } : null));
explainTokens(byId("log"));
chat.onKeyWanted(askForKey);
server.onChange(serverChanged);
chat.restoreDraft();
await chat.open(idInAddress());
probabilitiesSwitched();
followCluster(askForKey);
look();
if (!(await isLasting())) toast("This browser keeps nothing for this page: conversations end with the tab.");
