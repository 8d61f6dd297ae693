// @ts-check
// The numbers of a page: packed arrays, and what the map shows of a quantity in a condition.

/** @typedef {{shape: number[], kind: "f4" | "f2" | "u2", data: string}} Packed */
/** @typedef {{quantity: string, condition: string, show: string}} Measure */

export const SHOWS = ["change", "value", "beyond"]; // a page opens with the first that a quantity has
const SCALE = 1024;
const unpackedArrays = new WeakMap();
/** @type {Float32Array | undefined} */
let halfNumbers;

/** The bytes of base64. This is a loop, since a call for each letter takes five times as long.
 * @param {string} text */
function bytesOf(text) {
  const letters = atob(text),
    bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

/** A text that the page holds compressed.
 * @param {string} name
 * @returns {Promise<string>} */
export async function squeezed(name) {
  const packed = document.querySelector(`script[data-packed="${name}"]`)?.textContent ?? "";
  return new Response(new Blob([bytesOf(packed)]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

/** Every half-precision number, by its bits. */
function halfTable() {
  if (halfNumbers) return halfNumbers;
  halfNumbers = new Float32Array(65536);
  for (let bits = 0; bits < 65536; bits++) {
    const exponent = (bits >> 10) & 31,
      fraction = bits & 1023,
      sign = bits >> 15 ? -1 : 1;
    halfNumbers[bits] =
      (sign *
        (exponent === 31
          ? fraction
            ? NaN
            : Infinity
          : exponent
            ? 2 ** (exponent - 15) * (1 + fraction / 1024)
            : 2 ** -14 * (fraction / 1024))) /
      SCALE;
  }
  return halfNumbers;
}

/** The numbers of a packed array, unpacked once.
 * @param {Packed} array
 * @returns {Float32Array | Uint16Array} */
export function numbers(array) {
  let values = unpackedArrays.get(array);
  if (values) return values;
  const bytes = bytesOf(array.data).buffer;
  if (array.kind === "f4") values = new Float32Array(bytes);
  else if (array.kind === "u2") values = new Uint16Array(bytes);
  else {
    const table = halfTable();
    values = Float32Array.from(new Uint16Array(bytes), (bits) => table[bits]);
  }
  unpackedArrays.set(array, values);
  return values;
}

/** The last axis of a packed array at some indices of the others.
 * @param {Packed} array
 * @param {number[]} indices */
export function row(array, ...indices) {
  const length = array.shape[array.shape.length - 1];
  const start = indices.reduce((sum, index, dim) => sum * array.shape[dim] + index, 0) * length;
  return numbers(array).subarray(start, start + length);
}

/** A number of each head; NaN if the page has no such array.
 * @param {Packed | null} array
 * @param {any} model
 * @returns {Float32Array} */
export function ofHeads(array, model) {
  if (array === null) return new Float32Array(model.layers.length * model.heads).fill(NaN);
  return /** @type {Float32Array} */ (numbers(array));
}

/** The ends of intervals from their middles and halves. */
const ends = (middle, half) => [middle.map((value, i) => value - half[i]), middle.map((value, i) => value + half[i])];

/** Whether the null (dilution or uniform attention) predicts a change of its own, which can be tested against.
 * @param {any} change */
const hasNull = (change) => change.known && !change.predicts_no_change;

/** What a page can show of a quantity in a condition.
 * @param {any} quantity
 * @param {string} condition */
export function showsOf(quantity, condition) {
  const change = quantity.changes[condition];
  if (!change) return quantity.values[condition] ? ["value"] : [];
  return SHOWS.filter((show) => show !== "beyond" || hasNull(change));
}

/** A number of every head with the ends of its interval, and how it is written.
 * @param {any} part
 * @param {string} middle
 * @param {string} half
 * @param {any} model
 * @param {string} scale */
function withEnds(part, middle, half, model, scale) {
  const value = ofHeads(part[middle], model),
    [low, high] = ends(value, ofHeads(part[half], model));
  return { value, low, high, scale };
}

/** A measure of every head, each array [layer · head], with the other measures of the same condition as its parts;
 * undefined if the result does not have it.
 * @param {any} model
 * @param {Measure} measure */
export function measured(model, { quantity: name, condition, show }) {
  const quantity = model.quantities.find((candidate) => candidate.name === name);
  if (!quantity || !showsOf(quantity, condition).includes(show)) return undefined;
  const values = quantity.values[condition],
    change = quantity.changes[condition];
  const part = show === "value" ? values : change;
  /** @type {Record<string, any>} */
  const parts = { value: withEnds(values, "mean", "half", model, "value") };
  if (change) parts.change = withEnds(change, "difference", "half", model, change.scale);
  if (change && hasNull(change)) {
    const scale = change.scale === "log-ratio" ? "ratio" : "difference";
    parts.beyond = { ...withEnds(change, "beyond", "beyond_half", model, scale), null_name: change.null_name };
  }
  const { value } = parts[show];
  return {
    ...{ quantity, condition, show, parts, n: part.n, unit: part.unit },
    ...parts[show],
    null: ofHeads(part.null, model),
    null_name: part.null_name ?? "uniform attention",
    ...testsOf(part, show, model),
    signed: show !== "value" || value.some((number) => number < 0),
  };
}

/** What a q tests, and which heads a map marks: those that differ, and of changes only those that are also large.
 * @param {any} part
 * @param {string} show
 * @param {any} model */
function testsOf(part, show, model) {
  if (show === "value") return { q: undefined, marked: undefined, tests: "no change" };
  if (show === "beyond") {
    const q = ofHeads(part.q_beyond, model);
    return { q, marked: q.map((number) => Number(number < 0.05)), tests: part.null_name };
  }
  const q = ofHeads(part.q_difference, model);
  const furtherColumns = { q_beyond: ofHeads(part.q_beyond, model), margin: part.margin };
  return { q, marked: ofHeads(part.marked, model), ...furtherColumns, tests: "no change" };
}

/** Which head an index is.
 * @param {any} model
 * @param {number} index */
export const headAt = (model, index) => ({
  layer: model.layers[Math.floor(index / model.heads)],
  head: index % model.heads,
});

/** The index of a head; -1 if the model has no such head.
 * @param {any} model
 * @param {number} layer
 * @param {number} head */
export function indexOf(model, layer, head) {
  const layerIndex = model.layers.indexOf(layer);
  return layerIndex < 0 || !(head >= 0 && head < model.heads) ? -1 : layerIndex * model.heads + head;
}
