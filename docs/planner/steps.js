// A run of a plan as steps: the rows (tokens) and columns (vocabulary) that each makes, and the memory that is held. Nothing
// is computed here; the sizes are the plan's.
"use strict";

// A step is {text, made: area or null, held: [{name, area, bytes of an element}], rowsDone, hiddenDone, weightDone: columns
// that have a gradient, partial: whether it is a part of a sum}. `reads` has the rows of hidden states and the columns of
// the weight that it reads, where these are not those of `made`. An area is [first row, end, first column, end].

// Bytes of an exp logit or of a logit's gradient in a plan's kernels.
function elementBytes(result, plan) {
  const { dtype, weight_dtype: other } = result.problem;
  if (dtype === "f64") return 8;
  if (plan.backend === "cpu") return plan.engine === "avx512_bf16" ? 2 : 4;
  return dtype === other && dtype !== "f32" ? 2 : 4;
}

const chunksOf = (whole, part) => Math.max(Math.ceil(whole / part), 1);
const rowsText = (first, end, all) => (first === 0 && end === all ? "all tokens" : `tokens ${formatCount(first + 1)} to ${formatCount(end)}`);
const columnsText = (first, end, all) => (first === 0 && end === all ? "the whole vocabulary" : `entries ${formatCount(first + 1)} to ${formatCount(end)}`);

// Returns {count, at(i)} with `each` steps for every chunk of tokens; step(first, end, which) makes one.
function chunkedSteps(N, chunk, each, step) {
  return {
    count: chunksOf(N, chunk) * each,
    at: (i) => {
      const first = Math.floor(i / each) * chunk, end = Math.min(first + chunk, N);
      return { rowsDone: first, made: null, held: [], ...step(first, end, i % each) };
    },
  };
}

// Returns {count, at(i)}; rows and columns are the problem's, the chunk and all else the plan's.
function stepsOfPlan(result, plan) {
  const N = result.problem.tokens, V = result.problem.vocab;
  const chunk = Math.min(plan.token_chunk || N, N);
  const bytes = elementBytes(result, plan);
  const kind = plan.plan;
  if (kind === "sparsified") return sparsifiedSteps(N, V, result.problem.threshold);
  if (kind === "forward") {
    return chunkedSteps(N, chunk, 1, (first, end) => ({
      text: `Logits of ${rowsText(first, end, N)}, tile by tile. Each tile is reduced to maximum, sum and target of its rows while it is in registers or cache, and then dropped.`,
      made: [first, end, 0, V],
    }));
  }
  // The CPU's plans for small budgets make the weight's gradient in a separate pass.
  if (plan.config.includes("d_weight after all rows")) return sweepSteps(N, V, windowSteps(N, V, chunk, plan, bytes, true), plan, chunk, bytes);
  if (kind === "whole" || kind === "token_chunks") return keptSteps(N, V, chunk, bytes);
  return windowSteps(N, V, chunk, plan, bytes, false);
}

// Steps of a plan that keeps all exp logits of a chunk of tokens.
function keptSteps(N, V, chunk, bytes) {
  return chunkedSteps(N, chunk, 3, (first, end, part) => {
    const rows = rowsText(first, end, N), area = [first, end, 0, V];
    const held = [{ name: "exp logits", area, bytes }];
    const before = { held, weightDone: first ? V : 0, partial: first > 0 };
    return [
      { text: `Logits of ${rows}. Their exp logits and the sums of rows are kept.`, made: area, hiddenDone: first, ...before },
      { text: `Gradient of the hidden states of ${rows}: exp logits times weight.`, reads: { columns: [0, V] }, hiddenDone: end, ...before },
      { text: `Gradient of the weight: transposed exp logits times the hidden states of ${rows}${chunk < N ? ", added to the sum" : ""}.`, reads: { rows: [first, end] }, held, hiddenDone: end, weightDone: V, partial: end < N },
    ][part];
  });
}

// Steps of a plan that caches the exp logits of some columns, or none, and makes windows of the others again.
function windowSteps(N, V, chunk, plan, bytes, hiddenOnly) {
  const kept = Math.min(plan.cached_columns, V);
  const wide = Math.max(Math.min(plan.vocab_window || V, V - kept), 1);
  const windows = Math.ceil((V - kept) / wide);
  const each = 1 + (kept > 0 ? 1 : 0) + windows;
  // The finished part of the weight's gradient; there is none where another pass makes it.
  const weight = (last, partial) => (hiddenOnly ? { weightDone: 0 } : { weightDone: last, partial });
  return chunkedSteps(N, chunk, each, (first, end, part) => {
    const rows = rowsText(first, end, N);
    const held = kept ? [{ name: "exp logits of the cached columns", area: [first, end, 0, kept], bytes }] : [];
    if (part === 0) {
      return { text: `Logits of ${rows}. The sums of rows ${kept ? `and the exp logits of ${formatCount(kept)} cached columns are kept` : "are kept, and nothing else"}.`, made: [first, end, 0, V], held, hiddenDone: first, ...weight(first ? V : 0, first > 0) };
    }
    if (kept && part === 1) {
      return { text: `Gradients of ${rows} from the exp logits of the cached columns.`, reads: { rows: [first, end], columns: [0, kept] }, held, hiddenDone: kept === V ? end : first, ...weight(kept, end < N) };
    }
    const column = kept + (part - each + windows) * wide, last = Math.min(column + wide, V);
    const area = [first, end, column, last];
    return { text: `Logits of ${rows} for ${columnsText(column, last, V)} again, turned into their gradients. ${hiddenOnly ? "The product with them adds to the gradient of the hidden states" : "Both products with them add to the gradients"}.`, made: area, held: [{ name: "gradients of a window's logits", area, bytes }], hiddenDone: last === V ? end : first, ...weight(last, end < N) };
  });
}

// Adds a pass over the vocabulary, window by window with all tokens, after the steps for the hidden states' gradient.
function sweepSteps(N, V, before, plan, chunk, bytes) {
  const wide = Math.min(plan.vocab_window || V, V);
  return {
    count: before.count + Math.ceil(V / wide),
    at: (i) => {
      if (i < before.count) return before.at(i);
      const column = (i - before.count) * wide, last = Math.min(column + wide, V);
      return { text: `Gradient of the weight for ${columnsText(column, last, V)}: logits of all tokens again, ${formatCount(chunk)} at a time.`,
        made: [0, N, column, last], held: [{ name: "gradients of a window's logits", area: [0, chunk, column, last], bytes }], rowsDone: 0, hiddenDone: N, weightDone: last };
    },
  };
}

// Steps of sparsified gradients: large elements of the softmax are kept, smaller ones drawn, in lists instead of matrices.
function sparsifiedSteps(N, V, threshold) {
  const most = Math.round(1 / threshold);
  const lists = { name: `lists of at most about ${formatCount(most)} elements for each token`, list: [N, Math.min(most, V)], bytes: 8 };
  const all = [0, N, 0, V];
  return {
    count: 3,
    at: (i) => [
      { text: `Logits of all tokens, tile by tile. Probabilities of at least ${1 / most < 1e-2 ? `1 / ${formatCount(most)}` : threshold} are kept and smaller ones are drawn. Each token gets a list of a few elements.`, made: all, held: [lists], rowsDone: 0, hiddenDone: 0, weightDone: 0 },
      { text: "Gradient of the hidden states: each token adds up the rows of the weight in its list.", made: null, reads: { columns: [0, V] }, held: [lists], rowsDone: N, hiddenDone: N, weightDone: 0 },
      { text: "Gradient of the weight: each row adds up the hidden states of the tokens that list it.", made: null, reads: { rows: [0, N] }, held: [lists], rowsDone: N, hiddenDone: N, weightDone: V },
    ][i],
  };
}

// Steps of a plain loop: float32 logits of one chunk of tokens at a time, overwritten by their gradients.
function stepsOfPlainLoop({ tokens: N, vocab: V, gradients }, chunk) {
  const size = Math.min(chunk, N), count = chunksOf(N, size);
  return chunkedSteps(N, size, 1, (first, end) => {
    const area = [first, end, 0, V];
    return { text: `Chunk ${formatCount(first / size + 1)} of ${formatCount(count)} · tokens processed ${formatCount(first)} of ${formatCount(N)}. The chunk's logits become its softmax in place, which is added to the gradients. The next chunk reuses the buffer.`,
      made: area, held: [{ name: "logits and their gradient, float32", area, bytes: gradients ? 8 : 4 }], hiddenDone: gradients ? end : 0, weightDone: gradients ? V : 0, partial: end < N };
  });
}
