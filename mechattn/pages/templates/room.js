// @ts-check
// The room of one head: its curves, its other quantities, the first prompt's text, its pattern on a few prompts.

import { indexOf, measured, row } from "./data.js";
import { drawCurves, linesOf, saveCurves } from "./curves.js";
import { COLOURS, ground, html } from "./drawing.js";
import { patterns } from "./patterns.js";
import { endsOf, fileName, formatted, formattedQ, save } from "./words.js";

export const opened = new Set(["curves"]); // the parts that the reader has opened stay open from head to head

/** Draw the room of a head.
 * @param {HTMLElement} place
 * @param {any} model
 * @param {number} layer
 * @param {number} head
 * @param {string} condition */
export function drawRoom(place, model, layer, head, condition) {
  const layerIndex = model.layers.indexOf(layer),
    curves = html("div", { className: "curves-part" });
  place.replaceChildren(html("h3", { textContent: `Layer ${layer}, head ${head}` }), curves);
  if (model.curves.missing) curves.append(html("p", { className: "note", textContent: model.curves.missing }));
  else {
    drawCurves(curves, model, layerIndex, head, condition);
    place.append(files(curves, model, layer, head, condition));
  }
  const parts = [
    ["Its other quantities", "quantities", () => quantities(model, indexOf(model, layer, head), condition)],
    [
      "The first prompt, coloured by the attention that each token receives",
      "text",
      () => texts(model, layerIndex, head, condition),
    ],
    ["Its pattern on a few prompts", "pattern", () => patterns(model, layer, head, condition)],
  ];
  place.append(...parts.map(([title, name, draw]) => part(title, name, draw)));
}

/** A part that is drawn when it is opened. */
function part(title, name, draw) {
  const details = html("details", {}, html("summary", { textContent: title }));
  details.dataset.part = name;
  const fill = () => details.open && details.childElementCount === 1 && details.append(draw());
  details.open = opened.has(name);
  details.addEventListener("toggle", () => {
    opened[details.open ? "add" : "delete"](name);
    fill();
  });
  fill();
  return details;
}

/** CSV and SVG of the curves. */
function files(curves, model, layer, head, condition) {
  const name = fileName(`${model.name} layer ${layer} head ${head} ${condition}`);
  const csv = html("button", { type: "button", textContent: "CSV" }),
    drawing = html("button", { type: "button", textContent: "SVG" });
  csv.addEventListener("click", () => saveCurves(name, linesOf(model, model.layers.indexOf(layer), head, condition)));
  drawing.addEventListener("click", () =>
    save(`${name}.svg`, "image/svg+xml", standalone(curves.querySelector("svg"))),
  );
  return html("p", { className: "actions" }, csv, drawing);
}

/** A drawing with its colours in it, on white. */
function standalone(drawing) {
  const copy = drawing.cloneNode(true),
    light = {
      "--with": COLOURS.map.light[2],
      "--without": COLOURS.map.light[1],
      "--line": "#d8d8d4",
      "--quiet": "#555",
      "--ink": "#1c1c1c",
      "--shade": "rgba(120,120,120,.14)",
    };
  const style =
    "text{font:11px sans-serif;fill:#555}.line{fill:none;stroke-width:1.7}.band{opacity:.22}.grid{stroke:#d8d8d4}" +
    ".null{fill:none;stroke-width:1.2;stroke-dasharray:2 3}.start{stroke:#555;stroke-dasharray:5 3}" +
    ".shade{fill:rgba(120,120,120,.14)}";
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  const sheet = document.createElementNS("http://www.w3.org/2000/svg", "style");
  sheet.textContent = style;
  copy.prepend(sheet);
  return Object.entries(light).reduce(
    (text, [name, value]) => text.replaceAll(`var(${name})`, value),
    new XMLSerializer().serializeToString(copy),
  );
}

/** A table of every quantity of the head. */
function quantities(model, index, condition) {
  const compared = condition !== "baseline",
    names = ["quantity", "baseline", ...(compared ? [condition, "change", "q"] : [])];
  const rows = model.quantities.map((quantity) => rowOf(model, quantity, index, condition));
  const header = html("tr", {}, ...names.map((words) => html("th", { scope: "col", textContent: words })));
  const table = html("table", {}, html("thead", {}, header), html("tbody", {}, ...rows));
  const note = "q tests the change against no change.";
  const place = html("div", { className: "wide", tabIndex: 0 }, table);
  return compared ? html("div", {}, place, html("p", { className: "note", textContent: note })) : place;
}

/** A quantity of the head: its means, its change with the interval below it, and q. */
function rowOf(model, quantity, index, condition) {
  const measurementOf = (name, show) => measured(model, { quantity: quantity.name, condition: name, show });
  const value = (name) => (quantity.values[name] ? formatted(measurementOf(name, "value").value[index], "value") : "–");
  const cells = [quantity.words, value("baseline")].map((words) => html("td", { textContent: words })),
    change = measurementOf(condition, "change");
  if (condition !== "baseline") cells.push(html("td", { textContent: value(condition) }));
  if (change) {
    const ends = html("span", { className: "ends", textContent: endsOf(change, index) });
    cells.push(html("td", {}, formatted(change.value[index], change.scale), ends));
    cells.push(html("td", { textContent: formattedQ(change.q[index]) }));
  }
  return html("tr", { title: `${quantity.about} (${quantity.units})` }, ...cells);
}

/** The first prompt without and with what is inserted, both on one scale. */
function texts(model, layer, head, condition) {
  const { tokens, received, missing } = model.texts,
    place = html("div");
  const names = condition === "baseline" ? ["baseline"] : ["baseline", condition];
  const values = names.map((name) => (received ? [...row(received[name], layer, head)] : []));
  const top =
    values
      .flat()
      .filter(Number.isFinite)
      .sort((a, b) => b - a)[1] || 1;
  if (missing) place.append(html("p", { className: "note", textContent: missing }));
  names.forEach((name, i) => {
    const spans = tokens[name].map(([text, segment], at) => {
      const value = values[i][at],
        span = html("span", {
          textContent: text,
          title:
            value === undefined
              ? segment
              : Number.isNaN(value)
                ? `${segment}: no counted query comes after it`
                : `${segment}: ${formatted(value, "value")}`,
        });
      if (!received) span.className = segment;
      else span.style.background = ground("with", value / top);
      return span;
    });
    place.append(html("p", { className: "note", textContent: name }), html("p", { className: "tokens" }, ...spans));
  });
  return place;
}
