// @ts-check
// The attention pattern of a head on a few prompts: a map with the tokens at its edges, and its scale.

import { row } from "./data.js";
import { ground, html, svg, tip } from "./drawing.js";
import { formatted } from "./words.js";

const ROOM = 84, // for the tokens at the left and on top
  LETTERS = 11,
  STEPS = [0, 0.01, 0.1, 0.25, 0.5, 1];

/** Maps of a few prompts in the baseline and the condition.
 * @param {any} model
 * @param {number} layer
 * @param {number} head
 * @param {string} condition */
export function patterns(model, layer, head, condition) {
  const { missing, layers, prompts, from_separate_run } = model.patterns;
  if (missing) return note(missing);
  const layerIndex = layers.indexOf(layer);
  if (layerIndex < 0) return note(`The page has patterns only of layers ${layers.join(", ")}.`);
  const place = html("div", {}, scale());
  const hint = "Below each pattern, the token at the mouse or at the arrow keys shades what it attends to.";
  place.append(html("p", { className: "note asked", textContent: hint }));
  if (from_separate_run)
    place.append(note("From a separate run on a short prompt, with the number of inserted tokens shown."));
  prompts.forEach((prompt, number) => {
    for (const name of new Set(["baseline", condition])) {
      const promptPattern = prompt[name];
      const subject = `prompt ${number}, ${name}`;
      if (!promptPattern) place.append(note(`The page has no pattern of ${subject}.`));
      else {
        const counts = countsOf(promptPattern);
        const label = `Attention pattern of layer ${layer} head ${head}, ${subject}, ${counts}`;
        const drawn = pattern(promptPattern, layerIndex, head, label);
        drawn.dataset.prompt = String(number); // a click selects the prompt
        const words = `${subject}: ${counts}${number ? ", by their ids" : ""}; queries down, keys across`;
        const whole = html("div", { className: "whole" }, note(words), drawn);
        place.append(whole, ...attended(promptPattern.tokens, row(promptPattern.rows, layerIndex, head)));
      }
    }
  });
  return place;
}

/** A line in small print. */
const note = (words) => html("p", { className: "note", textContent: words });

/** The opacity of a weight: its root, so that small ones show.
 * @param {number} weight */
export const opacityOf = (weight) => Math.sqrt(weight);

/** How many tokens a pattern has, in words.
 * @param {any} promptPattern */
export const countsOf = ({ tokens, inserted }) => `${tokens.length} tokens, ${inserted} of them inserted`;

/** Colours and the weights that they stand for. */
function scale() {
  const boxes = STEPS.map((weight) => {
    const box = html("i");
    box.style.opacity = String(opacityOf(weight));
    return html("span", {}, html("b", {}, box), String(weight));
  });
  return html("p", { className: "weights" }, "attention of a query to a key ", ...boxes);
}

/** A map with the tokens that there is room for; the note at the mouse names each. */
function pattern(promptPattern, layerIndex, head, label) {
  const n = promptPattern.tokens.length,
    side = 440,
    size = (side - ROOM) / n,
    every = Math.ceil(9.5 / size);
  const map = svg("svg", { viewBox: `0 0 ${side} ${side}`, role: "img", "aria-label": label, class: "pattern" });
  const drawing = painted(n, row(promptPattern.rows, layerIndex, head));
  const box = { x: ROOM, y: ROOM, width: side - ROOM, height: side - ROOM };
  map.append(svg("image", { href: drawing.toDataURL(), preserveAspectRatio: "none", ...box }));
  map.append(svg("rect", { class: "frame", ...box }));
  for (let i = 0; i < n; i += every) {
    const at = ROOM + (i + 0.5) * size,
      token = promptPattern.tokens[i],
      text = token.length > LETTERS ? `${token.slice(0, LETTERS - 1)}…` : token;
    const turned = { transform: `translate(${at + 3} ${ROOM - 4}) rotate(-90)` };
    map.append(svg("text", { class: "quiet", x: ROOM - 4, y: at + 3, "text-anchor": "end" }, text));
    map.append(svg("text", { class: "quiet", ...turned }, text));
  }
  map.addEventListener("mousemove", (event) => {
    const at = map.getBoundingClientRect();
    const [key, query] = [event.clientX - at.left, event.clientY - at.top].map((pixels, axis) =>
      Math.floor(((pixels * side) / (axis ? at.height : at.width) - ROOM) / size),
    );
    tip(wordsAt(promptPattern, row(promptPattern.rows, layerIndex, head), query, key), event);
  });
  map.addEventListener("mouseleave", () => tip(""));
  return map;
}

/** The weight of a query and a key.
 * @param {ArrayLike<number>} values
 * @param {number} query
 * @param {number} key */
export const weightAt = (values, query, key) => values[(query * (query + 1)) / 2 + key] / 65535;

/** The tokens of a prompt: one at the mouse, or at the arrow keys, shades those that it attends to. */
function attended(tokens, values) {
  const said = html("p", { className: "note asked said-of-it" }),
    spans = tokens.map((text) => html("span", { textContent: text })),
    place = html("p", { className: "tokens asked", tabIndex: 0 }, ...spans);
  let asking = -1;
  const show = (query) => {
    asking = query;
    const weights = tokens.map((_, key) => (key <= query ? weightAt(values, query, key) : 0));
    spans.forEach((span, key) => {
      span.className = key === query ? "asking" : "";
      span.style.background = ground("without", opacityOf(weights[key]));
    });
    const most = weights.indexOf(Math.max(...weights)),
      [from, to] = [query, most].map((token) => `${token} “${tokens[token]}”`);
    said.textContent = `${from} attends most to ${to}: ${formatted(weights[most], "value")}`;
  };
  said.setAttribute("aria-live", "polite");
  place.setAttribute("role", "application");
  place.setAttribute("aria-label", "Tokens; the arrow keys show what each attends to");
  place.addEventListener("mouseover", ({ target }) => target !== place && show(spans.indexOf(target)));
  place.addEventListener("keydown", (event) => {
    const to = { ArrowRight: asking + 1, ArrowLeft: asking - 1 }[event.key];
    if (to === undefined || !tokens[to]) return;
    event.preventDefault();
    show(to);
  });
  return [place, said];
}

/** A query, a key and the weight between them. */
function wordsAt(promptPattern, values, query, key) {
  const { tokens } = promptPattern;
  if (!(key >= 0 && key <= query && query < tokens.length)) return "";
  return `${query} “${tokens[query]}” → ${key} “${tokens[key]}”: ${formatted(weightAt(values, query, key), "value")}`;
}

/** A pixel for each pair of tokens, darker for more attention. */
function painted(n, values) {
  const drawing = html("canvas", { width: n, height: n }),
    paint = drawing.getContext("2d");
  paint.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--without");
  for (let query = 0; query < n; query++) {
    for (let key = 0; key <= query; key++) {
      paint.globalAlpha = opacityOf(weightAt(values, query, key));
      paint.fillRect(key, query, 1, 1);
    }
  }
  return drawing;
}
