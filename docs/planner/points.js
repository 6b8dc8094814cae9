// Points that were measured, or that others have published, of heads that the page may show. Memory is what a run holds
// beyond inputs and gradients, in MiB; null: not stated.
"use strict";

const sources = {
  run22: {
    text: "one NVIDIA H200, PyTorch 2.11, after a short idle, 2026-11-22, in one run with three bare products",
    command: "python bench/gpu/run.py --shapes gemma-2-2b,llama-3-8b,llama-3-8b-4k --data none --thinned 9 --rounds 6 --prepare-seconds 40 --minutes 6",
  },
  run20: { text: "one NVIDIA H200, PyTorch 2.11, after a short idle, 2026-11-20; QuACK 0.6.5 could not be imported later", command: "" },
  published: { text: "published by their authors, on an H200", command: "" },
};

// [method, milliseconds or a range, MiB, source, whether it is this library]
const measuredHeads = [
  {
    tokens: 8192, vocab: 256000, hidden: 2304, dtype: "bf16", device: "h200",
    points: [
      ["three bare products", 36.1, null, "run22"],
      ["Logitless, thinned 2^-9 (flat softmax, its worst case)", 17.9, 114, "run22", true],
      ["Logitless, no budget", 37.3, 4106, "run22", true],
      ["Logitless, 2560 MiB", 36.9, 2070, "run22", true],
      ["Logitless, 160 MiB", 51.6, 158, "run22", true],
      ["torch.compile", 41.3, 4000, "run22"],
      ["Apple cce (filters gradients)", 53.4, 3, "run22"],
      ["PyTorch, eager", 63.2, 22839, "run22"],
      ["verl", 104.4, 289, "run22"],
      ["Liger", 110.0, 64, "run22"],
      ["Liger, fp32 sums", 166.8, 2251, "run22"],
      ["Apple cce_exact", 223.4, 2287, "run22"],
      ["FLA", 226.8, 2760, "run22"],
      ["QuACK", 39.1, 4251, "run20"],
    ],
  },
  {
    tokens: 8192, vocab: 128256, hidden: 4096, dtype: "bf16", device: "h200",
    points: [
      ["three bare products", 31.8, null, "run22"],
      ["Logitless, thinned 2^-9 (flat softmax, its worst case)", 21.5, 118, "run22", true],
      ["Logitless, no budget", 33.0, 2166, "run22", true],
      ["Logitless, 160 MiB", 44.6, 139, "run22", true],
      ["torch.compile", 35.1, 2004, "run22"],
      ["Apple cce (filters gradients)", 96.1, 1, "run22"],
      ["PyTorch, eager", 45.9, 10958, "run22"],
      ["verl", 77.0, 223, "run22"],
      ["Liger", 53.2, 63, "run22"],
      ["Liger, fp32 sums", 79.0, 2004, "run22"],
      ["Apple cce_exact", 196.8, 2068, "run22"],
      ["FLA", 196.5, 2271, "run22"],
      ["QuACK", 33.8, 3006, "run20"],
    ],
  },
  {
    tokens: 4096, vocab: 128256, hidden: 4096, dtype: "bf16", device: "h200",
    points: [
      ["three bare products", 15.9, null, "run22"],
      ["Logitless, thinned 2^-9 (flat softmax, its worst case)", 10.1, 72, "run22", true],
      ["Logitless, no budget", 16.3, 1100, "run22", true],
      ["Logitless, 160 MiB", 21.9, 139, "run22", true],
      ["torch.compile", 17.4, 1002, "run22"],
      ["Apple cce (filters gradients)", 48.5, 1, "run22"],
      ["PyTorch, eager", 22.8, 4978, "run22"],
      ["verl", 39.0, 111, "run22"],
      ["Liger", 45.5, 32, "run22"],
      ["Liger, fp32 sums", 72.3, 2004, "run22"],
      ["Apple cce_exact", 99.3, 2036, "run22"],
      ["FLA", 105.7, 2137, "run22"],
      ["QuACK", 16.7, 1002, "run20"],
      ["QuACK", [16.8, 17.3], null, "published"],
      ["Liger, CuTe-DSL", [16.7, 18.1], null, "published"],
    ],
  },
];

// Of the problem of a result, with gradients on the device that was measured; null: none.
function measuredFor(problem, device) {
  if (!problem.gradients) return null;
  const same = (head) => ["tokens", "vocab", "hidden", "dtype"].every((key) => head[key] === problem[key]) && head.device === device;
  return measuredHeads.find(same)?.points ?? null;
}

// The heads that have points, for a sentence.
function headsWithPoints() {
  return measuredHeads.map((head) => `${formatCount(head.tokens)} × ${formatCount(head.vocab)} × ${formatCount(head.hidden)}`);
}

function showMeasured(points) {
  const note = document.getElementById("measured-note");
  const table = document.getElementById("measured");
  table.hidden = points === null;
  document.getElementById("measured-sources").hidden = points === null;
  if (points === null) {
    note.textContent = `Nothing was measured at these sizes. There are points for loss and gradients in bf16 on an H200 of ` +
      `${headsWithPoints().join(", ")} (tokens × vocabulary × hidden size).`;
    return;
  }
  note.textContent = "Loss and gradients; memory beyond inputs and gradients. Predictions above are the planner's, these are readings.";
  const used = Object.keys(sources).filter((source) => points.some((point) => point[3] === source));
  document.getElementById("measured-sources").replaceChildren(
    ...used.map((source) => {
      const item = element("li", sources[source].text);
      if (sources[source].command) item.append(element("code", sources[source].command));
      return item;
    }),
  );
  const text = (ms) => (Array.isArray(ms) ? `${ms[0]} to ${ms[1]} ms` : `${ms} ms`);
  const rows = [...points]
    .sort((a, b) => [a[1]].flat()[0] - [b[1]].flat()[0])
    .map(([method, ms, mib, source, own]) => [
      element("th", method, { scope: "row", class: own ? "own" : "" }), text(ms), mib === null ? "–" : `${formatCount(mib)} MiB`,
      `[${used.indexOf(source) + 1}]`,
    ]);
  fillTable(table, ["Method", "Time", "Memory", "Source"], rows);
}
