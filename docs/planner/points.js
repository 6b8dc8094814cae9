// Points for heads that the page may show: measured ones, from the records that scripts/planner puts beside this page, and
// published ones. Memory is in MiB and beyond inputs and gradients; null is not stated.
"use strict";

// Remarks on the records, and the method that only the second record has.
const remarks = ["one run with three matmuls", "a separate run, as QuACK 0.6.5 could not be imported for the other"];
const onlyInSecond = ["quack untuned"];
const sources = [
  ...records.map(({ meta }, i) => ({
    text: `measured on one ${meta.device}, PyTorch ${meta.torch}, after idle, ${meta.date}; ${remarks[i]}`, command: meta.command ?? "",
  })),
  { text: "published by the authors, on an H200", command: "" },
];

const methods = {
  "logitless sparsified 2^-9": "Logitless, sparsified 2^-9 (flat softmax, its worst case)",
  "logitless unlimited": "Logitless, no budget",
  "logitless 2560 MiB": "Logitless, 2560 MiB",
  "logitless 160 MiB": "Logitless, 160 MiB",
  "apple cce": "Apple cce (filters gradients)",
  "apple cce_exact": "Apple cce_exact",
  canonical: "PyTorch, eager",
  liger: "Liger",
  "liger fp32 sums": "Liger, fp32 sums",
  fla: "FLA",
  "quack untuned": "QuACK",
};

const published = [
  { shape: "llama-3-8b-4k", method: "QuACK", ms: [16.8, 17.3], mib: null, source: 2 },
  { shape: "llama-3-8b-4k", method: "Liger, CuTe-DSL", ms: [16.7, 18.1], mib: null, source: 2 },
];

// Returns the points of a result's problem, with gradients and on the measured device, or null where there are none. A
// point is {method, ms: a number or a range, mib, source, own: whether it is this library's}.
function measuredFor(problem, device) {
  const { meta, shapes } = records[0];
  const shape = shapes.find((head) => ["tokens", "vocab", "hidden"].every((key) => head[key] === problem[key]))?.name;
  if (!problem.gradients || !shape || problem.dtype !== meta.dtype || choices.device[device] !== meta.device) return null;
  const points = records.flatMap(({ rows }, source) =>
    rows.filter((row) => row.shape === shape && row.burst_ms && (source === 0 || onlyInSecond.includes(row.method)))
      .map((row) => ({ method: methods[row.method] ?? row.method, ms: row.burst_ms, mib: row.extra_mib, source, own: row.ours })));
  return [...points, ...published.filter((point) => point.shape === shape)];
}

// Returns texts of the heads that have points.
function headsWithPoints() {
  return records[0].shapes.map((head) => `${formatCount(head.tokens)} × ${formatCount(head.vocab)} × ${formatCount(head.hidden)}`);
}

function showMeasured(points) {
  const note = document.getElementById("measured-note");
  const table = document.getElementById("measured");
  table.hidden = points === null;
  document.getElementById("measured-sources").hidden = points === null;
  if (points === null) {
    note.textContent = `Nothing was measured at these sizes. There are points for loss and gradients in bf16 on an H200 at ` +
      `${headsWithPoints().join(", ")} (tokens × vocabulary × hidden size).`;
    return;
  }
  note.textContent = "Time and memory of loss and gradients. Memory is beyond inputs and gradients. These are measurements; the numbers above are predictions.";
  const used = [...sources.keys()].filter((source) => points.some((point) => point.source === source));
  document.getElementById("measured-sources").replaceChildren(
    ...used.map((source) => {
      const item = element("li", sources[source].text);
      if (sources[source].command) item.append(element("code", sources[source].command));
      return item;
    }),
  );
  const text = (ms) => (Array.isArray(ms) ? `${ms[0]} to ${ms[1]} ms` : `${ms} ms`);
  const rows = [...points]
    .sort((a, b) => [a.ms].flat()[0] - [b.ms].flat()[0])
    .map(({ method, ms, mib, source, own }) => [
      element("th", method, { scope: "row", class: own ? "own" : "" }), text(ms), mib === null ? "–" : `${formatCount(mib)} MiB`,
      `[${used.indexOf(source) + 1}]`,
    ]);
  fillTable(table, ["Method", "Time", "Memory", "Source"], rows);
}
