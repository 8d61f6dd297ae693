// @ts-check
// The map of heads: a cell for each, coloured by the chosen measure, marked where q < 0.05; or over a picture of each.

import { headAt } from "./data.js";
import { colour, html, reach, svg, tip } from "./drawing.js";
import { formatted, headWords, measureWords } from "./words.js";

const LEFT = 46,
  TOP = 32,
  WIDEST = 72, // pixels of a head's picture
  CLIPPED = 0.98;

/** Draw the map of a measure.
 * @param {HTMLElement} place
 * @param {any} model
 * @param {any} measurement What measured() returns
 * @param {{index: number, brushed: Set<number> | null, most: number, choose: (index: number, walked?: boolean) => void,
 *   prefix?: string, picture?: string}} selection With the size that has the strongest colour, the same on maps beside
 *   each other; or with one picture of all heads, in place of colours and marks */
export function drawMap(place, model, measurement, selection) {
  const { prefix = "", picture } = selection;
  if (picture) place.style.maxWidth = `${LEFT + WIDEST * model.heads}px`;
  const wide = Math.max(240, place.clientWidth),
    width = (wide - LEFT) / model.heads;
  const height = picture ? width : Math.max(11, Math.min(width, 30)),
    tall = TOP + height * model.layers.length;
  const focused = place.contains(document.activeElement);
  const shown = measureWords(measurement.quantity, measurement);
  const words = `Map of heads of ${model.name}, layers down and heads across: ${shown}`;
  const map = svg("svg", {
    viewBox: `0 0 ${wide} ${tall + 4}`,
    role: "grid",
    tabindex: 0,
    "aria-label": `${words}. Use the arrow keys to move between heads.`,
    "aria-activedescendant": `${prefix}head-${selection.index}`,
  });
  const size = { x: LEFT, y: TOP, width: wide - LEFT, height: tall - TOP };
  if (picture) map.append(svg("image", { href: picture, preserveAspectRatio: "none", ...size }));
  map.append(...lines(model, measurement, width, height, selection));
  map.append(...edges(model, width, height), ...names(wide, tall));
  if (!picture) map.append(...marks(model, measurement, width, height, selection.brushed));
  if (selection.index >= 0) {
    const { x, y } = corner(model, selection.index, width, height);
    map.append(svg("rect", { class: "chosen", x: x + 1, y: y + 1, width: width - 2, height: height - 2 }));
  }
  listen(map, model, measurement, selection);
  place.replaceChildren(map);
  if (focused) map.focus({ preventScroll: true });
}

/** A cell for each head, in rows of layers; one that the brush left out keeps its colour and becomes small. */
function lines(model, measurement, width, height, { index: chosen, brushed, most, prefix = "", picture }) {
  const cell = (index) => {
    const { x, y } = corner(model, index, width, height),
      isOut = brushed && !brushed.has(index),
      fill = colour(measurement.value[index] / most);
    const whole = svg("rect", {
      class: isOut ? "cell out" : "cell",
      id: `${prefix}head-${index}`,
      "data-i": index,
      role: "gridcell",
      "aria-label": headWords(model, measurement, index),
      "aria-selected": index === chosen,
      x: x + 0.5,
      y: y + 0.5,
      width: width - 1,
      height: height - 1,
      fill: isOut || picture ? "transparent" : fill,
      stroke: "var(--line)",
    });
    const side = 0.4 * Math.min(width, height),
      at = { x: x + (width - side) / 2, y: y + (height - side) / 2 };
    return isOut ? [whole, svg("rect", { class: "small", ...at, width: side, height: side, fill })] : [whole];
  };
  return model.layers.map((layer, i) => {
    const line = svg("g", { role: "row", "aria-label": `layer ${layer}` });
    line.append(...Array.from({ length: model.heads }, (_, head) => cell(i * model.heads + head)).flat());
    return line;
  });
}

const corner = (model, index, width, height) => ({
  x: LEFT + (index % model.heads) * width,
  y: TOP + Math.floor(index / model.heads) * height,
});

/** What the numbers at the edges are. */
function names(wide, tall) {
  const [x, y] = [(wide + LEFT) / 2, (tall + TOP) / 2];
  const across = svg("text", { class: "quiet", x, y: 11, "text-anchor": "middle" }, "head");
  const turned = { "text-anchor": "middle", transform: `rotate(-90 11 ${y})` };
  return [across, svg("text", { class: "quiet", x: 11, y, ...turned }, "layer")];
}

/** Numbers of layers and heads, as many as there is room for. */
function edges(model, width, height) {
  const headStep = Math.ceil(20 / width),
    layerStep = Math.ceil(13 / height),
    labels = [];
  for (let head = 0; head < model.heads; head += headStep) {
    labels.push(
      svg(
        "text",
        { class: "quiet", x: LEFT + (head + 0.5) * width, y: TOP - 4, "text-anchor": "middle" },
        String(head),
      ),
    );
  }
  for (let i = 0; i < model.layers.length; i += layerStep) {
    labels.push(
      svg(
        "text",
        { class: "quiet", x: LEFT - 5, y: TOP + (i + 0.5) * height + 4, "text-anchor": "end" },
        String(model.layers[i]),
      ),
    );
  }
  return labels;
}

/** A dot on each head that differs by more than the margin, among those that the brush took. */
function marks(model, measurement, width, height, brushed) {
  const dots = [];
  measurement.marked?.forEach((isMarked, index) => {
    if (isMarked !== 1 || (brushed && !brushed.has(index))) return;
    const { x, y } = corner(model, index, width, height);
    dots.push(svg("circle", { class: "mark", cx: x + width / 2, cy: y + height / 2, r: Math.min(2.6, width / 7) }));
  });
  return dots;
}

/** Mouse and keyboard. */
function listen(map, model, measurement, selection) {
  const at = (event) => (event.target.dataset?.i === undefined ? -1 : Number(event.target.dataset.i));
  const wordsAt = (index) => (index < 0 ? "" : headWords(model, measurement, index));
  map.addEventListener("mousemove", (event) => tip(wordsAt(at(event)), event));
  map.addEventListener("mouseleave", () => tip(""));
  map.addEventListener("click", (event) => at(event) >= 0 && selection.choose(at(event)));
  map.addEventListener("keydown", (event) => {
    const { heads } = model,
      last = heads * model.layers.length - 1;
    const to = {
      ArrowLeft: selection.index - 1,
      ArrowRight: selection.index + 1,
      ArrowUp: selection.index - heads,
      ArrowDown: selection.index + heads,
      Home: 0,
      End: last,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    if (to >= 0 && to <= last) selection.choose(to, true);
  });
}

/** The colours of the scale, what stands at its ends, and what a dot says.
 * @param {HTMLElement} place
 * @param {any} measurement
 * @param {number} most */
export function drawScale(place, measurement, most) {
  const bar = document.createElement("i"),
    stops = measurement.signed ? [-1, 0, 1] : [0, 1],
    unit = measurement.scale === "ratio" ? ` ${measurement.null_name}` : "",
    end = (value) => `${formatted(value, measurement.scale)}${unit}`;
  bar.style.background = `linear-gradient(90deg, ${stops.map(colour).join(",")})`;
  const larger = measurement.margin ? `,${byMoreThan(measurement)}` : "";
  const tests = `differs from ${measurement.tests}${larger}, q < 0.05 (Benjamini-Hochberg over the heads of the map)`;
  const beyond = reach(measurement.value) > most; // the strongest colours stand for more than the end says
  const sign = (value) => (beyond && value !== 0 ? (value < 0 ? "≤\u00a0" : "≥\u00a0") : "");
  const ends = [measurement.signed ? -most : 0, most].map((value) =>
    html("span", { textContent: `${sign(value)}${end(value)}` }),
  );
  const dot = html("span", { className: "dot", textContent: measurement.q ? `○ ${tests}` : "" });
  place.replaceChildren(ends[0], bar, ends[1], dot);
}

/** The size that has the strongest colour, the same on some maps: 98 of 100 heads have less, so that a few do not
 * leave all others pale.
 * @param {...any} maps What measured() returns */
export function strongest(...maps) {
  const values = maps.flatMap((measurement) => [...measurement.value]);
  const sizes = values.filter(Number.isFinite).map(Math.abs).sort((a, b) => a - b);
  const clipped = sizes[Math.ceil(CLIPPED * sizes.length) - 1];
  return clipped > 0 ? clipped : reach(sizes);
}

/** The margin in words; of ratios it is a fraction. */
function byMoreThan({ margin, scale }) {
  const words = formatted(margin, scale === "log-ratio" ? "fraction" : scale);
  return ` by more than ${words.replace("+", "")}`;
}

/** How many heads are marked, for those who don't see the map.
 * @param {any} model
 * @param {any} measurement */
export function sureHeads(model, measurement) {
  if (!measurement.q) return "";
  const sure = [...measurement.marked].filter((isMarked) => isMarked === 1).length;
  const larger = measurement.margin ? byMoreThan(measurement) : "";
  return `${sure} of ${model.layers.length * model.heads} heads differ from ${measurement.tests}${larger} (q < 0.05)`;
}

/** The head with the largest size.
 * @param {any} measurement
 * @param {any} model */
export function largest(measurement, model) {
  let best = 0;
  measurement.value.forEach((value, i) => {
    if (!(Math.abs(measurement.value[best]) >= Math.abs(value)) && !Number.isNaN(value)) best = i;
  });
  return headAt(model, best);
}
