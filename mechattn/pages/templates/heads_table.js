// @ts-check
// Heads as a table, ranked by any of its columns, named as in result.compare; also as CSV.

import { headAt, measured, ofHeads } from "./data.js";
import { html } from "./drawing.js";
import { endsOf, formatted, formattedQ, saveCsv } from "./words.js";

/** A column: its name as in result.compare and in CSV, the head's numbers, how they are written, the words over them on
 * the screen (none where they stand in CSV alone), and the ends of their intervals.
 * @typedef {{name: string, of: ArrayLike<number>, scale: string, words?: string, ends?: any}} Column */

/** The columns of a quantity in a condition.
 * @param {any} model
 * @param {any} quantity
 * @param {string} condition
 * @returns {Column[]} */
export function columnsOf(model, quantity, condition) {
  const index = Array.from({ length: model.layers.length * model.heads }, (_, i) => i);
  /** @type {Column[]} */
  const columns = [
    { name: "layer", of: index.map((i) => headAt(model, i).layer), scale: "whole" },
    { name: "head", of: index.map((i) => headAt(model, i).head), scale: "whole", words: "head" },
  ];
  const change = quantity.changes[condition],
    measurement = measured(model, { quantity: quantity.name, condition, show: change ? "change" : "value" });
  if (!measurement) return columns;
  if (!change) return [...columns, ...ofValues(measurement, condition)];
  const reference = ofHeads(quantity.values.baseline?.mean ?? null, model);
  columns.push({ name: "reference", of: reference, scale: "value", words: "baseline" });
  columns.push({ name: "value", of: measurement.parts.value.value, scale: "value", words: condition });
  return [...columns, ...ofChanges(measurement)];
}

/** A number, the ends of its interval and uniform attention's, where nothing is compared. */
const ofValues = (measurement, condition) => [
  { name: "value", of: measurement.value, scale: "value", words: condition, ends: measurement },
  { name: "value_low", of: measurement.low, scale: "value" },
  { name: "value_high", of: measurement.high, scale: "value" },
  { name: "uniform", of: measurement.null, scale: "value", words: "uniform attention" },
];

/** The change as a fraction and as it was computed, each beside its interval, and its q; in CSV also what the null
 * (dilution or uniform attention) would give, and the change relative to that. */
function ofChanges(measurement) {
  const { change, beyond } = measurement.parts,
    relative = change.scale === "log-ratio";
  const withEnds = (name, part, words) => [
    { name, of: part.value, scale: part.scale, words, ends: part },
    ...["low", "high"].map((end) => ({ name: `${name}_${end}`, of: part[end], scale: part.scale })),
  ];
  const logRatios = [change.value, change.low, change.high, measurement.null];
  const [value, low, high, ofNull] = logRatios.map((numbers) => numbers.map(Math.expm1));
  const columns = relative ? withEnds("change", { value, low, high, scale: "fraction" }, "change") : [];
  if (relative) columns.push({ name: "change_null", of: ofNull, scale: "fraction" });
  columns.push(...withEnds("difference", change, relative ? undefined : "difference"));
  columns.push({ name: "null", of: measurement.null, scale: change.scale });
  if (beyond) columns.push(...withEnds("beyond", beyond, undefined));
  if (beyond) columns.push({ name: "q_beyond", of: measurement.q_beyond, scale: "q" });
  return [...columns, { name: "q_difference", of: measurement.q, scale: "q", words: "q, against no change" }];
}

/** A cell of the table: a number, and its interval in small print. */
function cellOf(column, i) {
  const words = column.scale === "q" ? formattedQ(column.of[i]) : formatted(column.of[i], column.scale);
  const cell = html("td", {}, words);
  cell.dataset.column = column.name;
  if (column.ends && words !== "–")
    cell.append(html("span", { className: "ends", textContent: endsOf(column.ends, i) }));
  return cell;
}

/** Draw the table.
 * @param {HTMLElement} place
 * @param {Column[]} columns
 * @param {{index: number, brushed: Set<number> | null, rows: number, sort: {by: string, down: boolean},
 *   choose: (i: number) => void, order: (by: string) => void}} selection
 * @returns {{count: number, by: string}} How many heads there are to show, and what they are sorted by, in words */
export function drawTable(place, columns, selection) {
  const shownColumns = columns.filter((column) => column.words),
    by = columns.find((column) => column.name === selection.sort.by) ?? columns[1],
    order = ranked(by, columns[0].of.length, selection);
  const heads = shownColumns.map((column) => {
    const sorted = column !== by ? "none" : selection.sort.down ? "descending" : "ascending";
    const button = html("button", { type: "button", id: `by-${column.name}`, textContent: column.words }),
      header = html("th", { scope: "col" }, button);
    header.setAttribute("aria-sort", sorted);
    button.addEventListener("click", () => selection.order(column.name));
    return header;
  });
  const rows = order.slice(0, selection.rows).map((i) => {
    const [layer, head] = [columns[0].of[i], columns[1].of[i]];
    const open = html("button", { type: "button", textContent: `L${layer}H${head}` });
    open.setAttribute("aria-label", `layer ${layer} head ${head}`);
    open.addEventListener("click", () => selection.choose(i));
    const cells = shownColumns.slice(1).map((column) => cellOf(column, i));
    const row = html("tr", { className: i === selection.index ? "here" : "" }, html("td", {}, open), ...cells);
    row.dataset.i = String(i);
    return row;
  });
  place.replaceChildren(html("thead", {}, html("tr", {}, ...heads)), html("tbody", {}, ...rows));
  return { count: order.length, by: `sorted by “${by.words}”, ${firstWords(by, selection.sort.down)} first` };
}

/** Which heads come first. */
function firstWords(by, down) {
  if (by.name === "head") return down ? "the last" : "the first";
  if (by.scale === "ratio") return down ? "the furthest from 1 ×" : "the closest to 1 ×";
  return `${down ? "the largest" : "the smallest"}${signed(by) ? " in size" : ""}`;
}

const signed = (column) => ["fraction", "log-ratio", "ratio", "difference"].includes(column.scale);

/** Heads in the order of a column: signed numbers by their size, and NaN last. */
function ranked(by, count, selection) {
  const of = (i) => (signed(by) ? Math.abs(by.of[i]) : by.name === "head" ? i : by.of[i]);
  const { brushed } = selection;
  const indices = Array.from({ length: count }, (_, i) => i).filter((i) => !brushed || brushed.has(i));
  return indices.sort((a, b) => {
    const [x, y] = [of(a), of(b)];
    if (Number.isNaN(x) || Number.isNaN(y)) return Number(Number.isNaN(x)) - Number(Number.isNaN(y)) || a - b;
    return (selection.sort.down ? y - x : x - y) || a - b;
  });
}

/** All columns of all heads, or of those that are brushed, as CSV, with the numbers as the page has them.
 * @param {string} name
 * @param {Column[]} columns
 * @param {{quantity: any, condition: string}} about
 * @param {Set<number> | null} brushed */
export function saveTable(name, columns, about, brushed) {
  const { condition } = about,
    { name: quantity, segment, units, values } = about.quantity,
    { n, unit } = values[condition];
  const [compared, change] = ["difference", "change"].map((of) => columns.find((column) => column.name === of));
  const last = [compared?.scale, change?.scale, 0.95, n, unit];
  const rows = [...Array(columns[0].of.length).keys()]
    .filter((i) => !brushed || brushed.has(i))
    .map((i) => [quantity, condition, segment, units, ...columns.map((column) => column.of[i]), ...last]);
  const first = ["quantity", "condition", "segment", "units"];
  const names = [...first, ...columns.map((column) => column.name), "scale", "change_units", "level", "n", "n_of"];
  saveCsv(name, [names, ...rows]);
}
