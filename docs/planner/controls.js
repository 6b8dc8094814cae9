// The fields of the problem: sliders on logarithmic scales beside text fields with exact values, and choices.
"use strict";

// A slider's positions, on a scale with `parts` steps for each power of two.
function powerScale(least, most, parts, round) {
  const from = Math.log2(least);
  return {
    positions: Math.round((Math.log2(most) - from) * parts),
    valueAt: (position) => round(2 ** (from + position / parts)),
    positionOf: (value) => Math.round((Math.log2(Math.max(value, 1)) - from) * parts),
  };
}

// Rounds to six binary digits, which keeps powers of two.
function roundToEighth(value) {
  const step = 2 ** Math.max(Math.floor(Math.log2(value)) - 5, 0);
  return Math.round(value / step) * step;
}

const MiB = 2 ** 20;
const scales = {
  tokens: powerScale(32, 2 ** 17, 4, roundToEighth),
  vocab: powerScale(1024, 2 ** 19, 8, roundToEighth),
  hidden: powerScale(64, 16384, 8, roundToEighth),
  chunk: powerScale(1, 2 ** 16, 4, Math.round),
  budget: powerScale(1, 2 ** 16, 4, roundToEighth), // MiB; the position after the last is no budget
};

// Labels of the fields in their order; fields with a slider also have its name.
const sized = {
  tokens: ["Tokens <i>N</i>", "Tokens"], vocab: ["Vocabulary <i>V</i>", "Vocabulary"],
  hidden: ["Hidden size <i>D</i>", "Hidden size"], budget: ["Budget", "Budget of workspace"],
  chunk: ["Chunk <i>C</i> of the plain loop", "Chunk of the plain loop"],
};
const selects = { dtype: "Dtype", device: "Device", pass: "Pass", gradient: "Gradients", threshold: "Threshold" };
const counts = Object.keys(sized).filter((key) => key !== "budget");

function fieldOf(key, label, control, more = "", kind = "field") {
  return `<div class="${kind}" id="${key}-field"><label for="${key}">${label}</label>${control}${more}</div>`;
}
function textField(key, label, more, kind) {
  return fieldOf(key, label, `<input id="${key}" type="text"${key === "budget" ? "" : ' inputmode="numeric"'}>`, more, kind);
}
function sizedField(key, kind = "field sized") {
  const [label, name] = sized[key];
  return textField(key, label, `<input id="${key}-slider" type="range" aria-label="${name}, on a scale">`, kind);
}
function choiceField(key) {
  return fieldOf(key, selects[key], `<select id="${key}"></select>`);
}

class Controls {
  // change(part) is called with the state's fields that the user has changed.
  constructor(models, change) {
    this.models = models;
    this.change = change;
    this.at("controls").insertAdjacentHTML("beforeend", [
      fieldOf("model", "Model", '<select id="model"></select><small id="model-source"></small>'),
      ...["tokens", "vocab", "hidden", "budget"].map((key) => sizedField(key)), choiceField("dtype"), choiceField("device"),
      textField("threads", "Threads"), choiceField("pass"), choiceField("gradient"), choiceField("threshold"),
    ].join(""));
    this.at("loop-field").outerHTML = sizedField("chunk", "field sized inline");
    this.fillModels();
    for (const key of Object.keys(selects)) this.setUpChoice(key);
    for (const key of counts) this.setUpCount(key);
    this.setUpBudget();
    this.onText("threads");
    this.setUpPresets();
    this.setUpPinned();
  }

  at(id) {
    return document.getElementById(id);
  }

  fillModels() {
    const select = this.at("model");
    select.append(element("option", "custom sizes", { value: "" }));
    for (const model of this.models) select.append(element("option", model.name, { value: model.name }));
    select.addEventListener("change", () => {
      const model = this.models.find((known) => known.name === select.value);
      this.change(model ? { model: model.name, vocab: model.vocab, hidden: model.hidden } : { model: "" });
    });
  }

  setUpChoice(key) {
    const select = this.at(key);
    for (const [value, text] of Object.entries(choices[key])) select.append(element("option", text, { value }));
    select.addEventListener("change", () => this.change({ [key]: select.value }));
  }

  // An invalid text stays in the field, with a message below it.
  onText(key) {
    const input = this.at(key);
    const message = element("small", "", { id: `${key}-message`, class: "message", role: "alert" });
    message.hidden = true;
    input.parentElement.append(message);
    input.setAttribute("aria-describedby", message.id);
    input.addEventListener("change", () => {
      const text = input.value.trim().replaceAll(",", "");
      const value = validValue(key, text);
      input.setAttribute("aria-invalid", String(value === undefined));
      message.hidden = value !== undefined;
      message.textContent = message.hidden ? "" : `expected a whole number such as 4096 or 128Ki, got '${text}'`;
      if (value !== undefined) this.change(this.partOf(key, value));
    });
  }

  // Once the vocabulary or hidden size is changed, the sizes are no longer the model's.
  partOf(key, value) {
    return key === "vocab" || key === "hidden" ? { model: "", [key]: value } : { [key]: value };
  }

  setUpCount(key) {
    const slider = this.at(`${key}-slider`);
    slider.max = scales[key].positions;
    slider.addEventListener("input", () => this.change(this.partOf(key, scales[key].valueAt(slider.valueAsNumber))));
    this.onText(key);
  }

  setUpBudget() {
    const slider = this.at("budget-slider");
    const scale = scales.budget;
    slider.max = scale.positions + 1;
    slider.addEventListener("input", () => {
      const position = slider.valueAsNumber;
      this.change({ budget: position > scale.positions ? "" : `${scale.valueAt(position)}MiB` });
    });
    // The library checks the text.
    this.onText("budget");
  }

  setUpPresets() {
    for (const preset of presets) {
      const button = element("button", preset.name, { type: "button", title: preset.title ?? preset.name });
      button.addEventListener("click", () => this.change({ ...defaults, ...this.sizesOf(preset.state), ...preset.state }));
      this.at("presets").append(button);
    }
  }

  // Where the fields do not fit beside the results, a line that stays in view opens them above the results.
  setUpPinned() {
    const button = this.at("pinned-open");
    button.addEventListener("click", () => {
      const open = this.at("controls").classList.toggle("open");
      this.at("controls").scrollTop = 0;
      button.setAttribute("aria-expanded", String(open));
      button.textContent = open ? "Close" : "Change";
    });
  }

  sizesOf(state) {
    const model = this.models.find((known) => known.name === (state.model ?? defaults.model));
    return model ? { vocab: model.vocab, hidden: model.hidden } : {};
  }

  show(state) {
    const model = this.models.find((known) => known.name === state.model);
    this.at("model").value = model ? state.model : "";
    this.at("model-source").textContent = model
      ? `${model.weights}${model.softcap ? `, softcap ${model.softcap}` : ""}${model.scale !== 1 ? `, scale ${model.scale}` : ""}`
      : "";
    for (const key of Object.keys(selects)) this.at(key).value = state[key];
    for (const key of counts) {
      this.showText(key, formatCount(state[key]));
      this.showSlider(key, scales[key].positionOf(state[key]), formatCount(state[key]));
    }
    this.showText("budget", state.budget || "none");
    const mib = numberOf(state.budget.replace(/b$/i, "")) / MiB;
    const position = state.budget && !Number.isNaN(mib) ? scales.budget.positionOf(mib) : scales.budget.positions + 1;
    this.showSlider("budget", position, state.budget || "none");
    this.showText("threads", String(state.threads));
    this.at("threads-field").hidden = !state.device.startsWith("cpu");
    this.at("gradient").disabled = state.pass === "loss";
    this.at("threshold-field").hidden = state.gradient === "exact" || state.pass === "loss";
  }

  showText(id, text) {
    const input = this.at(id);
    input.value = text;
    input.removeAttribute("aria-invalid");
    const message = this.at(`${id}-message`);
    message.hidden = true;
    message.textContent = "";
  }

  // A slider that is being dragged keeps its position.
  showSlider(key, position, text) {
    const slider = this.at(`${key}-slider`);
    if (scales[key].valueAt(slider.valueAsNumber) !== scales[key].valueAt(position)) slider.value = position;
    slider.setAttribute("aria-valuetext", text);
  }
}
