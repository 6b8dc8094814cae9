// Shows bars of memory on one scale: materialized logits, a plain loop of chunks, and the chosen plan.
"use strict";

// Returns bytes: of float32 logits and their equally large gradient, for all tokens and for one chunk; and of the plan.
function memoryOf(state, result) {
  const { problem, materialized, chosen } = result;
  const logits = problem.gradients ? materialized.logits_and_gradient_bytes : materialized.logits_bytes;
  const share = problem.tokens === 0 ? 0 : Math.min(state.chunk, problem.tokens) / problem.tokens;
  return { materialized: logits, plain: logits * share, chosen: chosen ? chosen.workspace_bytes : null };
}

function barOf(id, name, bytes, most, detail, format = formatBytes) {
  const row = element("div", "", { class: "bar", id: `bar-${id}` });
  const label = element("div", "", { class: "bar-label" });
  label.append(element("span", name), element("strong", bytes === null ? "no plan fits" : format(bytes), { class: "bytes" }, bytes));
  const track = element("div", "", { class: "track", "aria-hidden": "true" });
  const fill = element("div", "", { class: `fill ${id}` });
  fill.style.width = `${bytes === null ? 0 : (100 * bytes) / most}%`;
  track.append(fill);
  row.append(label, track, element("small", detail));
  return row;
}

function pinnedText(memory, { chosen, smallest_budget_bytes: least }) {
  if (!chosen) return `no plan fits: ${formatWorkspace(least)} would`;
  return `${formatWorkspace(chosen.workspace_bytes)} of ${formatBytes(memory.materialized)}, ${formatSeconds(chosen.predicted_seconds)}`;
}

function showMemory(state, result) {
  const memory = memoryOf(state, result);
  const { problem } = result;
  const what = problem.gradients ? "float32 logits and their gradient" : "float32 logits";
  const most = Math.max(memory.materialized, memory.plain, memory.chosen ?? 0);
  const chunk = Math.min(state.chunk, problem.tokens);
  document.getElementById("bars").replaceChildren(
    barOf("materialized", "Materialized", memory.materialized, most, `${what}, ${formatCount(problem.tokens)} × ${formatCount(problem.vocab)}`),
    barOf("plain", `A plain loop, chunk ${formatCount(chunk)}`, memory.plain, most, `${what} of one chunk, ${formatCount(chunk)} × ${formatCount(problem.vocab)}`),
    barOf("chosen", "Logitless, the chosen plan", memory.chosen, most, "the whole workspace", formatWorkspace),
  );
  const headline = document.getElementById("headline");
  document.getElementById("pinned-text").textContent = pinnedText(memory, result);
  if (memory.chosen) {
    const ratio = memory.materialized / memory.chosen;
    const text = ratio >= 100 ? formatCount(ratio) : Number(ratio.toPrecision(3));
    headline.textContent = ratio >= 1
      ? `${formatWorkspace(memory.chosen)} instead of ${formatBytes(memory.materialized)}: 1/${text} of the logits${problem.gradients ? " and their gradient" : ""}.`
      : `${formatWorkspace(memory.chosen)}, which is more than the ${formatBytes(memory.materialized)} of these few logits.`;
  } else {
    headline.textContent = `The smallest budget that works is ${formatWorkspace(result.smallest_budget_bytes)} (${formatCount(result.smallest_budget_bytes)} bytes).`;
  }
  const saved = memory.materialized ? 100 * (1 - memory.plain / memory.materialized) : 0;
  document.getElementById("counted").textContent =
    `The first two bars count 4 bytes for each logit${problem.gradients ? " and 4 for each element of their gradient" : ""}, and nothing else, ` +
    `as in the blog post “Fused Linear Cross-Entropy”. The plain loop holds ${Number(saved.toPrecision(3))}% less. The bar of Logitless counts every byte that a run ` +
    `holds beyond its inputs and ${problem.gradients ? "gradients" : "losses"}: exp logits, sums, statistics of rows and scratch memory of matrix products.`;
}
