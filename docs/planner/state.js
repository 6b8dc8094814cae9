// The page's state: plain values. The address holds those that are not the defaults, as #tokens=8192&...
"use strict";

const defaults = {
  model: "gemma-2-2b", // "": vocab and hidden are no model's
  tokens: 8192,
  vocab: 256000,
  hidden: 2304,
  dtype: "bf16",
  device: "h200",
  threads: 8, // for a CPU
  pass: "gradients",
  gradient: "exact",
  threshold: "2^-9",
  budget: "256MiB", // "": none
  chunk: 1024, // tokens of the plain loop's chunk
  loop: "plan", // the loop to step through: "plan" or "plain"
  step: 0,
};

const choices = {
  dtype: { bf16: "bf16", f16: "fp16", f32: "fp32", f64: "fp64" },
  // No kernel was timed on the devices that are "not measured"; all of their times are predictions.
  device: {
    h200: "NVIDIA H200",
    h100: "NVIDIA H100 SXM, not measured",
    a100: "NVIDIA A100 80GB, not measured",
    a10: "NVIDIA A10, not measured",
    l40s: "NVIDIA L40S, not measured",
    "rtx-4090": "NVIDIA GeForce RTX 4090, not measured",
    "rtx-5090": "NVIDIA GeForce RTX 5090, not measured",
    b200: "NVIDIA B200, not measured",
    "cpu:avx512_bf16": "CPU, AVX-512 with bf16",
    "cpu:avx512": "CPU, AVX-512",
    "cpu:avx2": "CPU, AVX2",
    "cpu:neon": "CPU, NEON",
  },
  pass: { gradients: "with gradients", loss: "loss only" },
  gradient: { exact: "exact", sparsified: "sparsified", "always-sparsified": "always sparsified" },
  threshold: Object.fromEntries([6, 7, 8, 9, 10, 11, 12, 13].map((n) => [`2^-${n}`, `2^-${n} = 1 / ${2 ** n}`])),
  loop: { plan: "", plain: "" },
};

// Each preset is a usual training setup, with enough tokens that the logits take most of the memory.
const presets = [
  { name: "Gemma 2 2B on an H200", state: {} },
  { name: "Llama 3.2 1B on an RTX 4090", state: { model: "llama-3.2-1b", device: "rtx-4090" } },
  { name: "Qwen3 8B, 32K tokens, on an H100", state: { model: "qwen3-8b", tokens: 32768, device: "h100" } },
  { name: "Sparsified gradients", state: { gradient: "sparsified" } },
  { name: "Llama 3 8B on 16 cores", state: { model: "llama-3-8b", tokens: 2048, device: "cpu:avx512_bf16", threads: 16, budget: "256MiB" } },
];

const largestCount = 2 ** 53;

const suffixes = { "": 1, k: 1e3, m: 1e6, g: 1e9, t: 1e12, ki: 2 ** 10, mi: 2 ** 20, gi: 2 ** 30, ti: 2 ** 40 };

// Parses 8192, 8k or 1.5Gi; returns NaN for other texts.
function numberOf(text) {
  const [, digits, suffix] = /^(\d+\.?\d*|\.\d+) *([a-z]*)$/i.exec(text) ?? [];
  return Number(digits) * (suffixes[suffix?.toLowerCase()] ?? NaN);
}

// Parses a whole number as the command line does; returns NaN for other texts.
function countOf(text) {
  const count = numberOf(text);
  return count <= largestCount && Number.isInteger(count) ? count : NaN;
}

// Returns the value for a state, or undefined for an invalid text.
function validValue(key, text) {
  if (typeof defaults[key] === "number") {
    const number = countOf(text);
    return number >= (key === "step" ? 0 : 1) ? number : undefined;
  }
  if (key === "budget" && /^(none|unlimited)?$/i.test(text)) return "";
  if (choices[key] && !Object.hasOwn(choices[key], text)) return undefined;
  return text.includes("\n") ? undefined : text;
}

function stateFromHash(hash) {
  const state = { ...defaults };
  for (const [key, text] of new URLSearchParams(hash.replace(/^#/, ""))) {
    if (!Object.hasOwn(defaults, key)) continue;
    const value = validValue(key, text);
    if (value !== undefined) state[key] = value;
  }
  return state;
}

function hashOfState(state) {
  const parts = new URLSearchParams();
  for (const key of Object.keys(defaults)) {
    if (state.model && (key === "vocab" || key === "hidden")) continue; // the model has them
    if (state[key] !== defaults[key]) parts.set(key, String(state[key]));
  }
  return parts.toString();
}
