// @ts-check
// The map of heads: a cell for each, coloured by the chosen measure, marked where q < 0.05.

import { headAt } from "./data.js";
import { colour, reach, svg, tip } from "./drawing.js";
import { called, said, shown } from "./words.js";

const LEFT = 30,
  TOP = 16;

/** Draw the map of a measure.
 * @param {HTMLElement} place
 * @param {any} model
 * @param {any} made What measured() gave
 * @param {any} measure
 * @param {{index: number, brushed: Set<number> | null, choose: (index: number) => void, prefix?: string}} on */
export function drawMap(place, model, made, measure, on) {
  const wide = Math.max(240, place.clientWidth),
    width = (wide - LEFT) / model.heads;
  const height = Math.max(11, Math.min(width, 30)),
    tall = TOP + height * model.layers.length;
  const focused = place.contains(document.activeElement);
  const { prefix = "" } = on;
  const words = `Map of heads of ${model.name}, layers down and heads across: ${called(made.quantity, measure)}`;
  const map = svg("svg", {
    viewBox: `0 0 ${wide} ${tall + 4}`,
    role: "grid",
    tabindex: 0,
    "aria-label": `${words}. Use the arrow keys to move between heads.`,
    "aria-activedescendant": `${prefix}head-${on.index}`,
  });
  map.append(...lines(model, made, measure, width, height, on));
  map.append(...edges(model, width, height), ...marks(model, made, width, height));
  if (on.index >= 0) {
    const { x, y } = corner(model, on.index, width, height);
    map.append(svg("rect", { class: "chosen", x: x + 1, y: y + 1, width: width - 2, height: height - 2 }));
  }
  listen(map, model, made, measure, on);
  place.replaceChildren(map);
  if (focused) map.focus({ preventScroll: true });
}

/** A cell for each head, in rows of layers. */
function lines(model, made, measure, width, height, { index: chosen, brushed, prefix = "" }) {
  const most = reach(made.value);
  const cell = (index) => {
    const { x, y } = corner(model, index, width, height);
    return svg("rect", {
      class: brushed && !brushed.has(index) ? "cell dim" : "cell",
      id: `${prefix}head-${index}`,
      "data-i": index,
      role: "gridcell",
      "aria-label": said(model, made, measure, index),
      "aria-selected": index === chosen,
      x: x + 0.5,
      y: y + 0.5,
      width: width - 1,
      height: height - 1,
      fill: colour(made.value[index] / most),
      stroke: "var(--line)",
    });
  };
  return model.layers.map((layer, i) => {
    const line = svg("g", { role: "row", "aria-label": `layer ${layer}` });
    line.append(...Array.from({ length: model.heads }, (_, head) => cell(i * model.heads + head)));
    return line;
  });
}

const corner = (model, index, width, height) => ({
  x: LEFT + (index % model.heads) * width,
  y: TOP + Math.floor(index / model.heads) * height,
});

/** Numbers of layers and heads, as many as there is room for. */
function edges(model, width, height) {
  const every = Math.ceil(20 / width),
    down = Math.ceil(13 / height),
    found = [];
  for (let head = 0; head < model.heads; head += every) {
    found.push(
      svg(
        "text",
        { class: "quiet", x: LEFT + (head + 0.5) * width, y: TOP - 4, "text-anchor": "middle" },
        String(head),
      ),
    );
  }
  for (let i = 0; i < model.layers.length; i += down) {
    found.push(
      svg(
        "text",
        { class: "quiet", x: LEFT - 5, y: TOP + (i + 0.5) * height + 4, "text-anchor": "end" },
        String(model.layers[i]),
      ),
    );
  }
  return found;
}

/** A dot on each head with q < 0.05. */
function marks(model, made, width, height) {
  const found = [];
  made.q?.forEach((q, index) => {
    if (!(q < 0.05)) return;
    const { x, y } = corner(model, index, width, height);
    found.push(svg("circle", { class: "mark", cx: x + width / 2, cy: y + height / 2, r: Math.min(2.6, width / 7) }));
  });
  return found;
}

/** Mouse and keyboard. */
function listen(map, model, made, measure, on) {
  const at = (event) => (event.target.dataset?.i === undefined ? -1 : Number(event.target.dataset.i));
  map.addEventListener("mousemove", (event) => tip(at(event) < 0 ? "" : said(model, made, measure, at(event)), event));
  map.addEventListener("mouseleave", () => tip(""));
  map.addEventListener("click", (event) => at(event) >= 0 && on.choose(at(event)));
  map.addEventListener("keydown", (event) => {
    const { heads } = model,
      last = heads * model.layers.length - 1;
    const to = {
      ArrowLeft: on.index - 1,
      ArrowRight: on.index + 1,
      ArrowUp: on.index - heads,
      ArrowDown: on.index + heads,
      Home: 0,
      End: last,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    if (to >= 0 && to <= last) on.choose(to);
  });
}

/** The colours of the scale and what stands at its ends.
 * @param {HTMLElement} place
 * @param {any} made */
export function drawScale(place, made) {
  const most = reach(made.value),
    low = made.signed ? -most : 0;
  const bar = document.createElement("i"),
    stops = made.signed ? [-1, 0, 1] : [0, 1];
  bar.style.background = `linear-gradient(90deg, ${stops.map(colour).join(",")})`;
  const dots = made.q ? " ○ q < 0.05 (Benjamini-Hochberg, the map)" : "";
  place.replaceChildren(shown(low, made.scale), bar, shown(most, made.scale), dots);
}

/** How many heads are marked, for those who don't see the map.
 * @param {any} model
 * @param {any} made */
export function sureHeads(model, made) {
  const sure = made.q ? [...made.q].filter((q) => q < 0.05).length : 0;
  return made.q ? `${sure} of ${model.layers.length * model.heads} heads at q < 0.05` : "";
}

/** The index of the largest size.
 * @param {any} made
 * @param {any} model */
export function largest(made, model) {
  let best = 0;
  made.value.forEach((value, i) => {
    if (Math.abs(value) > Math.abs(made.value[best])) best = i;
  });
  return headAt(model, best);
}
