// The conversation: what is sent, and the answer as it comes.

import { ApiError, getJson, key, streamChat } from "./api.js";
import { followCluster } from "./cluster.js";
import { buildControls, samplingFields, systemMessage } from "./settings.js";
import { explainTokens, TokenWriter } from "./tokens.js";

const byId = (id) => document.getElementById(id);
const log = byId("log");
const prompt = byId("prompt");
const spoken = byId("spoken");
let messages = [];
let running = null; // AbortController of the answer that comes

const say = (text) => (spoken.textContent = text);
const leaveTokens = explainTokens(log, say);

function addMessage(role, text = "") {
  byId("empty").hidden = true;
  const article = document.createElement("article");
  article.className = `message ${role}`;
  const who = document.createElement("span");
  who.className = "who";
  who.textContent = role === "user" ? "You" : "Model";
  const body = document.createElement("div");
  body.className = "text";
  body.textContent = text;
  article.append(who, body);
  log.append(article);
  log.scrollTop = log.scrollHeight;
  return article;
}

function note(article, name, text) {
  const line = document.createElement("p");
  line.className = name;
  line.textContent = text;
  article.append(line);
}

async function send(text) {
  const fields = samplingFields();
  const system = systemMessage();
  addMessage("user", text);
  messages.push({ role: "user", content: text });
  const sent = system ? [{ role: "system", content: system }, ...messages] : messages;
  const article = addMessage("assistant");
  article.classList.add("running");
  busy(new AbortController());
  const answer = new Answer(article);
  try {
    for await (const event of streamChat({ messages: sent, ...fields }, running.signal)) answer.add(event);
  } catch (error) {
    answer.failed(error);
  } finally {
    article.classList.remove("running");
    busy(null);
  }
  if (answer.text || answer.finished) messages.push({ role: "assistant", content: answer.text });
  else messages.pop(); // nothing came: the next message stands in its place
  say(answer.text || article.querySelector(".error")?.textContent || "");
}

class Answer {
  #began = performance.now();
  #first = null;
  #thinking = null;
  constructor(article) {
    this.article = article;
    this.text = "";
    this.finished = false;
    this.tokens = new TokenWriter(article.querySelector(".text"));
  }

  add(event) {
    const choice = event.choices[0];
    if (event.usage) this.#end(event.usage);
    if (!choice) return;
    const { content, reasoning_content, reasoning } = choice.delta;
    const thought = reasoning_content ?? reasoning;
    if (content || thought) this.#first ??= performance.now();
    const follow = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    if (thought) this.#think(thought);
    if (content) {
      this.text += content;
      this.tokens.write(content, choice.logprobs);
    }
    if (choice.finish_reason) {
      this.finished = true;
      this.reason = choice.finish_reason;
    }
    if (follow) log.scrollTop = log.scrollHeight;
  }

  failed(error) {
    if (error.name === "AbortError") {
      note(this.article, "end", "stopped");
      return;
    }
    if (error instanceof ApiError && error.status === 401) askForKey();
    const again = error.retryAfter ? ` (try again in ${error.retryAfter} s)` : "";
    note(this.article, "error", `${error.message}${again}`);
  }

  #think(thought) {
    if (!this.#thinking) {
      this.#thinking = document.createElement("div");
      this.#thinking.className = "thinking";
      this.article.querySelector(".text").before(this.#thinking);
    }
    this.#thinking.append(thought);
  }

  #end(usage) {
    const seconds = (performance.now() - (this.#first ?? this.#began)) / 1000;
    const rate = seconds > 0 ? ` · ${((usage.completion_tokens - 1) / seconds).toFixed(1)} tok/s` : "";
    const ttft = this.#first ? ` · first after ${Math.round(this.#first - this.#began)} ms` : "";
    const cached = usage.prompt_tokens_details?.cached_tokens;
    const prompt = `${usage.prompt_tokens} prompt tokens${cached ? ` (${cached} cached)` : ""}`;
    note(this.article, "end", `${prompt} · ${usage.completion_tokens} output${ttft}${rate} · ${this.reason}`);
  }
}

function busy(controller) {
  running = controller;
  byId("send").hidden = Boolean(controller);
  byId("stop").hidden = !controller;
  log.setAttribute("aria-busy", String(Boolean(controller)));
  if (!controller) prompt.focus();
}

function askForKey() {
  if (byId("key-section").hidden) {
    byId("key-section").hidden = false;
    byId("key").focus();
  }
}

function submit() {
  const text = prompt.value.trim();
  if (!text || running) return;
  send(text).catch((error) => note(addMessage("assistant"), "error", error.message)); // a control out of range
  prompt.value = "";
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    leaveTokens();
    running?.abort();
  }
});
byId("stop").addEventListener("click", () => running?.abort());
byId("new").addEventListener("click", () => {
  running?.abort();
  messages = [];
  log.querySelectorAll(".message").forEach((article) => article.remove());
  byId("empty").hidden = false;
  prompt.focus();
});
byId("probabilities").addEventListener("change", showProbabilities);
byId("panel").addEventListener("click", () => {
  const open = byId("side").hidden;
  byId("side").hidden = !open;
  document.querySelector("main").classList.toggle("wide", !open);
  byId("panel").setAttribute("aria-expanded", String(open));
});
byId("theme").addEventListener("click", () => {
  const isDark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = isDark ? "light" : "dark";
  localStorage.setItem("allspan-theme", document.documentElement.dataset.theme);
});
byId("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  key.set(byId("key").value.trim());
  try {
    await getJson("v1/models");
    byId("key-section").hidden = true;
    prompt.focus();
  } catch (error) {
    say(error.message);
    byId("key").setCustomValidity(error.message);
    byId("key").reportValidity();
    byId("key").setCustomValidity("");
  }
});

function showProbabilities() {
  log.dataset.probabilities = byId("probabilities").checked ? "on" : "off";
}

const theme = localStorage.getItem("allspan-theme");
if (theme) document.documentElement.dataset.theme = theme;
buildControls();
showProbabilities();
followCluster(askForKey);
