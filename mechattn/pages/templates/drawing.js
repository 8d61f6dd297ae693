// @ts-check
// Colours, elements of SVG, and the note beside the mouse.

/** @type {any} */
export const COLOURS = /*COLOURS*/ {};

/** An element of SVG with attributes and children.
 * @param {string} name
 * @param {Record<string, any>} attributes
 * @param {...(Node | string)} children
 * @returns {any} */
export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value));
  element.append(...children);
  return element;
}

/** An element of HTML with properties and children.
 * @param {string} name
 * @param {Record<string, any>} properties
 * @param {...(Node | string)} children
 * @returns {any} */
export function html(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

/** The colour of a share of the scale's reach: −1 to 1, or 0 to 1.
 * @param {number} share */
export function colour(share) {
  if (Number.isNaN(share)) return "none";
  const [ground, less, more] = COLOURS.map[document.documentElement.dataset.theme === "dark" ? "dark" : "light"].map(
    (/** @type {string} */ hex) => [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16)),
  );
  const end = share < 0 ? less : more,
    weight = Math.min(1, Math.abs(share));
  return `rgb(${ground.map((from, i) => Math.round(from + weight * (end[i] - from))).join(",")})`;
}

/** The background of a word, pale enough to leave it readable.
 * @param {string} name A colour of page.css
 * @param {number} share From 0 to 1 */
export function ground(name, share) {
  const most = document.documentElement.dataset.theme === "dark" ? 45 : 75;
  return `color-mix(in srgb, var(--${name}) ${Math.round(most * Math.min(1, share || 0))}%, transparent)`;
}

/** The largest absolute value, or 1 if there is none above 0.
 * @param {ArrayLike<number>} values */
export function reach(values) {
  let largest = 0;
  for (let i = 0; i < values.length; i++) if (Math.abs(values[i]) > largest) largest = Math.abs(values[i]);
  return largest || 1;
}

/** Round numbers of an axis from low to high, six at most.
 * @param {number} low
 * @param {number} high */
export function ticks(low, high) {
  const leastStep = (high - low) / 5 || 1,
    power = 10 ** Math.floor(Math.log10(leastStep));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= leastStep) || 10 * power;
  const values = [];
  for (let at = Math.ceil(low / step); at * step <= high * (1 + 1e-9); at++)
    values.push(Number((at * step).toPrecision(10)));
  return values;
}

/** Log-ratios of an axis that are round as percentages, or as multiples.
 * @param {(logRatio: number) => number} toShown
 * @param {(shown: number) => number} toLogRatio */
const logTicks = (toShown, toLogRatio) => (/** @type {number} */ low, /** @type {number} */ high) =>
  ticks(toShown(low), toShown(high))
    .map(toLogRatio)
    .filter((logRatio) => logRatio >= low && logRatio <= high);
export const percentTicks = logTicks(Math.expm1, Math.log1p);
export const multipleTicks = logTicks(Math.exp, Math.log);

/** The note beside the mouse, or at the foot of a phone's screen (page.css). Without words it is hidden.
 * @param {string} words
 * @param {MouseEvent} [event] */
export function tip(words, event) {
  const note = /** @type {HTMLElement} */ (document.getElementById("tip"));
  note.hidden = !words || !event;
  if (!words || !event) return;
  note.textContent = words;
  const { scrollX, scrollY, innerWidth } = window,
    noteWidth = note.offsetWidth;
  note.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - noteWidth - 12)) + scrollX}px`;
  note.style.top = `${event.clientY + 16 + scrollY}px`;
}
