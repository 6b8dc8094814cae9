// The table of plans, and the command that prints the same.
"use strict";

// 1.23 × 10¹²
function powerText(value) {
  const [digits, power] = value.toExponential(2).split("e+");
  return `${digits} × 10${[...power].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]).join("")}`;
}

function planRow(plan) {
  const name = element("th", plan.plan.replaceAll("_", " "), { scope: "row" });
  if (plan.chosen) name.append(" ", element("b", "chosen"));
  name.append(element("small", plan.config, { "data-key": "config" }, plan.config));
  const row = [
    name,
    element("td", formatWorkspace(plan.workspace_bytes), { "data-key": "workspace_bytes" }, plan.workspace_bytes),
    element("td", `${Number(plan.cost_f.toPrecision(3))} F`, { "data-key": "cost_f" }, plan.cost_f),
    element("td", formatSeconds(plan.predicted_seconds) + (plan.slow ? " !" : ""), { "data-key": "predicted_seconds" }, plan.predicted_seconds),
    element("td", plan.fits ? "yes" : "no", { "data-key": "fits" }, plan.fits),
    element("td", plan.token_chunk ? formatCount(plan.token_chunk) : "–", { "data-key": "token_chunk" }, plan.token_chunk),
    element("td", plan.kept_columns ? formatCount(plan.kept_columns) : "–", { "data-key": "kept_columns" }, plan.kept_columns),
    element("td", plan.vocab_window ? formatCount(plan.vocab_window) : "–", { "data-key": "vocab_window" }, plan.vocab_window),
  ];
  return row;
}

function showPlans(state, result) {
  const table = document.getElementById("plans");
  fillTable(table, ["Plan", "Workspace", "Cost", "Predicted", "Fits", "Tokens at once", "Columns kept", "Window"], result.plans.map(planRow));
  [...table.tBodies[0].rows].forEach((row, i) => {
    row.dataset.plan = result.plans[i].plan;
    row.classList.toggle("chosen", result.plans[i].chosen);
    row.classList.toggle("over", !result.plans[i].fits);
  });
  document.getElementById("words").replaceChildren(
    ...result.words.flatMap(({ word, meaning }) => [element("dt", word), element("dd", meaning)]));
  document.getElementById("notes").replaceChildren(...result.notes.map((note) => element("li", note)));
  const first = result.plans[0];
  document.getElementById("kernels").textContent = first
    ? `Kernels: ${first.implementation} (${first.reason}). One F is the work of one bare matrix product of the head, ` +
      `2NVD = ${powerText(result.f_flop)} FLOP. Times: ${result.times.basis}.`
    : "";
  document.getElementById("command").textContent = commandText(planArguments(state));
}
