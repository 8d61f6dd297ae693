// @ts-check
// Heads as a table, ranked by any of its columns; what the map shows for those who don't see it.

import { headAt, measured, ofHeads } from "./data.js";
import { html } from "./drawing.js";
import { chance, saveCsv, shown } from "./words.js";

const WORDS = { difference: "change", low: "low", high: "high", null: "null", beyond: "beyond the null", q: "q" };

/** The columns of a quantity in a condition: a name, numbers and how they are shown.
 * @param {any} model
 * @param {any} quantity
 * @param {string} condition */
export function columnsOf(model, quantity, condition) {
  const index = Array.from({ length: model.layers.length * model.heads }, (_, i) => i),
    change = quantity.changes[condition];
  /** @type {{name: string, of: ArrayLike<number>, scale: string}[]} */
  const columns = [
    { name: "layer", of: index.map((i) => headAt(model, i).layer), scale: "whole" },
    { name: "head", of: index.map((i) => headAt(model, i).head), scale: "whole" },
  ];
  for (const name of new Set(["baseline", condition])) {
    const part = quantity.values[name];
    if (part) columns.push({ name, of: ofHeads(part.mean, model), scale: "value" });
  }
  const made = measured(model, { quantity: quantity.name, condition, show: change ? "change" : "value" });
  if (!made) return columns;
  columns.push(...["low", "high", "null"].map((name) => ({ name, of: made[name], scale: made.scale })));
  if (!change) return columns;
  columns.splice(-3, 0, { name: "difference", of: made.value, scale: made.scale });
  const beyond = measured(model, { quantity: quantity.name, condition, show: "beyond" });
  if (beyond)
    columns.push(
      { name: "beyond", of: beyond.value, scale: made.scale },
      { name: "beyond_low", of: beyond.low, scale: made.scale },
      { name: "beyond_high", of: beyond.high, scale: made.scale },
    );
  return [...columns, { name: "q", of: made.q, scale: "q" }];
}

const text = (column, i) =>
  column.scale === "whole"
    ? String(column.of[i])
    : column.scale === "q"
      ? chance(column.of[i])
      : shown(column.of[i], column.scale);

/** Draw the table.
 * @param {HTMLElement} place
 * @param {any} columns
 * @param {{index: number, brushed: Set<number> | null, rows: number, sort: {by: string, down: boolean},
 *   choose: (i: number) => void, order: (by: string) => void}} on
 * @returns {number} How many heads there are to show */
export function drawTable(place, columns, on) {
  const shownColumns = columns.filter((column) => !column.name.startsWith("beyond_"));
  const by = columns.find((column) => column.name === on.sort.by) || columns[0];
  const order = ranked(by, columns[0].of.length, on);
  const head = html(
    "tr",
    {},
    ...shownColumns.map((column) => {
      const button = html("button", {
          type: "button",
          id: `by-${column.name}`,
          textContent: WORDS[column.name] || column.name,
        }),
        made = html("th", { scope: "col" }, button);
      made.setAttribute("aria-sort", column !== by ? "none" : on.sort.down ? "descending" : "ascending");
      button.addEventListener("click", () => on.order(column.name));
      return made;
    }),
  );
  const rows = order.slice(0, on.rows).map((i) => {
    const open = html("button", { type: "button", textContent: `layer ${columns[0].of[i]} head ${columns[1].of[i]}` });
    open.addEventListener("click", () => on.choose(i));
    const made = html(
      "tr",
      { className: i === on.index ? "here" : "" },
      html("td", {}, open),
      ...shownColumns.slice(2).map((column) => html("td", { textContent: text(column, i) })),
    );
    made.dataset.i = String(i);
    return made;
  });
  head.firstChild.colSpan = 1;
  head.children[1].remove();
  head.firstChild.firstChild.textContent = "head";
  place.replaceChildren(html("thead", {}, head), html("tbody", {}, ...rows));
  return order.length;
}

/** Heads in the order of a column; signed numbers by their size, those that are none last. */
function ranked(by, count, on) {
  const of = (i) => (by.scale === "log-ratio" || by.scale === "difference" ? Math.abs(by.of[i]) : by.of[i]);
  const known = Array.from({ length: count }, (_, i) => i).filter((i) => !on.brushed || on.brushed.has(i));
  return known.sort((a, b) => {
    const [x, y] = [of(a), of(b)];
    if (Number.isNaN(x) || Number.isNaN(y)) return Number(Number.isNaN(x)) - Number(Number.isNaN(y)) || a - b;
    return (on.sort.down ? y - x : x - y) || a - b;
  });
}

/** All columns of all heads, or of those that are brushed, as CSV; numbers as they are held.
 * @param {string} name
 * @param {any} columns
 * @param {{quantity: string, condition: string}} about
 * @param {Set<number> | null} brushed */
export function saveTable(name, columns, about, brushed) {
  const rows = [...columns[0].of.keys()]
    .filter((i) => !brushed || brushed.has(i))
    .map((i) => [about.quantity, about.condition, ...columns.map((column) => column.of[i])]);
  saveCsv(name, [["quantity", "condition", ...columns.map((column) => column.name)], ...rows]);
}
