// A run of a plan as steps: which rows (tokens) and columns (vocabulary) are made, and what is held meanwhile. Nothing here
// computes; the sizes are the plan's.
"use strict";

// A step: {text, made: area or null, held: [{name, area, bytes each}], rowsDone, hiddenDone, weightDone: columns whose
// gradient is there, partial: as a part of a sum}, and `reads`, where other hidden states (rows) or weight entries
// (columns) are read than those of `made`. An area is [first row, end, first column, end].

// Bytes of an exponential or gradient of a logit, as a plan's kernels keep them.
function elementBytes(result, plan) {
  const { dtype, weight_dtype: other } = result.problem;
  if (dtype === "f64") return 8;
  if (plan.backend === "cpu") return plan.engine === "avx512_bf16" ? 2 : 4;
  return dtype === other && dtype !== "f32" ? 2 : 4;
}

const chunksOf = (whole, part) => Math.max(Math.ceil(whole / part), 1);
const rowsText = (first, end, all) => (first === 0 && end === all ? "all tokens" : `tokens ${formatCount(first + 1)} to ${formatCount(end)}`);
const columnsText = (first, end, all) => (first === 0 && end === all ? "the whole vocabulary" : `entries ${formatCount(first + 1)} to ${formatCount(end)}`);

// {count, at(i)} of `each` steps for every chunk of tokens; step(first, end, which one).
function chunkedSteps(N, chunk, each, step) {
  return {
    count: chunksOf(N, chunk) * each,
    at: (i) => {
      const first = Math.floor(i / each) * chunk, end = Math.min(first + chunk, N);
      return { rowsDone: first, made: null, held: [], ...step(first, end, i % each) };
    },
  };
}

// {count, at(i)}; rows and columns are the problem's, chunk and the rest the plan's.
function stepsOfPlan(result, plan) {
  const N = result.problem.tokens, V = result.problem.vocab;
  const chunk = Math.min(plan.token_chunk || N, N);
  const bytes = elementBytes(result, plan);
  const kind = plan.plan;
  if (kind === "sparsified") return sparsifiedSteps(N, V, result.problem.threshold);
  if (kind === "forward") {
    return chunkedSteps(N, chunk, 1, (first, end) => ({
      text: `Logits of ${rowsText(first, end, N)}, tile by tile: each is reduced to a row's maximum, sum and target while it is in registers or cache, and forgotten.`,
      made: [first, end, 0, V],
    }));
  }
  // The CPU's plans for small budgets make the weight's gradient in a pass of its own.
  if (plan.config.includes("d_weight after all rows")) return sweepSteps(N, V, windowSteps(N, V, chunk, plan, bytes, true), plan, chunk, bytes);
  if (kind === "whole" || kind === "token_chunks") return keptSteps(N, V, chunk, bytes);
  return windowSteps(N, V, chunk, plan, bytes, false);
}

// All exponentials of a chunk of tokens are kept.
function keptSteps(N, V, chunk, bytes) {
  return chunkedSteps(N, chunk, 3, (first, end, part) => {
    const rows = rowsText(first, end, N), area = [first, end, 0, V];
    const held = [{ name: "exponentials of the logits", area, bytes }];
    const before = { held, weightDone: first ? V : 0, partial: first > 0 };
    return [
      { text: `Logits of ${rows}: their exponentials are kept, and sums of rows with them.`, made: area, hiddenDone: first, ...before },
      { text: `The gradient of the hidden states of ${rows}: the exponentials times the weight.`, reads: { columns: [0, V] }, hiddenDone: end, ...before },
      { text: `The gradient of the weight: the exponentials, transposed, times the hidden states of ${rows}${chunk < N ? ", added up" : ""}.`, reads: { rows: [first, end] }, held, hiddenDone: end, weightDone: V, partial: end < N },
    ][part];
  });
}

// The exponentials of some columns, or none, are kept; windows of the others are made again.
function windowSteps(N, V, chunk, plan, bytes, hiddenOnly) {
  const kept = Math.min(plan.cached_columns, V);
  const wide = Math.max(Math.min(plan.vocab_window || V, V - kept), 1);
  const windows = Math.ceil((V - kept) / wide);
  const each = 1 + (kept > 0 ? 1 : 0) + windows;
  // The gradient of the weight, as far as it is known; none yet where another pass makes it.
  const weight = (last, partial) => (hiddenOnly ? { weightDone: 0 } : { weightDone: last, partial });
  return chunkedSteps(N, chunk, each, (first, end, part) => {
    const rows = rowsText(first, end, N);
    const held = kept ? [{ name: "exponentials of the first entries", area: [first, end, 0, kept], bytes }] : [];
    if (part === 0) {
      return { text: `Logits of ${rows}: sums of rows, and ${kept ? `the exponentials of ${formatCount(kept)} entries are` : "nothing else is"} kept.`, made: [first, end, 0, V], held, hiddenDone: first, ...weight(first ? V : 0, first > 0) };
    }
    if (kept && part === 1) {
      return { text: `Gradients of ${rows} from the exponentials that were kept.`, reads: { rows: [first, end], columns: [0, kept] }, held, hiddenDone: kept === V ? end : first, ...weight(kept, end < N) };
    }
    const column = kept + (part - each + windows) * wide, last = Math.min(column + wide, V);
    const area = [first, end, column, last];
    return { text: `Logits of ${rows} for ${columnsText(column, last, V)} once more, as gradients; ${hiddenOnly ? "the product" : "both products"} with them add${hiddenOnly ? "s" : ""} to what is known.`, made: area, held: [{ name: "gradients of a window's logits", area, bytes }], hiddenDone: last === V ? end : first, ...weight(last, end < N) };
  });
}

// After the steps that make the gradient of the hidden states: the vocabulary window by window, with all tokens.
function sweepSteps(N, V, before, plan, chunk, bytes) {
  const wide = Math.min(plan.vocab_window || V, V);
  return {
    count: before.count + Math.ceil(V / wide),
    at: (i) => {
      if (i < before.count) return before.at(i);
      const column = (i - before.count) * wide, last = Math.min(column + wide, V);
      return { text: `The gradient of the weight for ${columnsText(column, last, V)}: logits of all tokens once more, ${formatCount(chunk)} at a time.`,
        made: [0, N, column, last], held: [{ name: "gradients of a window's logits", area: [0, chunk, column, last], bytes }], rowsDone: 0, hiddenDone: N, weightDone: last };
    },
  };
}

// A softmax' large elements are kept, the others drawn: lists, not matrices.
function sparsifiedSteps(N, V, threshold) {
  const most = Math.round(1 / threshold);
  const lists = { name: `lists of about ${formatCount(most)} elements a token at most`, list: [N, Math.min(most, V)], bytes: 8 };
  const all = [0, N, 0, V];
  return {
    count: 3,
    at: (i) => [
      { text: `Logits of all tokens, tile by tile. Probabilities of ${1 / most < 1e-2 ? `1 / ${formatCount(most)}` : threshold} or more are kept, smaller ones drawn; a few elements a token go to its list.`, made: all, held: [lists], rowsDone: 0, hiddenDone: 0, weightDone: 0 },
      { text: "The gradient of the hidden states: each token adds up the weight's rows of its list.", made: null, reads: { columns: [0, V] }, held: [lists], rowsDone: N, hiddenDone: N, weightDone: 0 },
      { text: "The gradient of the weight: each entry adds up the hidden states of the tokens that list it.", made: null, reads: { rows: [0, N] }, held: [lists], rowsDone: N, hiddenDone: N, weightDone: V },
    ][i],
  };
}

// Logits in float32 and, in their place, gradients: a chunk of tokens at a time.
function stepsOfPlainLoop({ tokens: N, vocab: V, gradients }, chunk) {
  const size = Math.min(chunk, N), count = chunksOf(N, size);
  return chunkedSteps(N, size, 1, (first, end) => {
    const area = [first, end, 0, V];
    return { text: `Chunk ${formatCount(first / size + 1)} of ${formatCount(count)} · tokens processed ${formatCount(first)} of ${formatCount(N)}. The chunk's logits become its softmax in place, and then the gradients' sums; the buffer is the next chunk's.`,
      made: area, held: [{ name: "logits and their gradient, float32", area, bytes: gradients ? 8 : 4 }], hiddenDone: gradients ? end : 0, weightDone: gradients ? V : 0, partial: end < N };
  });
}
