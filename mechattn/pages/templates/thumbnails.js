// @ts-check
// Every head's pattern on one prompt, small, as a map of heads: a click selects the head.

import { row } from "./data.js";
import { html } from "./drawing.js";
import { drawMap } from "./heads_map.js";
import { countsOf, opacityOf, weightAt } from "./patterns.js";

const SIDE = 24; // pixels of a head's picture, at most
const pictures = new WeakMap();

/** Draw the patterns of all heads on a prompt in the condition of the map, or say why there are none.
 * @param {HTMLElement} place
 * @param {HTMLElement} note
 * @param {any} model
 * @param {any} measurement What measured() returns, for the words of each head
 * @param {number} prompt
 * @param {any} selection As for drawMap() */
export function drawThumbnails(place, note, model, measurement, prompt, selection) {
  const patterns = model.patterns,
    subject = `prompt ${prompt}, ${selection.condition}`,
    pattern = patterns.prompts?.[prompt]?.[selection.condition];
  note.textContent = patterns.missing || `The page has no pattern of ${subject}.`;
  if (!pattern || !measurement) return place.replaceChildren();
  const pixelWords = pattern.tokens.length > SIDE ? " A pixel is the strongest of several pairs." : "";
  const hasOthers = patterns.prompts.length > 1;
  const otherWords = hasOthers ? " A click on the large pattern of another prompt shows that one." : "";
  const runWords = patterns.from_separate_run ? " of a separate run" : "";
  note.textContent = `${subject}${runWords}: ${countsOf(pattern)}.${pixelWords}${otherWords}`;
  const picture = pictureOf(model, pattern);
  drawMap(place, model, measurement, { ...selection, prefix: "thumb-", brushed: null, picture });
}

/** One picture of all heads' patterns, kept until the light changes. */
function pictureOf(model, pattern) {
  const { theme } = document.documentElement.dataset;
  if (pictures.get(pattern)?.theme !== theme)
    pictures.set(pattern, { theme, picture: painted(model, pattern).toDataURL() });
  return pictures.get(pattern).picture;
}

/** The patterns of all heads beside each other, each as many pixels wide as it has tokens, or SIDE. */
function painted(model, pattern) {
  const side = Math.min(SIDE, pattern.tokens.length),
    drawing = html("canvas", { width: side * model.heads, height: side * model.layers.length }),
    paint = drawing.getContext("2d");
  paint.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--without");
  model.patterns.layers.forEach((layer, at) => {
    const top = model.layers.indexOf(layer) * side;
    for (let head = 0; head < model.heads && top >= 0; head++)
      strongest(row(pattern.rows, at, head), pattern.tokens.length, side).forEach((weight, i) => {
        paint.globalAlpha = opacityOf(weight);
        paint.fillRect(head * side + (i % side), top + Math.floor(i / side), 1, 1);
      });
  });
  return drawing;
}

/** The largest weight of the pairs of tokens that fall on each pixel. */
function strongest(values, n, side) {
  const weights = new Float32Array(side * side),
    pixelOf = (token) => Math.floor((token * side) / n);
  for (let query = 0; query < n; query++)
    for (let key = 0; key <= query; key++) {
      const pixel = pixelOf(query) * side + pixelOf(key);
      weights[pixel] = Math.max(weights[pixel], weightAt(values, query, key));
    }
  return weights;
}
