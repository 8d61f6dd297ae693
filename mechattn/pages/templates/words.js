// @ts-check
// Numbers as text, and files.

import { SHOWS, headAt } from "./data.js";

const minus = (/** @type {string} */ text) => text.replace(/-/g, "\u2212");

/** A number to three digits, or as a change with its sign.
 * @param {number | undefined} value
 * @param {string} scale "value", "log-ratio" or "difference" */
export function shown(value, scale) {
  if (value === undefined || Number.isNaN(value)) return "–";
  if (scale === "log-ratio") {
    const percent = 100 * Math.expm1(value),
      text = percent.toFixed(1);
    return minus(`${Number(text) > 0 ? "+" : ""}${Number(text) === 0 ? "0.0" : text}\u00a0%`);
  }
  const text = value !== 0 && Math.abs(value) < 0.001 ? value.toExponential(2) : String(Number(value.toPrecision(3)));
  return minus(scale === "difference" && value > 0 ? `+${text}` : text);
}

/** A q or p in words.
 * @param {number} q */
export const chance = (q) =>
  Number.isNaN(q) ? "–" : q < 0.001 ? q.toExponential(0) : String(Number(q.toPrecision(2)));

/** What a measure is called.
 * @param {any} quantity
 * @param {{condition: string, show: string}} measure */
export function called(quantity, { condition, show }) {
  const { against } = quantity.changes[condition] ?? {};
  const how =
    {
      change: ", change from the baseline",
      beyond: `, change beyond ${against === "no difference" ? "none" : against}`,
    }[show] ?? "";
  return `${quantity.words} (${condition})${how}`;
}

/** One head in words: value, interval, null and q.
 * @param {any} model
 * @param {any} made
 * @param {any} measure
 * @param {number} index */
export function said(model, made, measure, index) {
  const { layer, head } = headAt(model, index),
    value = made.value[index];
  const start = `layer ${layer} head ${head}\n${called(made.quantity, measure)}: `;
  if (Number.isNaN(value)) return `${start}none`;
  const parts = [
    `${shown(value, made.scale)} [${shown(made.low[index], made.scale)}, ${shown(made.high[index], made.scale)}]`,
  ];
  if (made.null && !Number.isNaN(made.null[index])) parts.push(`null ${shown(made.null[index], made.scale)}`);
  if (made.q) parts.push(`q = ${chance(made.q[index])}`);
  return `${start}${parts.join("; ")}; ${made.n} ${made.unit}`;
}

/** The name of what is shown, for a choice.
 * @param {string} show */
export const showWords = (show) => SHOWS[show];

/** A cell of CSV.
 * @param {any} value */
export function cell(value) {
  const text = value === null || value === undefined || Number.isNaN(value) ? "" : String(value).replace(/<br>/g, " ");
  return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** Give the reader a file.
 * @param {string} name
 * @param {string} type
 * @param {string} text */
export function save(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** Rows as a file of CSV.
 * @param {string} name
 * @param {any[][]} rows */
export const saveCsv = (name, rows) =>
  save(`${name}.csv`, "text/csv", rows.map((row) => row.map(cell).join(",")).join("\n"));

/** A title as the name of a file.
 * @param {string} title */
export const fileName = (title) =>
  title
    .toLowerCase()
    .replace(/[^a-z0-9]+/g, "-")
    .replace(/^-|-$/g, "")
    .slice(0, 100) || "figure";
