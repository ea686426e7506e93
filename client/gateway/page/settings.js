// Sampling controls. An empty field is not sent: then the model's own recommendation holds.

const CONTROLS = [
  ["temperature", "Temperature", { min: 0, max: 100, step: 0.05 }],
  ["top_p", "Top-p", { min: 0.01, max: 1, step: 0.01 }],
  ["top_k", "Top-k", { min: 0, max: 1000000, step: 1 }],
  ["min_p", "Min-p", { min: 0, max: 1, step: 0.01 }],
  ["max_tokens", "Most tokens", { min: 1, max: 100000000, step: 1 }],
  ["seed", "Seed", { min: 0, max: 9007199254740991, step: 1 }],
  ["repetition_penalty", "Repetition penalty", { min: 0.01, max: 2, step: 0.01 }],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.1 }],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: 0.1 }],
];
const STORED = "allspan-sampling";

const byId = (id) => document.getElementById(id);
const texts = () => [byId("system"), byId("stop-strings")];
const inputs = () => [...byId("controls").querySelectorAll("input")];

export function buildControls() {
  for (const [name, label, range] of CONTROLS) {
    const field = document.createElement("div");
    field.className = "field";
    const caption = document.createElement("label");
    const input = document.createElement("input");
    caption.htmlFor = input.id = `control-${name}`;
    caption.textContent = label;
    Object.assign(input, { type: "number", name, placeholder: "default", inputMode: "decimal", ...range });
    field.append(caption, input);
    byId("controls").append(field);
  }
  restore();
  byId("sampling").addEventListener("change", store);
  byId("reset").addEventListener("click", () => {
    for (const input of [...inputs(), ...texts()]) input.value = "";
    store();
  });
}

/** Throws an Error that names the field. */
export function samplingFields() {
  const fields = {};
  for (const input of inputs()) {
    if (!input.validity.valid) {
      const label = document.querySelector(`label[for="${input.id}"]`).textContent;
      throw new Error(`${label}: ${input.validationMessage}`);
    }
    if (input.value !== "") fields[input.name] = Number(input.value);
  }
  const stops = byId("stop-strings").value.split("\n").filter((line) => line !== "");
  if (stops.length) fields.stop = stops;
  if (byId("probabilities").checked) Object.assign(fields, { logprobs: true, top_logprobs: 5 });
  return fields;
}

export const systemMessage = () => byId("system").value.trim();

function store() {
  const values = Object.fromEntries([...inputs(), ...texts()].map((input) => [input.id, input.value]));
  localStorage.setItem(STORED, JSON.stringify({ ...values, probabilities: byId("probabilities").checked }));
}

function restore() {
  try {
    const values = JSON.parse(localStorage.getItem(STORED) ?? "{}");
    for (const input of [...inputs(), ...texts()]) input.value = values[input.id] ?? "";
    byId("probabilities").checked = values.probabilities ?? true;
  } catch {
    localStorage.removeItem(STORED); // not ours, or of another version
  }
}
