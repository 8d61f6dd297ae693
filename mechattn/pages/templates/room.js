// @ts-check
// The room of one head: its curves, its other quantities, the first prompt's text, its pattern on a few prompts.

import { indexOf, measured, row } from "./data.js";
import { drawCurves, linesOf, saveCurves } from "./curves.js";
import { html, tip } from "./drawing.js";
import { chance, fileName, save, shown } from "./words.js";

const opened = new Set(["curves"]); // which parts the reader has opened stays so from head to head

/** Draw the room of a head.
 * @param {HTMLElement} place
 * @param {any} model
 * @param {number} layer
 * @param {number} head
 * @param {string} condition */
export function drawRoom(place, model, layer, head, condition) {
  const at = model.layers.indexOf(layer),
    curves = html("div", { className: "curves-part" });
  place.replaceChildren(html("h3", { textContent: `Layer ${layer}, head ${head}` }), curves);
  if (model.curves.missing) curves.append(html("p", { className: "note", textContent: model.curves.missing }));
  else {
    drawCurves(curves, model, at, head, condition);
    place.append(files(curves, model, layer, head, condition));
  }
  const parts = [
    ["Its other quantities", "quantities", () => quantities(model, indexOf(model, layer, head), condition)],
    [
      "The first prompt, coloured by the attention that each token receives",
      "text",
      () => texts(model, at, head, condition),
    ],
    ["Its pattern on a few prompts", "pattern", () => patterns(model, layer, head, condition)],
  ];
  place.append(...parts.map(([title, name, draw]) => part(title, name, draw)));
}

/** A part that is drawn when it is opened. */
function part(title, name, draw) {
  const made = html("details", {}, html("summary", { textContent: title }));
  made.dataset.part = name;
  const fill = () => made.open && made.childElementCount === 1 && made.append(draw());
  made.open = opened.has(name);
  made.addEventListener("toggle", () => {
    opened[made.open ? "add" : "delete"](name);
    fill();
  });
  fill();
  return made;
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
      "--with": "#d55e00",
      "--without": "#0072b2",
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
  const head = ["quantity", "baseline", ...(condition === "baseline" ? [] : [condition, "change", "null", "q"])];
  const rows = model.quantities.map((quantity) => {
    const of = (name, show) => measured(model, { quantity: quantity.name, condition: name, show });
    const value = (name) => (quantity.values[name] ? shown(of(name, "value").value[index], "value") : "–"),
      change = of(condition, "change");
    const cells = [quantity.words, value("baseline")];
    if (condition !== "baseline") cells.push(value(condition));
    if (change) {
      const [middle, low, high, none] = ["value", "low", "high", "null"].map((name) =>
        shown(change[name][index], change.scale),
      );
      cells.push(`${middle} [${low}, ${high}]`, none, chance(change.q[index]));
    }
    const made = html(
      "tr",
      { title: `${quantity.about} (${quantity.units})` },
      ...cells.map((words) => html("td", { textContent: words })),
    );
    return made;
  });
  const header = html("tr", {}, ...head.map((words) => html("th", { scope: "col", textContent: words })));
  return html(
    "div",
    { className: "wide", tabIndex: 0 },
    html("table", {}, html("thead", {}, header), html("tbody", {}, ...rows)),
  );
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
        made = html("span", {
          textContent: text,
          title:
            value === undefined
              ? segment
              : Number.isNaN(value)
                ? `${segment}: no counted query comes after it`
                : `${segment}: ${shown(value, "value")}`,
        });
      if (!received) made.className = segment;
      else made.style.background = `color-mix(in srgb, var(--with) ${strength(value, top)}%, transparent)`;
      return made;
    });
    place.append(html("p", { className: "note", textContent: name }), html("p", { className: "tokens" }, ...spans));
  });
  return place;
}

/** How strong a token's ground is, in percent; as much as leaves the words on it readable. */
function strength(value, top) {
  const most = document.documentElement.dataset.theme === "dark" ? 45 : 75;
  return Math.round(most * Math.min(1, (value || 0) / top));
}

/** Maps of a few prompts in the baseline and the condition. */
function patterns(model, layer, head, condition) {
  const held = model.patterns,
    at = held.missing ? -1 : held.layers.indexOf(layer);
  if (at < 0)
    return html("p", {
      className: "note",
      textContent: held.missing || `The page holds patterns only of layers ${held.layers.join(", ")}.`,
    });
  const place = html("div");
  if (held.apart)
    place.append(note("From a separate run on a short prompt, with the number of inserted tokens shown."));
  held.prompts.forEach((prompt, number) => {
    for (const name of new Set(["baseline", condition])) {
      const one = prompt[name];
      const about = `prompt ${number}, ${name}`;
      if (!one) place.append(note(`The page has no pattern of ${about}.`));
      else {
        const counts = `${one.tokens.length} tokens, ${one.inserted} of them inserted`;
        const label = `Attention pattern of layer ${layer} head ${head}, ${about}, ${counts}`;
        const drawn = pattern(one, at, head, label);
        drawn.dataset.prompt = String(number); // a click selects the prompt
        place.append(note(`${about}: ${counts}; queries down, keys across`), drawn);
      }
    }
  });
  return place;
}

/** A line in small print. */
const note = (words) => html("p", { className: "note", textContent: words });

/** One map, a pixel a pair of tokens, darker for more. */
function pattern(held, layer, head, label) {
  const n = held.tokens.length,
    values = row(held.rows, layer, head),
    size = Math.max(2, Math.floor(380 / n));
  const drawing = html("canvas", { width: n * size, height: n * size });
  drawing.setAttribute("role", "img");
  drawing.setAttribute("aria-label", label);
  const paint = drawing.getContext("2d"),
    style = getComputedStyle(document.documentElement);
  const at = (query, key) => values[(query * (query + 1)) / 2 + key] / 65535;
  paint.fillStyle = style.getPropertyValue("--without");
  for (let query = 0; query < n; query++) {
    for (let key = 0; key <= query; key++) {
      paint.globalAlpha = Math.sqrt(at(query, key));
      paint.fillRect(key * size, query * size, size, size);
    }
  }
  drawing.addEventListener("mousemove", (event) => {
    const box = drawing.getBoundingClientRect(),
      [key, query] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height].map((share) =>
        Math.floor(share * n),
      );
    tip(
      key >= 0 && key <= query && query < n
        ? `${query} “${held.tokens[query]}” → ${key} “${held.tokens[key]}”: ${shown(at(query, key), "value")}`
        : "",
      event,
    );
  });
  drawing.addEventListener("mouseleave", () => tip(""));
  return drawing;
}
