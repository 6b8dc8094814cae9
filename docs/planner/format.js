// Formats numbers for people, and makes elements.
"use strict";

const byteUnits = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

// Rounds to nearest.
function formatBytes(bytes) {
  let unit = 0;
  let value = bytes;
  while (value >= 1024 && unit + 1 < byteUnits.length) {
    value /= 1024;
    ++unit;
  }
  const digits = unit === 0 || value >= 100 ? 0 : value < 10 ? 2 : 1;
  return `${value.toFixed(digits)} ${byteUnits[unit]}`;
}

// A plan's workspace is always rounded up, so that the number shown is enough as a budget.
function formatWorkspace(bytes) {
  const nearest = formatBytes(bytes);
  const [number, unit] = nearest.split(" ");
  const digits = (number.split(".")[1] ?? "").length;
  const size = bytes / 1024 ** byteUnits.indexOf(unit);
  return Number(number) >= size ? nearest : `${(Math.ceil(size * 10 ** digits) / 10 ** digits).toFixed(digits)} ${unit}`;
}

function formatSeconds(seconds) {
  const [value, unit] = seconds < 1e-3 ? [seconds * 1e6, "µs"] : seconds < 1 ? [seconds * 1e3, "ms"] : [seconds, "s"];
  return `${value >= 100 ? Math.round(value).toLocaleString("en") : Number(value.toPrecision(3))} ${unit}`;
}

function formatCount(count) {
  return count.toLocaleString("en", { maximumFractionDigits: 0 });
}

// Makes an HTML element; `value` is the exact number behind its text.
function element(tag, text = "", attributes = {}, value = undefined) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, content] of Object.entries(attributes)) made.setAttribute(name, content);
  if (value !== undefined) made.dataset.value = JSON.stringify(value);
  return made;
}

function svgElement(tag, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, content] of Object.entries(attributes)) made.setAttribute(name, String(content));
  if (text) made.textContent = text;
  return made;
}

// Fills a table with rows of cells; a cell is a text or an element.
function fillTable(table, header, rows) {
  const head = element("thead");
  const titles = element("tr");
  for (const title of header) titles.append(element("th", title, { scope: "col" }));
  head.append(titles);
  const body = element("tbody");
  for (const cells of rows) {
    const row = element("tr");
    cells.forEach((cell, column) => {
      const made = cell instanceof Element ? cell : element("td", cell);
      if (column > 0) made.dataset.title = header[column]; // shown where rows become lists
      row.append(made);
    });
    body.append(row);
  }
  table.replaceChildren(head, body);
}
