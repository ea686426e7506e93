// The settings of requests. An empty field is not sent: then the server's default holds, which the field shows.

import { getJson } from "./api.js";
import { byId, element, keep, kept } from "./dom.js";

const STORED = "allspan-settings";
const WHOLE = 1;

// Name, label, step, and the default where the server names none.
const CONTROLS = [
  ["temperature", "Temperature", 0.05, "1"],
  ["max_tokens", "Most tokens", WHOLE, "no limit"],
  ["top_p", "Top-p", 0.01, "1 (off)"],
  ["top_k", "Top-k", WHOLE, "0 (off)"],
  ["min_p", "Min-p", 0.01, "0 (off)"],
  ["seed", "Seed", WHOLE, "random"],
];
const MORE_CONTROLS = [
  ["typical_p", "Typical-p", 0.01, "1 (off)"],
  ["repetition_penalty", "Repetition penalty", 0.01, "1 (off)"],
  ["presence_penalty", "Presence penalty", 0.1, "0 (off)"],
  ["frequency_penalty", "Frequency penalty", 0.1, "0 (off)"],
  ["no_repeat_ngram_size", "No-repeat n-gram", WHOLE, "0 (off)"],
  ["min_tokens", "Fewest tokens", WHOLE, "0"],
];

const TEXTS = ["stop-strings", "extra"];
const inputs = () => [...document.querySelectorAll("#controls input, #more-controls input")];

let lastSystem = "";

/** `onProbabilities` is called when they are switched. */
export function buildSettings(onProbabilities) {
  for (const [place, rows] of [["controls", CONTROLS], ["more-controls", MORE_CONTROLS]]) {
    byId(place).append(...rows.map(([name, label, step, placeholder]) => {
      const input = element("input", { id: `control-${name}`, name, type: "number", inputMode: "decimal", step: String(step), placeholder });
      return element("div", { className: "field" }, element("label", { htmlFor: input.id }, label), input);
    }));
  }
  restore();
  byId("settings").addEventListener("change", store);
  byId("probabilities").addEventListener("change", onProbabilities);
  byId("reset").addEventListener("click", () => {
    for (const input of [...inputs(), ...TEXTS.map(byId)]) input.value = "";
    store();
  });
}

/** Shows the limits and the defaults of the server that is there. It may be one that tells neither. */
export async function readLimits(model) {
  const defaults = model?.sampling_defaults ?? {};
  for (const [name, , , placeholder] of [...CONTROLS, ...MORE_CONTROLS]) {
    const value = defaults[name];
    const isOurs = value === undefined || value === null || value === Number.parseFloat(placeholder);
    byId(`control-${name}`).placeholder = isOurs ? placeholder : String(value);
  }
  const source = model?.sampling_defaults_source;
  byId("defaults-told").textContent = `An empty field takes the server's default, shown in grey${source ? ` (from ${source})` : ""}.`;
  try {
    const { components } = await getJson("openapi.json");
    for (const input of inputs()) setRange(input, components.schemas.ChatRequest.properties[input.name]);
  } catch {
    // without limits here the server's own answer names them
  }
}

function setRange(input, schema) {
  const range = (schema?.anyOf ?? [schema]).find((each) => each?.type === "number" || each?.type === "integer");
  if (!range) return;
  const step = Number(input.step);
  const least = range.minimum ?? (range.exclusiveMinimum === undefined ? undefined : range.exclusiveMinimum + step);
  if (least !== undefined) input.min = String(Math.max(least, Number.MIN_SAFE_INTEGER));
  if (range.maximum !== undefined) input.max = String(Math.min(range.maximum, Number.MAX_SAFE_INTEGER));
}

export const showsProbabilities = () => byId("probabilities").checked;

/** The system prompt that a new conversation begins with: the last one that was written. */
export const defaultSystem = () => lastSystem;

export function setDefaultSystem(text) {
  lastSystem = text;
  store();
}

/** The request's fields. Throws an Error that names the one that is wrong. */
export function requestFields() {
  const fields = {};
  for (const input of inputs()) {
    if (!input.validity.valid && !input.validity.stepMismatch) {
      const label = document.querySelector(`label[for="${input.id}"]`).textContent;
      throw new Error(`${label}: ${input.validationMessage}`);
    }
    if (input.value !== "") fields[input.name] = Number(input.value);
  }
  const stops = byId("stop-strings").value.split("\n").filter((line) => line !== "");
  if (stops.length) fields.stop = stops;
  if (showsProbabilities()) Object.assign(fields, { logprobs: true, top_logprobs: 5 });
  return { ...fields, ...extraFields() };
}

function extraFields() {
  const text = byId("extra").value.trim();
  if (!text) return {};
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`Other fields of the request: ${error.message}`);
  }
  if (typeof value !== "object" || value === null || Array.isArray(value)) {
    throw new Error('Other fields of the request: they must be a JSON object, such as {"n": 1}.');
  }
  return value;
}

function store() {
  const values = Object.fromEntries([...inputs(), ...TEXTS.map(byId)].map((input) => [input.id, input.value]));
  keep(STORED, JSON.stringify({ ...values, probabilities: showsProbabilities(), system: lastSystem }));
}

function restore() {
  try {
    const values = JSON.parse(kept(STORED) ?? "{}");
    for (const input of [...inputs(), ...TEXTS.map(byId)]) input.value = values[input.id] ?? "";
    byId("probabilities").checked = values.probabilities === true;
    lastSystem = typeof values.system === "string" ? values.system : "";
  } catch {
    keep(STORED, ""); // not ours, or of another version
  }
}
