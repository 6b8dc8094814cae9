// Draws a step: hidden states at the left, the weight above, tokens x vocabulary between, gradients at the right and below.
"use strict";

class Stage {
  constructor(parent, table) {
    this.parent = parent;
    this.table = table;
  }

  draw(step, problem, chosen) {
    const N = Math.max(problem.tokens, 1), V = problem.vocab;
    const width = Math.max(this.parent.clientWidth, 280);
    const strip = width < 480 ? 16 : 22;
    const labels = width < 480 ? 0 : 96;
    const height = Math.min(340, Math.max(220, width * 0.42));
    const box = { left: labels + strip + 8, right: width - strip - 8 - labels, top: 22 + strip + 8, bottom: height - strip - 30 };
    const x = (column) => box.left + ((box.right - box.left) * column) / V;
    const y = (row) => box.top + ((box.bottom - box.top) * row) / N;
    const svg = svgElement("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", class: "stage", "aria-label": step.text });
    svg.append(this.hatch());
    const rect = (kind, x0, y0, x1, y1) => {
      // Even the smallest part stays visible.
      const wide = Math.max(x1 - x0, 1.5), tall = Math.max(y1 - y0, 1.5);
      svg.append(svgElement("rect", { class: kind, x: Math.min(x0, box.right + strip + 8 - 1.5), y: y0, width: wide, height: tall }));
    };
    rect("never", box.left, box.top, box.right, box.bottom);
    if (step.rowsDone) rect("past", box.left, box.top, box.right, y(step.rowsDone));
    const area = ([r0, r1, c0, c1], kind) => rect(kind, x(c0), y(r0), x(c1), y(r1));
    if (step.made) area(step.made, "passing");
    for (const held of step.held) if (held.area) area(held.area, "held");
    for (const held of step.held) if (held.list) this.lists(svg, held, box);
    if (step.made) for (const held of step.held) if (held.area && held.area[0] === step.made[0]) area(held.area, "live");
    this.strips(rect, { x, y, box, strip, step, gradients: problem.gradients });
    if (N <= 64) for (let row = 1; row < N; ++row) svg.append(svgElement("line", { class: "cell", x1: box.left - strip - 8, x2: box.right, y1: y(row), y2: y(row) }));
    this.names(svg, box, strip, labels, problem, height);
    this.parent.replaceChildren(svg);
    this.list(step, chosen);
  }

  // The pattern of elements that are made and not held.
  hatch() {
    const pattern = svgElement("pattern", { id: "hatch", width: 7, height: 7, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
    pattern.append(svgElement("line", { class: "hatching", x1: 0, x2: 0, y1: 0, y2: 7 }));
    const defs = svgElement("defs");
    defs.append(pattern);
    return defs;
  }

  // Draws hidden states and weight, and the gradient of each.
  strips(rect, { x, y, box, strip, step, gradients }) {
    const reads = step.reads ?? { rows: step.made.slice(0, 2), columns: step.made.slice(2) };
    const left = [box.left - strip - 8, box.left - 8], top = [box.top - strip - 8, box.top - 8];
    rect("never", left[0], box.top, left[1], box.bottom);
    if (step.rowsDone) rect("past", left[0], box.top, left[1], y(step.rowsDone));
    if (reads.rows) rect("read", left[0], y(reads.rows[0]), left[1], y(reads.rows[1]));
    rect("never", box.left, top[0], box.right, top[1]);
    if (reads.columns) rect("read", x(reads.columns[0]), top[0], x(reads.columns[1]), top[1]);
    if (!gradients) return;
    const right = [box.right + 8, box.right + strip + 8], below = [box.bottom + 8, box.bottom + strip + 8];
    rect("never", right[0], box.top, right[1], box.bottom);
    if (step.hiddenDone) rect("past", right[0], box.top, right[1], y(step.hiddenDone));
    rect("never", box.left, below[0], box.right, below[1]);
    if (step.weightDone) rect(step.partial ? "past partial" : "past", x(0), below[0], x(step.weightDone), below[1]);
  }

  // Draws short lists of elements, one line for each token.
  lists(svg, held, box) {
    const [N, most] = held.list;
    const lines = Math.min(N, 28);
    for (let i = 0; i < lines; ++i) {
      const at = box.top + ((box.bottom - box.top) * (i + 0.5)) / lines;
      const elements = 5 + ((i * 7) % 5);
      for (let k = 0; k < elements && k < most; ++k) {
        const place = (((i * 37 + k * k * 53 + k * 17) % 97) + 1) / 98;
        svg.append(svgElement("rect", { class: "held dot", x: box.left + (box.right - box.left) * place - 2, y: at - 2, width: 4, height: 4 }));
      }
    }
  }

  names(svg, box, strip, labels, problem, height) {
    const middle = (box.left + box.right) / 2, half = (box.top + box.bottom) / 2;
    const text = (content, x, y, anchor) => svg.append(svgElement("text", { class: "tick", x, y, "text-anchor": anchor }, content));
    text(`weight, V = ${formatCount(problem.vocab)}`, middle, box.top - strip - 15, "middle");
    if (problem.gradients) text("gradient of the weight", middle, height - 8, "middle");
    if (labels === 0) return;
    text("hidden states,", box.left - strip - 14, half - 3, "end");
    text(`N = ${formatCount(problem.tokens)}`, box.left - strip - 14, half + 13, "end");
    if (!problem.gradients) return;
    text("gradient of the", box.right + strip + 14, half - 3, "start");
    text("hidden states", box.right + strip + 14, half + 13, "start");
  }

  // Lists the held memory in numbers. chosen: the plan, or null for a loop that has no other workspace.
  list(step, chosen) {
    const rows = step.held.map((held) => {
      const [tall, wide] = held.list ?? [held.area[1] - held.area[0], held.area[3] - held.area[2]];
      return { name: held.name, shape: `${held.list ? "up to " : ""}${formatCount(tall)} × ${formatCount(wide)}`, bytes: tall * wide * held.bytes, list: Boolean(held.list) };
    });
    const cells = rows.map((row) => [element("th", row.name, { scope: "row" }), row.shape, element("td", `${row.list ? "up to " : ""}${formatBytes(row.bytes)}`, {}, row.bytes)]);
    if (chosen) {
      const known = rows.reduce((sum, row) => sum + row.bytes, 0);
      const rest = chosen.workspace_bytes - known;
      if (rest < 0 && rows.length && !rows[0].list) cells.push([element("th", "of which in memory that later holds the gradient", { scope: "row" }), "", formatBytes(-rest)]);
      else if (!rows.some((row) => row.list)) cells.push([element("th", "rest of the workspace: sums, statistics of rows, scratch", { scope: "row" }), "", formatBytes(rest)]);
      cells.push([element("th", "workspace, from the first step to the last", { scope: "row" }), "", element("td", formatWorkspace(chosen.workspace_bytes), {}, chosen.workspace_bytes)]);
    }
    fillTable(this.table, ["Held", "Size", "Bytes"], cells);
  }
}
