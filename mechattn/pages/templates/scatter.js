// @ts-check
// A point for each head: one measure against another; a rectangle drawn with the mouse chooses heads on the map.

import { headAt, measured, showsOf } from "./data.js";
import { multipleTicks, percentTicks, svg, ticks, tip } from "./drawing.js";
import { formatted, measureWords } from "./words.js";

const BOX = { left: 78, right: 12, top: 10, bottom: 54, tall: 380 };

/** Every measure of a model in a condition and the baseline, as the choices of an axis.
 * @param {any} model
 * @param {string} condition */
export function measuresOf(model, condition) {
  return model.quantities.flatMap((quantity) =>
    ["baseline", ...(condition === "baseline" ? [] : [condition])].flatMap((name) =>
      showsOf(quantity, name).map((show) => ({ quantity: quantity.name, condition: name, show })),
    ),
  );
}

/** Draw the scatter.
 * @param {HTMLElement} place
 * @param {any} model
 * @param {any[]} measures Those of x and y
 * @param {{index: number, brushed: Set<number> | null, choose: (index: number) => void,
 *   brush: (heads: Set<number> | null) => void}} selection */
export function drawScatter(place, model, measures, selection) {
  const [a, b] = measures.map((measure) => measured(model, measure));
  if (!a || !b) return place.replaceChildren();
  const wide = Math.max(280, place.clientWidth),
    x = axis(a.value, BOX.left, wide - BOX.right),
    y = axis(b.value, BOX.tall - BOX.bottom, BOX.top);
  const names = [measureWords(a.quantity, measures[0]), measureWords(b.quantity, measures[1])];
  const plot = svg("svg", {
    viewBox: `0 0 ${wide} ${BOX.tall}`,
    role: "img",
    "aria-label": `Heads by ${names[0]} and ${names[1]}`,
  });
  plot.append(
    svg("rect", { class: "ground", x: 0, y: 0, width: wide, height: BOX.tall, fill: "transparent" }),
    ...axes(x, y, a, b, names, wide),
  );
  plot.append(...points(a, b, x, y, selection));
  plot.addEventListener("mousemove", (event) => tip(wordsAt(model, a, b, names, event), event));
  plot.addEventListener("mouseleave", () => tip(""));
  plot.addEventListener(
    "click",
    (event) =>
      /** @type {any} */ (event.target).dataset?.i !== undefined &&
      selection.choose(Number(/** @type {any} */ (event.target).dataset.i)),
  );
  brushing(plot, wide, selection, (box) => within(a.value, b.value, x, y, box));
  place.replaceChildren(plot);
}

/** A point for each head that has both numbers. */
function points(a, b, x, y, selection) {
  const circles = [];
  a.value.forEach((value, i) => {
    if (!Number.isFinite(value) || !Number.isFinite(b.value[i])) return;
    const isKept = !selection.brushed || selection.brushed.has(i),
      isChosen = i === selection.index;
    circles.push(
      svg("circle", {
        class: isKept ? "cell" : "cell out",
        "data-i": i,
        cx: x.at(value),
        cy: y.at(b.value[i]),
        r: isChosen ? 6 : 4,
        fill: !isKept ? "transparent" : isChosen ? "var(--with)" : "var(--without)",
        "fill-opacity": 0.75,
        stroke: isChosen ? "var(--ink)" : isKept ? "none" : "var(--without)",
      }),
    );
  });
  return circles;
}

/** The head at the mouse and its two numbers. */
function wordsAt(model, a, b, names, event) {
  const i = event.target.dataset?.i;
  if (i === undefined) return "";
  const { layer, head } = headAt(model, Number(i));
  const [first, second] = [a, b].map(({ value, scale }, k) => `${names[k]}: ${formatted(value[i], scale)}`);
  return `layer ${layer} head ${head}\n${first}\n${second}`;
}

/** From values to pixels. */
function axis(values, from, to) {
  const finiteValues = [...values].filter(Number.isFinite),
    low = Math.min(...finiteValues),
    high = Math.max(...finiteValues);
  const margin = 0.05 * (high - low) || 0.5,
    ends = [low - margin, high + margin];
  return { ends, at: (value) => from + ((to - from) * (value - ends[0])) / (ends[1] - ends[0]) };
}

function axes(x, y, a, b, names, wide) {
  const elements = [];
  const steps = ([low, high], scale) =>
    (({ "log-ratio": percentTicks, ratio: multipleTicks })[scale] ?? ticks)(low, high);
  for (const at of steps(x.ends, a.scale)) {
    elements.push(svg("line", { class: "grid", x1: x.at(at), x2: x.at(at), y1: BOX.top, y2: BOX.tall - BOX.bottom }));
    elements.push(
      svg(
        "text",
        { class: "quiet", x: x.at(at), y: BOX.tall - BOX.bottom + 15, "text-anchor": "middle" },
        formatted(at, a.scale),
      ),
    );
  }
  for (const at of steps(y.ends, b.scale)) {
    elements.push(svg("line", { class: "grid", x1: BOX.left, x2: wide - BOX.right, y1: y.at(at), y2: y.at(at) }));
    elements.push(
      svg("text", { class: "quiet", x: BOX.left - 6, y: y.at(at) + 4, "text-anchor": "end" }, formatted(at, b.scale)),
    );
  }
  const [right, down] = [(wide + BOX.left) / 2, (BOX.tall - BOX.bottom + BOX.top) / 2];
  elements.push(...title(names[0], wide - BOX.left, { x: right, y: BOX.tall - 20 }));
  elements.push(...title(names[1], BOX.tall - BOX.bottom, { x: 12, y: down, transform: `rotate(-90 12 ${down})` }));
  return elements;
}

/** The title of an axis, in two lines where one is too long for it. */
function title(name, room, at) {
  const [first, ...more] = 5.6 * name.length > room ? name.split(", ") : [name];
  const lines = more.length ? [`${first},`, more.join(", ")] : [first];
  return lines.map((line, i) =>
    svg("text", { class: "quiet", "text-anchor": "middle", ...at, y: at.y + 14 * i }, line),
  );
}

/** The heads inside a rectangle of pixels. */
function within(a, b, x, y, box) {
  const heads = new Set();
  a.forEach((value, i) => {
    const [px, py] = [x.at(value), y.at(b[i])];
    if (px >= box[0] && px <= box[2] && py >= box[1] && py <= box[3]) heads.add(i);
  });
  return heads;
}

/** A rectangle from where the mouse goes down to where it comes up. */
function brushing(plot, wide, selection, inside) {
  let start = null,
    frame = null;
  const at = (event) => {
    const box = plot.getBoundingClientRect();
    return [((event.clientX - box.left) * wide) / box.width, ((event.clientY - box.top) * BOX.tall) / box.height];
  };
  const box = (to) => [
    Math.min(start[0], to[0]),
    Math.min(start[1], to[1]),
    Math.max(start[0], to[0]),
    Math.max(start[1], to[1]),
  ];
  plot.addEventListener("pointerdown", (event) => {
    if (event.target.dataset.i !== undefined) return;
    start = at(event);
    frame = svg("rect", { class: "chosen" });
    plot.append(frame);
    plot.setPointerCapture(event.pointerId);
  });
  plot.addEventListener("pointermove", (event) => {
    if (!start) return;
    const [left, top, right, bottom] = box(at(event));
    for (const [name, value] of Object.entries({ x: left, y: top, width: right - left, height: bottom - top }))
      frame.setAttribute(name, value);
  });
  plot.addEventListener("pointerup", (event) => {
    if (!start) return;
    const drawn = box(at(event));
    start = null;
    selection.brush(drawn[2] - drawn[0] < 4 && drawn[3] - drawn[1] < 4 ? null : inside(drawn));
  });
}
