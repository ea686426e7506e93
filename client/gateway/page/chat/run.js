// An answer that comes: its events go into the message, and once a frame onto the screen.

import { streamChat } from "../api.js";
import { speak } from "../dom.js";

const SPEAK_EVERY_MS = 6000;
const SAVE_EVERY_MS = 2000;
const STALLED_MS = 2500;

export class Run {
  #controller = new AbortController();
  #began = performance.now();
  #first = null;
  #tokensBefore;
  #frame = null;
  #unspoken = "";
  #spokenAt = 0;
  #savedAt = performance.now();
  view = null; // its AnswerView, while its conversation is shown
  onFrame = (show) => show();
  onStall = () => {};

  /** `events`: a list that gets each event's tokens, or null; `save` keeps the conversation as it is. */
  constructor(node, events, save) {
    this.node = node;
    this.events = events;
    this.save = save;
    this.#tokensBefore = node.usage?.completion_tokens ?? 0;
  }

  stop() {
    this.#controller.abort();
  }

  /** Runs the request to its end. Throws ApiError when it fails; being stopped is no failure. */
  async finish(body) {
    const { node } = this;
    let stall = setTimeout(this.onStall, STALLED_MS);
    try {
      for await (const event of streamChat(body, this.#controller.signal)) {
        clearTimeout(stall);
        stall = setTimeout(this.onStall, STALLED_MS);
        this.#take(event);
      }
    } catch (error) {
      node.reason = error.name === "AbortError" ? "stopped" : "broken";
      if (error.name !== "AbortError") throw error;
    } finally {
      clearTimeout(stall);
      cancelAnimationFrame(this.#frame);
      this.#frame = null;
    }
  }

  /** What of the answer is complete and was not said yet; said at most every few seconds. */
  heard(text) {
    this.#unspoken += text;
    const now = performance.now();
    if (now - this.#spokenAt < SPEAK_EVERY_MS) return;
    this.#spokenAt = now;
    this.sayRest();
  }

  sayRest() {
    if (this.#unspoken.trim()) speak(this.#unspoken.trim());
    this.#unspoken = "";
  }

  #take(event) {
    const { node } = this;
    if (event.usage) this.#count(event.usage);
    const choice = event.choices[0];
    if (!choice) return;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
    const thought = reasoning ?? choice.delta.reasoning;
    if (content || thought || calls) this.#first ??= performance.now();
    if (thought) node.thinking = (node.thinking ?? "") + thought;
    if (content) {
      if (node.thinking && !node.content) node.thinkingMs = performance.now() - this.#first;
      node.content += content;
      this.events?.push({ content, logprobs: choice.logprobs });
    }
    for (const call of calls ?? []) this.#takeCall(call);
    if (choice.finish_reason) node.reason = choice.finish_reason;
    this.#schedule();
  }

  #takeCall({ index, function: called }) {
    const calls = (this.node.calls ??= []);
    const call = (calls[index] ??= { name: "", arguments: "" });
    call.name += called?.name ?? "";
    call.arguments += called?.arguments ?? "";
  }

  #count(usage) {
    const seconds = (performance.now() - (this.#first ?? this.#began)) / 1000;
    const { node } = this;
    const rate = usage.completion_tokens > 1 && seconds > 0.05 ? (usage.completion_tokens - 1) / seconds : 0;
    node.timing = { rate, firstMs: this.#first === null ? 0 : this.#first - this.#began };
    node.usage = { ...usage, completion_tokens: usage.completion_tokens + this.#tokensBefore };
  }

  #schedule() {
    this.#frame ??= requestAnimationFrame(() => {
      this.#frame = null;
      if (this.view) this.onFrame(() => this.view?.show());
      if (performance.now() - this.#savedAt > SAVE_EVERY_MS) {
        this.#savedAt = performance.now();
        this.save();
      }
    });
  }
}
