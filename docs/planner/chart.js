// Draws time against memory as SVG, both on logarithmic scales.
"use strict";

const curveBudgets = 28;

// Finds the fastest plans for budgets between the smallest that works and the largest plan. It makes one call a turn, so
// that the page stays responsive, and calls done(points) at the end, unless isStale() is true before.
function computeCurve(library, state, result, isStale, done) {
  const bytes = result.plans.map((plan) => plan.workspace_bytes);
  const least = Math.max(result.smallest_budget_bytes, 1);
  const most = Math.max(...bytes, least);
  const points = new Map();
  const add = (plan) => points.set(plan.workspace_bytes, plan.predicted_seconds);
  let made = 0;
  const turn = () => {
    if (isStale()) return;
    const budget = Math.ceil(least * (most / least) ** (made / (curveBudgets - 1)));
    const { result: within } = library.plan({ ...state, budget: String(budget) });
    if (within && within.chosen) add(within.chosen);
    if (++made < curveBudgets && most > least) setTimeout(turn);
    else done([...points].map(([x, y]) => ({ bytes: x, seconds: y })).sort((a, b) => a.bytes - b.bytes));
  };
  setTimeout(turn, 60);
}

// Ticks inside a range: powers of two for bytes; 1, 2 and 5 times powers of ten for seconds.
function byteTicks(least, most, count) {
  const from = Math.ceil(Math.log2(least));
  const step = Math.max(1, Math.ceil((Math.log2(most) - from) / count));
  const ticks = [];
  for (let power = from; 2 ** power <= most; power += step) ticks.push(2 ** power);
  return ticks;
}
function secondTicks(least, most) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(least)); power <= Math.log10(most); ++power) {
    for (const digit of [1, 2, 5]) {
      const tick = digit * 10 ** power;
      if (tick >= least && tick <= most) ticks.push(tick);
    }
  }
  return ticks.length > 8 ? ticks.filter((tick) => /^1/.test(tick.toExponential())) : ticks;
}

class Chart {
  constructor(parent) {
    this.parent = parent;
  }

  // points: points of the curve, or []; measured: the result of measuredFor().
  draw(result, points, measured) {
    const width = Math.max(this.parent.clientWidth, 280);
    const height = Math.min(420, Math.max(260, width * 0.5));
    const box = { left: 62, right: width - 30, top: 14, bottom: height - 42 };
    const others = (measured ?? []).filter((point) => point.mib !== null && !Array.isArray(point.ms))
      .map(({ method, ms, mib, own }) => ({ name: method, bytes: mib * 2 ** 20, seconds: ms / 1e3, own }));
    const plans = result.plans.map((plan) => ({ ...plan, bytes: plan.workspace_bytes, seconds: plan.predicted_seconds }));
    const logits = result.problem.gradients ? result.materialized.logits_and_gradient_bytes : result.materialized.logits_bytes;
    const all = [...plans, ...points, ...others];
    const range = (values, margin) => [Math.min(...values) / margin, Math.max(...values) * margin];
    const [x0, x1] = range([...all.map((p) => Math.max(p.bytes, 1)), Math.max(logits, 1)], 1.6);
    const [y0, y1] = range(all.map((p) => p.seconds), 1.25);
    const x = (bytes) => box.left + ((box.right - box.left) * Math.log(Math.max(bytes, 1) / x0)) / Math.log(x1 / x0);
    const y = (seconds) => box.bottom - ((box.bottom - box.top) * Math.log(seconds / y0)) / Math.log(y1 / y0);
    const svg = svgElement("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", class: "chart",
      "aria-label": this.summary(result, others) });
    this.axes(svg, box, { x, y, x0, x1, y0, y1 });
    this.logits(svg, box, x(logits));
    const curve = points.length > 1 ? this.steps(points, x, y, box.right) : [];
    if (curve.length) svg.append(svgElement("path", { class: "curve", d: `M${curve.join("L")}` }));
    const labels = [];
    for (const point of others) {
      svg.append(this.mark(point.own ? "own" : "other", x(point.bytes), y(point.seconds), `${point.name}: ${formatSeconds(point.seconds)}, ${formatBytes(point.bytes)}, measured`));
      if (!point.own && width >= 560) labels.push({ text: point.name.replace(/ \(.*/, ""), x: x(point.bytes), y: y(point.seconds) });
    }
    for (const plan of plans.sort((a, b) => a.chosen - b.chosen)) {
      const kind = plan.chosen ? "chosen" : plan.fits ? "plan" : "plan over";
      svg.append(this.mark(kind, x(plan.bytes), y(plan.seconds), `${plan.plan}: ${formatSeconds(plan.seconds)}, ${formatWorkspace(plan.bytes)}, predicted`));
    }
    const chosen = plans.find((plan) => plan.chosen);
    if (chosen) labels.unshift({ text: `chosen: ${formatSeconds(chosen.seconds)}`, x: x(chosen.bytes), y: y(chosen.seconds), strong: true });
    const marks = [...plans, ...others].map((point) => [x(point.bytes), y(point.seconds)]);
    this.place(svg, labels, box, [...this.areasOf(curve, marks), { x0: x(logits) - 84, x1: x(logits) + 3, y0: box.top, y1: box.top + 18 }]);
    this.parent.replaceChildren(svg);
  }

  summary(result, others) {
    const text = result.plans.map((plan) => `${plan.plan} ${formatWorkspace(plan.workspace_bytes)}, ${formatSeconds(plan.predicted_seconds)}${plan.chosen ? ", chosen" : ""}`);
    return `Time against memory. Plans: ${text.join("; ")}. ${others.length ? `A table below lists ${others.length} measured points.` : ""}`;
  }

  axes(svg, box, { x, y, x0, x1, y0, y1 }) {
    for (const tick of byteTicks(x0, x1, Math.floor((box.right - box.left) / 62))) {
      svg.append(svgElement("line", { class: "grid", x1: x(tick), x2: x(tick), y1: box.top, y2: box.bottom }));
      svg.append(svgElement("text", { class: "tick", x: x(tick), y: box.bottom + 17, "text-anchor": "middle" }, formatBytes(tick).replace(/\.0+ /, " ")));
    }
    for (const tick of secondTicks(y0, y1)) {
      svg.append(svgElement("line", { class: "grid", x1: box.left, x2: box.right, y1: y(tick), y2: y(tick) }));
      svg.append(svgElement("text", { class: "tick", x: box.left - 7, y: y(tick) + 4, "text-anchor": "end" }, formatSeconds(tick)));
    }
    svg.append(svgElement("text", { class: "tick", x: (box.left + box.right) / 2, y: box.bottom + 36, "text-anchor": "middle" }, "memory beyond inputs and gradients"));
  }

  logits(svg, box, at) {
    svg.append(svgElement("line", { class: "logits", x1: at, x2: at, y1: box.top, y2: box.bottom }));
    svg.append(svgElement("text", { class: "logits-label", x: at - 5, y: box.top + 12, "text-anchor": "end" }, "materialized"));
  }

  // Corners of the curve of the fastest plan within each budget; time falls where a plan begins to fit.
  steps(points, x, y, right) {
    let best = points[0].seconds;
    const corners = [[x(points[0].bytes), y(best)]];
    for (const point of points.slice(1)) {
      if (point.seconds >= best) continue;
      corners.push([x(point.bytes), y(best)], [x(point.bytes), y(point.seconds)]);
      best = point.seconds;
    }
    return [...corners, [right, y(best)]];
  }

  // Areas that labels must not cover: the pieces of the curve, and marks.
  areasOf(curve, marks) {
    const pieces = curve.slice(1).map(([x1, y1], i) => {
      const [x0, y0] = curve[i];
      return { x0: Math.min(x0, x1), x1: Math.max(x0, x1), y0: Math.min(y0, y1) - 1, y1: Math.max(y0, y1) + 1 };
    });
    return [...pieces, ...marks.map(([x, y]) => ({ x0: x - 6, x1: x + 6, y0: y - 6, y1: y + 6 }))];
  }

  mark(kind, x, y, title) {
    const round = kind.startsWith("plan") || kind === "chosen";
    const size = kind === "chosen" ? 7 : 4.5;
    const shape = round
      ? svgElement("circle", { class: `mark ${kind}`, cx: x, cy: y, r: size })
      : svgElement("rect", { class: `mark ${kind}`, x: x - size, y: y - size, width: 2 * size, height: 2 * size, transform: `rotate(45 ${x} ${y})` });
    shape.append(svgElement("title", {}, title));
    return shape;
  }

  // Places labels beside their points. A label without room is left out; the mark's title and the table have its text.
  place(svg, labels, box, taken) {
    for (const { text, x, y, strong } of labels) {
      const wide = text.length * (strong ? 7.2 : 6.4);
      const places = [[x + 10, y + 4, "start"], [x - 10, y + 4, "end"], [x, y - 12, "middle"], [x, y + 22, "middle"], [x + 6, y - 14, "start"], [x - 6, y - 14, "end"], [x + 6, y - 30, "start"], [x + 6, y + 26, "start"]];
      for (const [left, base, anchor] of places) {
        const from = anchor === "start" ? left : anchor === "end" ? left - wide : left - wide / 2;
        const area = { x0: from, x1: from + wide, y0: base - 12, y1: base + 3 };
        const inside = area.x0 >= box.left && area.x1 <= box.right && area.y0 >= box.top && area.y1 <= box.bottom;
        if (!inside || taken.some((t) => area.x0 < t.x1 && t.x0 < area.x1 && area.y0 < t.y1 && t.y0 < area.y1)) continue;
        taken.push(area);
        svg.append(svgElement("text", { class: strong ? "label strong" : "label", x: left, y: base, "text-anchor": anchor }, text));
        break;
      }
    }
  }
}
