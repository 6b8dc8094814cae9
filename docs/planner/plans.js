// Shows the table of plans, and the command that prints the same.
"use strict";

// 1.23 × 10¹²
function powerText(value) {
  const [digits, power] = value.toExponential(2).split("e+");
  return `${digits} × 10${[...power].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]).join("")}`;
}

const countText = (count) => (count ? formatCount(count) : "–");
const columns = { // by the plan's fields
  workspace_bytes: ["Workspace", formatWorkspace],
  cost_matmuls: ["Cost", (cost) => `${Number(cost.toPrecision(3))} F`],
  predicted_seconds: ["Predicted", (seconds, plan) => formatSeconds(seconds) + (plan.slow ? " !" : "")],
  fits: ["Fits", (fits) => (fits ? "yes" : "no")],
  token_chunk: ["Chunk, tokens", countText],
  cached_columns: ["Cached columns", countText],
  vocab_window: ["Window", countText],
};

function planRow(plan) {
  const name = element("th", plan.plan.replaceAll("_", " "), { scope: "row" });
  if (plan.chosen) name.append(" ", element("b", "chosen"));
  name.append(element("small", plan.config, { "data-key": "config" }, plan.config));
  const cells = Object.entries(columns).map(([key, [, text]]) => element("td", text(plan[key], plan), { "data-key": key }, plan[key]));
  return [name, ...cells];
}

function showPlans(state, result) {
  const table = document.getElementById("plans");
  fillTable(table, ["Plan", ...Object.values(columns).map(([title]) => title)], result.plans.map(planRow));
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
    ? `Engine: ${first.engine} (${first.reason}). F is the work of one matmul of the head, ` +
      `2NVD = ${powerText(result.f_flop)} FLOP. Times: ${result.times.basis}.`
    : "";
  document.getElementById("command").textContent = commandText(planArguments(state));
}
