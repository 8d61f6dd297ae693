// @ts-check
// Numbers as text, and files.

import { headAt } from "./data.js";

const minus = (/** @type {string} */ text) => text.replace(/-/g, "\u2212");

/** A number as text: to three digits, as a change with its sign, or as a multiple.
 * @param {number | undefined} value
 * @param {string} scale "value" or "difference"; "fraction" and "log-ratio", written in percent; "ratio", a log-ratio
 *   written as a multiple */
export function formatted(value, scale) {
  if (value === undefined || Number.isNaN(value)) return "–";
  if (scale === "log-ratio" || scale === "fraction") {
    const percent = 100 * (scale === "fraction" ? value : Math.expm1(value)),
      text = percent.toFixed(1);
    return minus(`${Number(text) > 0 ? "+" : ""}${Number(text) === 0 ? "0.0" : text}\u00a0%`);
  }
  if (scale === "ratio") {
    const times = Math.exp(value);
    return `${times >= 0.1 && times < 100 ? times.toFixed(2) : String(Number(times.toPrecision(2)))}\u00a0×`;
  }
  const text = value !== 0 && Math.abs(value) < 0.001 ? value.toExponential(2) : String(Number(value.toPrecision(3)));
  return minus(scale === "difference" && value > 0 ? `+${text}` : text);
}

/** A q or p in words.
 * @param {number} q */
export const formattedQ = (q) =>
  Number.isNaN(q) ? "–" : q < 0.001 ? q.toExponential(0) : String(Number(q.toPrecision(2)));

/** The ends of an interval in brackets, without the sign "×" after each.
 * @param {any} part
 * @param {number} index */
export const endsOf = (part, index) =>
  `[${[part.low, part.high].map((end) => formatted(end[index], part.scale).replace("\u00a0×", "")).join(", ")}]`;

/** A number with its interval.
 * @param {any} part
 * @param {number} index */
export const withInterval = (part, index) => {
  const unit = part.scale === "ratio" ? ` ${part.null_name}` : "";
  return `${formatted(part.value[index], part.scale)}${unit} ${endsOf(part, index)}`;
};

/** What is shown of a quantity in a condition, in words.
 * @param {any} quantity
 * @param {{condition: string, show: string}} measure */
export function showWords(quantity, { condition, show }) {
  if (show === "value") return "value in the condition";
  if (show === "change") return "change from the baseline";
  const { scale, null_name } = quantity.changes[condition] ?? {};
  return scale === "log-ratio" ? `change relative to ${null_name}` : `change minus that of ${null_name}`;
}

/** The name of a measure.
 * @param {any} quantity
 * @param {{condition: string, show: string}} measure */
export function measureWords(quantity, measure) {
  const showSuffix = measure.show === "value" ? "" : `, ${showWords(quantity, measure)}`;
  return `${quantity.words} (${measure.condition})${showSuffix}`;
}

/** One head in words: its value or change, that under the null, the one relative to the other, and what q tests.
 * @param {any} model
 * @param {any} measurement What measured() returns
 * @param {number} index */
export function headWords(model, measurement, index) {
  const { layer, head } = headAt(model, index),
    { parts } = measurement;
  const start = `layer ${layer} head ${head}\n${measurement.quantity.words} (${measurement.condition}): `;
  if (Number.isNaN(measurement.value[index])) return `${start}none`;
  const phrases = [],
    nullValue = measurement.null[index],
    nullScale = parts[measurement.q ? "change" : "value"].scale;
  if (!measurement.q) phrases.push(withInterval(parts.value, index));
  else phrases.push(`change ${withInterval(parts.change, index)}`);
  const besideNull = measurement.show === "beyond" || !measurement.q;
  if (besideNull && !Number.isNaN(nullValue))
    phrases.push(`under ${measurement.null_name} ${formatted(nullValue, nullScale)}`);
  if (measurement.show === "beyond")
    phrases.push(`${parts.beyond.scale === "ratio" ? "" : "less that: "}${withInterval(parts.beyond, index)}`);
  if (measurement.q) phrases.push(`q = ${formattedQ(measurement.q[index])} against ${measurement.tests}`);
  return `${start}${phrases.join("; ")}; ${measurement.n} ${measurement.unit}`;
}

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
