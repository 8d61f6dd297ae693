// @ts-check
// Received attention of one head by position: without and with the tokens on one axis, bands, nulls, segments.

import { row } from "./data.js";
import { html, svg, ticks, tip } from "./drawing.js";
import { formatted, saveCsv } from "./words.js";

const BOX = { left: 52, right: 8, top: 8, bottom: 34, tall: 250 };

/** The points of one line: places on the axis, means, half widths of their intervals relative to them, null and what it
 * is called (nothing where it is the line of the baseline itself), how many prompts.
 * @typedef {{name: string, colour: string, x: number[], mean: number[], half: number[], null: number[],
 *   null_name: string, n: number[]}} Line */

/** The lines of a head, without and with what is inserted; the axis counts the positions of the longer sequence.
 * @param {any} model
 * @param {number} layer Its index
 * @param {number} head
 * @param {string} condition
 * @returns {Line[]} */
export function linesOf(model, layer, head, condition) {
  const { curves } = model,
    inserted = curves.inserted[condition],
    shares = curves.shares[condition];
  const names = condition === "baseline" ? ["baseline"] : ["baseline", condition];
  const shift = (key) => (inserted && key >= inserted.start ? key + inserted.count : key);
  const baseline = [...row(curves.mean, model.conditions.indexOf("baseline"), layer, head)];
  return names.map((name) => {
    const conditionIndex = model.conditions.indexOf(name),
      isBaseline = name === "baseline";
    const mean = [...row(curves.mean, conditionIndex, layer, head)],
      half = [...row(curves.relative_half_width, conditionIndex, layer, head)];
    const line = {
      name,
      colour: isBaseline ? "var(--without)" : "var(--with)",
      x: mean.map((_, key) => shift(key)),
      mean,
      half,
      null: [...row(curves.null, conditionIndex, layer)],
      null_name: "uniform attention",
      n: [...row(curves.n, conditionIndex, layer)],
    };
    if (shares && isBaseline) Object.assign(line, { null: mean.map(() => NaN), null_name: "" });
    if (shares && !isBaseline) {
      const remainingShares = row(shares, layer, head);
      Object.assign(line, { null: baseline.map((value, key) => value * remainingShares[key]), null_name: "dilution" });
    }
    if (!inserted || isBaseline) return line;
    const insertedPart = {
      x: Array.from({ length: inserted.count }, (_, i) => inserted.start + i),
      mean: [...row(inserted.mean, layer, head)],
      half: [...row(inserted.relative_half_width, layer, head)],
      null: shares ? Array(inserted.count).fill(NaN) : [...row(inserted.null, layer)],
      n: Array(inserted.count).fill(curves.prompts),
    };
    for (const part of ["x", "mean", "half", "null", "n"]) line[part].splice(inserted.start, 0, ...insertedPart[part]);
    return line;
  });
}

/** The end of the y axis: at the largest value, without the first token's if that dwarfs all others.
 * @param {Line[]} lines */
function topOf(lines) {
  const largestFrom = (from) =>
    Math.max(
      ...lines.flatMap((line) =>
        line.mean.map((m, i) => Math.max(m * (1 + (line.half[i] || 0)) || 0, line.null[i] || 0)).slice(from),
      ),
    );
  const largest = largestFrom(0),
    largestOfRest = largestFrom(1),
    isDwarfed = largest > 2 * largestOfRest && largestOfRest > 0;
  return {
    top: 1.06 * (isDwarfed ? largestOfRest : largest || 1),
    cut: isDwarfed ? lines.map((line) => `${line.name} ${formatted(line.mean[0], "value")}`).join(", ") : "",
  };
}

/** Draw a head's curves.
 * @param {HTMLElement} place
 * @param {any} model
 * @param {number} layer Its index
 * @param {number} head
 * @param {string} condition */
export function drawCurves(place, model, layer, head, condition) {
  const lines = linesOf(model, layer, head, condition),
    { top, cut } = topOf(lines);
  const wide = Math.max(260, place.clientWidth),
    last = Math.max(...lines.flatMap((line) => line.x));
  const x = (at) => BOX.left + ((wide - BOX.left - BOX.right) * (at + 0.5)) / (last + 1);
  const y = (value) => BOX.tall - BOX.bottom - ((BOX.tall - BOX.top - BOX.bottom) * Math.min(value, top)) / top;
  const title = `Received attention by position, ${lines.map((line) => line.name).join(" and ")}`;
  const plot = svg("svg", { viewBox: `0 0 ${wide} ${BOX.tall}`, role: "img", "aria-label": title, class: "curves" });
  plot.append(...ground(model, condition, x, y, top, wide, last));
  for (const line of lines) plot.append(...drawn(line, x, y));
  plot.addEventListener("mousemove", (event) => tip(wordsAt(lines, plot, event, wide, last), event));
  plot.addEventListener("mouseleave", () => tip(""));
  place.replaceChildren(
    legend(lines),
    html("div", { className: "drawn" }, plot),
    html("p", { className: "note", textContent: noteOf(model, condition, cut, lines) }),
  );
}

/** Axes, segments, the inserted tokens and where the question starts. */
function ground(model, condition, x, y, top, wide, last) {
  const { curves } = model;
  const inserted = curves.inserted[condition];
  const shift = (key) => (inserted && key >= inserted.start ? key + inserted.count : key);
  const shaded = curves.segments
    .filter((_, i) => i % 2 === 0)
    .map(([name, from, to]) => [name, shift(from), shift(to)]);
  if (inserted) shaded.push([condition, inserted.start, inserted.start + inserted.count - 1]);
  const words = inserted ? "position in the sequence with the inserted tokens" : "original token position";
  const elements = shaded.flatMap(([name, from, to]) => shade(name, from, to, x));
  const note = (at, high, text, anchor = "middle") =>
    svg("text", { class: "quiet", x: at, y: high, "text-anchor": anchor }, text);
  for (const at of ticks(0, top)) {
    elements.push(svg("line", { class: "grid", x1: BOX.left, x2: wide - BOX.right, y1: y(at), y2: y(at) }));
    elements.push(note(BOX.left - 5, y(at) + 4, formatted(at, "value"), "end"));
  }
  elements.push(...ticks(0, last).map((at) => note(x(at), BOX.tall - BOX.bottom + 14, String(at))));
  elements.push(note((wide + BOX.left) / 2, BOX.tall - 4, words));
  if (curves.question !== null) {
    const at = x(shift(curves.question) - 0.5);
    elements.push(svg("line", { class: "start", x1: at, x2: at, y1: BOX.top, y2: BOX.tall - BOX.bottom }));
    elements.push(note(at + 4, BOX.top + 24, "question", "start"));
  }
  return elements;
}

/** A shaded stretch of positions, with its name where there is room for it. */
function shade(name, from, to, x) {
  const [left, right] = [x(from - 0.5), x(to + 0.5)];
  const box = { x: left, width: right - left, y: BOX.top, height: BOX.tall - BOX.top - BOX.bottom };
  const elements = [svg("rect", { class: "shade", ...box })];
  const middle = { class: "quiet", x: (left + right) / 2, y: BOX.top + 11, "text-anchor": "middle" };
  if (right - left > 6.5 * name.length) elements.push(svg("text", middle, name));
  return elements;
}

/** Paths of a line: its band, its null, itself; a gap where positions are left out. */
function drawn(line, x, y) {
  const path = (values) =>
    values.reduce((commands, value, i) => {
      if (!Number.isFinite(value)) return commands;
      const joined = i > 0 && Number.isFinite(values[i - 1]) && line.x[i] - line.x[i - 1] === 1;
      return `${commands}${joined ? "L" : "M"}${x(line.x[i]).toFixed(1)} ${y(value).toFixed(1)}`;
    }, "");
  const bands = line.mean
    .map((mean, i) => {
      if (!Number.isFinite(line.half[i]) || !Number.isFinite(mean)) return "";
      const [high, low] = [y(mean * (1 + line.half[i])), y(Math.max(0, mean * (1 - line.half[i])))],
        from = x(line.x[i] - 0.5),
        to = x(line.x[i] + 0.5);
      return `M${from.toFixed(1)} ${high.toFixed(1)}H${to.toFixed(1)}V${low.toFixed(1)}H${from.toFixed(1)}Z`;
    })
    .join("");
  const dots = path(line.null.map((value, i) => (Number.isNaN(line.mean[i]) ? NaN : value)));
  return [
    svg("path", { class: "band", d: bands, style: `fill:${line.colour}` }),
    ...(line.null_name ? [svg("path", { class: "null", d: dots, style: `stroke:${line.colour}` })] : []),
    svg("path", { class: "line", d: path(line.mean), style: `stroke:${line.colour}` }),
  ];
}

/** The names of the lines. */
function legend(lines) {
  const entry = (words, colour, dots) => {
    const mark = html("i", { className: dots ? "dots" : "" });
    mark.style.borderColor = colour;
    return html("span", {}, mark, words);
  };
  return html(
    "p",
    { className: "legend" },
    ...lines.flatMap((line) => [
      entry(line.name, line.colour, false),
      ...(line.null_name ? [entry(`${line.null_name}, ${line.name}`, line.colour, true)] : []),
    ]),
  );
}

/** What the lines are at the mouse. */
function wordsAt(lines, plot, event, wide, last) {
  const box = plot.getBoundingClientRect(),
    at = ((event.clientX - box.left) * wide) / box.width;
  const place = Math.round(((at - BOX.left) * (last + 1)) / (wide - BOX.left - BOX.right) - 0.5);
  const words = lines.flatMap((line) => {
    const i = line.x.indexOf(place);
    if (i < 0 || Number.isNaN(line.mean[i])) return [];
    const half = line.mean[i] * line.half[i],
      ends = Number.isNaN(half)
        ? ""
        : ` [${formatted(line.mean[i] - half, "value")}, ${formatted(line.mean[i] + half, "value")}]`;
    const ofNull = Number.isNaN(line.null[i]) ? "" : `, ${line.null_name} ${formatted(line.null[i], "value")}`;
    return [`${line.name}: ${formatted(line.mean[i], "value")}${ends}${ofNull}, n = ${line.n[i]}`];
  });
  return words.length ? [`position ${place}`, ...words].join("\n") : "";
}

const DOTTED = {
  dilution: "dilution (the original tokens keep their attention to each other; by segment)",
  "uniform attention": "uniform attention",
};

/** How to read the curves. */
function noteOf(model, condition, cut, lines) {
  const isNothingInserted = condition !== "baseline" && !model.curves.inserted[condition],
    dottedWords = DOTTED[lines[lines.length - 1].null_name];
  const parts = [
    `Bands: ${model.curves.bands}; dotted: ${dottedWords}; positions with too few prompts are left out.`,
    isNothingInserted
      ? "Only the original tokens are shown, as nothing is inserted, or at different positions in each prompt."
      : "",
    cut ? `The first token is beyond the axis: ${cut}.` : "",
  ];
  return parts.filter(Boolean).join(" ");
}

/** The numbers of a head's curves as CSV.
 * @param {string} name
 * @param {Line[]} lines */
export function saveCurves(name, lines) {
  const rows = lines.flatMap((line) =>
    line.x.map((x, i) => [
      line.name,
      x,
      line.mean[i],
      line.mean[i] * (1 - line.half[i]),
      line.mean[i] * (1 + line.half[i]),
      line.null[i],
      Number.isNaN(line.null[i]) ? "" : line.null_name,
      line.n[i],
    ]),
  );
  saveCsv(name, [["condition", "position", "received", "low", "high", "null", "null_is", "n"], ...rows]);
}
