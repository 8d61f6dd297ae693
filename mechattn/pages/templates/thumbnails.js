// @ts-check
// Every head's pattern on one prompt, small, as a map of heads: a click selects the head.

import { row } from "./data.js";
import { html } from "./drawing.js";
import { drawMap } from "./heads_map.js";
import { countsOf, share, weightAt } from "./patterns.js";

const SIDE = 24; // pixels of a head's picture, at most
const drawn = new WeakMap();

/** Draw the patterns of all heads on a prompt in the condition of the map, or say why there are none.
 * @param {HTMLElement} place
 * @param {HTMLElement} note
 * @param {any} model
 * @param {any} made What measured() gave, which each head's words are of
 * @param {number} prompt
 * @param {any} on As for drawMap() */
export function drawThumbnails(place, note, model, made, prompt, on) {
  const held = model.patterns,
    about = `prompt ${prompt}, ${on.condition}`,
    one = held.prompts?.[prompt]?.[on.condition];
  note.textContent = held.missing || `The page has no pattern of ${about}.`;
  if (!one || !made) return place.replaceChildren();
  const many = one.tokens.length > SIDE ? " A pixel is the strongest of several pairs." : "";
  const other = held.prompts.length > 1 ? " A click on the large pattern of another prompt shows that one." : "";
  const run = held.from_separate_run ? " of a separate run" : "";
  note.textContent = `${about}${run}: ${countsOf(one)}.${many}${other}`;
  drawMap(place, model, made, { ...on, prefix: "thumb-", brushed: null, picture: pictureOf(model, one) });
}

/** One picture of all heads' patterns, kept until the light changes. */
function pictureOf(model, one) {
  const { theme } = document.documentElement.dataset;
  if (drawn.get(one)?.theme !== theme) drawn.set(one, { theme, picture: painted(model, one).toDataURL() });
  return drawn.get(one).picture;
}

/** The patterns of all heads beside each other, each as many pixels wide as it has tokens, or SIDE. */
function painted(model, one) {
  const side = Math.min(SIDE, one.tokens.length),
    drawing = html("canvas", { width: side * model.heads, height: side * model.layers.length }),
    paint = drawing.getContext("2d");
  paint.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--without");
  model.patterns.layers.forEach((layer, at) => {
    const top = model.layers.indexOf(layer) * side;
    for (let head = 0; head < model.heads && top >= 0; head++)
      strongest(row(one.rows, at, head), one.tokens.length, side).forEach((weight, i) => {
        paint.globalAlpha = share(weight);
        paint.fillRect(head * side + (i % side), top + Math.floor(i / side), 1, 1);
      });
  });
  return drawing;
}

/** The largest weight of the pairs of tokens that fall on each pixel. */
function strongest(values, n, side) {
  const found = new Float32Array(side * side),
    at = (token) => Math.floor((token * side) / n);
  for (let query = 0; query < n; query++)
    for (let key = 0; key <= query; key++) {
      const pixel = at(query) * side + at(key);
      found[pixel] = Math.max(found[pixel], weightAt(values, query, key));
    }
  return found;
}
