// @ts-check
// A page: what is chosen, in the address too, and everything that is drawn from it. It asks for nothing.

import { asked, hashOf, key, refused, resolved, toAddress } from "./address.js";
import { headAt, indexOf, measured, showsOf, squeezed } from "./data.js";
import { html } from "./drawing.js";
import { figures } from "./figures.js";
import { drawMap, drawScale, strongest, sureHeads } from "./heads_map.js";
import { columnsOf, drawTable, saveTable } from "./heads_table.js";
import { drawRoom, opened } from "./room.js";
import { drawScatter, measuresOf } from "./scatter.js";
import { drawThumbnails } from "./thumbnails.js";
import { fileName, headWords, measureWords, showWords } from "./words.js";

const FEW = 12;
const PICKED =
  "A change in percent is a mean of ratios, one for each prompt; it is not the ratio of the two columns. " +
  "A head picked as the largest on these prompts has an interval that is too optimistic " +
  '(select="half" in result.compare avoids this).';
/** How to read a multiple of the null. */
const multiple = (name) => ` 2 × ${name}: twice as much of it is left as ${name} would leave.`;
/** @type {any[]} */
let models = [];
const part = (name) => /** @type {any} */ (document.getElementById(name));
const root = document.documentElement;
let wanted = asked(""), // what the reader asked for
  /** @type {any} */
  state = {}, // what this model shows of it
  brushed = null,
  prompt = 0,
  rows = FEW,
  sort = { by: "", down: true },
  redrawFigures = () => {};

const model = () => models[state.model];
const quantity = () => model().quantities.find((candidate) => candidate.name === state.quantity);
const fromKey = (text) => measuresOf(model(), state.condition).find((measure) => key(measure) === text);

/** Show what the address asks for, and say what the page does not have. */
function fromAddress() {
  wanted = asked(location.hash);
  state = resolved(models, wanted);
  part("refused").textContent = refused(models, wanted, state);
}

/** Fill a choice with values and their words. */
function fill(name, values, chosen) {
  part(name).replaceChildren(
    ...values.map(([value, words]) => html("option", { value, textContent: words, selected: value === chosen })),
  );
}

/** The choices, and what is chosen. */
function controls() {
  const { conditions, quantities } = model();
  const alike = (words) => words.map((word) => [word, word]);
  const words = (show) => showWords(quantity(), { condition: state.condition, show });
  const shows = showsOf(quantity(), state.condition).map((show) => [show, words(show)]);
  const wordsOf = (measure) => measureWords(quantities.find(({ name }) => name === measure.quantity), measure);
  const measures = measuresOf(model(), state.condition).map((measure) => [key(measure), wordsOf(measure)]);
  const others = models.map(({ name }) => name).filter((name) => name !== model().name);
  fill("condition", alike(conditions), state.condition);
  const named = quantities.map(({ name, words }) => [name, words]);
  fill("quantity", named, state.quantity);
  fill("show", shows, state.show);
  fill("beside", [["", "no other model"], ...alike(others)], state.beside);
  part("beside-part").hidden = models.length < 2;
  fill("x", measures, state.x);
  fill("y", measures, state.y);
  tabs();
}

/** A tab for each model. */
function tabs() {
  part("models").replaceChildren(
    ...models.map(({ name }, i) => {
      const tab = html("button", {
        type: "button",
        id: `model-${i}`,
        textContent: name,
        tabIndex: i === state.model ? 0 : -1,
      });
      tab.setAttribute("role", "tab");
      tab.setAttribute("aria-selected", String(i === state.model));
      tab.setAttribute("aria-controls", "instrument");
      tab.addEventListener("click", () => choose({ model: name }));
      return tab;
    }),
  );
  part("instrument").setAttribute("aria-labelledby", `model-${state.model}`);
}

/** Change what is chosen, and draw what depends on it. */
function choose(change, walked = false) {
  const focus = document.activeElement?.id,
    row = document.activeElement?.closest("#heads-table tr")?.getAttribute("data-i");
  if (change.model !== undefined && change.model !== model().name) brushed = null;
  const { layer, head } = state;
  wanted = { ...wanted, model: model().name, layer: String(layer), head: String(head), ...change };
  state = resolved(models, wanted);
  sort = change.layer === undefined ? { by: "", down: true } : sort;
  part("refused").textContent = "";
  if (change.layer === undefined || change.model !== undefined) controls();
  draw();
  toAddress(view(), walked);
  if (row) /** @type {any} */ (document.querySelector(`#heads-table tr[data-i="${row}"] button`))?.focus();
  if (focus && change.layer === undefined) part(focus)?.focus();
}

/** What is shown, as an address. What this model lacks stays as it was asked for. */
function view() {
  const filled = Object.entries(state).filter(([name]) => name !== "model" && (wanted[name] ?? "") === "");
  return { ...wanted, ...Object.fromEntries(filled), model: model().name };
}

function draw() {
  const measure = { quantity: state.quantity, condition: state.condition, show: state.show },
    measurement = measured(model(), measure);
  const index = indexOf(model(), state.layer, state.head);
  const other = models.find((candidate) => candidate.name === state.beside),
    beside = other && measured(other, measure);
  const most = measurement ? strongest(measurement, beside ?? measurement) : 1;
  const selection = {
    ...{ index, brushed, most },
    choose: (i, walked) => choose(headAt(model(), i), walked),
    brush: (heads) => {
      brushed = heads;
      draw();
    },
  };
  part("map-title").textContent = measurement ? measureWords(measurement.quantity, measure) : "No such number";
  const times = measurement?.scale === "ratio" ? multiple(measurement.null_name) : "";
  part("about").textContent = `${quantity().about} (${quantity().units}).${times}`;
  part("map-name").textContent = other ? model().name : "";
  if (measurement) {
    drawMap(part("map"), model(), measurement, selection);
    drawScale(part("scale"), measurement, most);
    part("said").textContent = `${headWords(model(), measurement, index)}. ${sureHeads(model(), measurement)}`;
  } else {
    part("map").replaceChildren(quantity().missing[state.condition] ?? "");
    for (const name of ["scale", "said"]) part(name).replaceChildren();
  }
  drawBeside(other, beside, most);
  drawRoom(part("room"), model(), state.layer, state.head, state.condition);
  if (part("thumbs-part").open) thumbnails(measurement, selection);
  if (part("scatter-part").open) drawScatter(part("scatter"), model(), [state.x, state.y].map(fromKey), selection);
  table(selection);
}

/** Every head's pattern; a click there also opens the large one. */
function thumbnails(measurement, selection) {
  const choose = (i, walked) => {
    opened.add("pattern");
    selection.choose(i, walked);
  };
  const ofThumbnails = { ...selection, condition: state.condition, choose };
  drawThumbnails(part("thumbs"), part("thumbs-note"), model(), measurement, prompt, ofThumbnails);
}

/** A click on a pattern selects its prompt. */
function listenToPatterns() {
  part("room").addEventListener("click", ({ target }) => {
    const pattern = target.closest("[data-prompt]");
    if (!pattern) return;
    prompt = Number(pattern.dataset.prompt);
    draw();
  });
}

/** The same measure of another model, on the same scale; a click there goes over to it. */
function drawBeside(other, measurement, most) {
  const place = part("map-beside");
  const refusal = other ? `${other.name} does not have this quantity in this condition.` : "";
  if (!measurement) return place.replaceChildren(refusal);
  const index = indexOf(other, state.layer, state.head),
    drawn = html("div");
  place.replaceChildren(html("p", { className: "note", textContent: `${other.name}, on the same scale` }), drawn);
  const chooseOther = (i, walked) => choose({ model: other.name, beside: model().name, ...headAt(other, i) }, walked);
  return drawMap(drawn, other, measurement, { index, brushed: null, most, prefix: "beside-", choose: chooseOther });
}

function table(selection) {
  const columns = columnsOf(model(), quantity(), state.condition),
    changed = columns.some(({ name, words }) => name === "change" && words) ? "change" : "difference";
  const by = { beyond: "beyond", change: changed, value: "value" }[state.show];
  const sorting = sort.by ? sort : { by, down: true };
  const order = (name) => {
    sort = { by: name, down: sorting.by === name ? !sorting.down : name !== "head" && !name.startsWith("q_") };
    table(selection);
    part(`by-${name}`)?.focus();
  };
  const drawn = drawTable(part("heads-table"), columns, { ...selection, rows, sort: sorting, order });
  part("more-rows").hidden = drawn.count <= FEW;
  part("more-rows").textContent = rows > FEW ? "fewer heads" : `all ${drawn.count} heads`;
  const heads = `${drawn.count}${brushed ? " brushed" : ""} heads`,
    subject = `${heads}, ${quantity().words}, condition “${state.condition}”`;
  part("table-note").textContent = `${subject}; ${drawn.by}. ${PICKED}`;
}

function theme(name) {
  root.dataset.theme = name;
  if (models.length) draw();
  redrawFigures();
}

function listen() {
  for (const name of ["condition", "show", "quantity", "beside", "x", "y"])
    part(name).addEventListener("change", () => choose({ [name]: part(name).value }));
  for (const name of ["scatter-part", "thumbs-part"]) part(name).addEventListener("toggle", draw);
  part("clear").addEventListener("click", () => {
    brushed = null;
    draw();
  });
  part("more-rows").addEventListener("click", () => {
    rows = rows > FEW ? FEW : Infinity;
    draw();
  });
  part("heads-csv").addEventListener("click", () =>
    saveTable(
      fileName(`${model().name} ${state.quantity} ${state.condition}`),
      columnsOf(model(), quantity(), state.condition),
      { quantity: quantity(), condition: state.condition },
      brushed,
    ),
  );
  part("models").addEventListener("keydown", (event) => {
    const to = { ArrowRight: state.model + 1, ArrowLeft: state.model - 1 }[event.key];
    if (to === undefined || !models[to]) return;
    choose({ model: models[to].name });
    part(`model-${to}`).focus();
  });
  part("copy").addEventListener("click", copyLink);
  let wide = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== wide) draw();
    wide = innerWidth;
  });
}

/** Give the reader the link to what is shown. */
async function copyLink() {
  const link = location.href.split("#")[0] + hashOf(view()),
    button = part("copy");
  try {
    await navigator.clipboard.writeText(link);
    button.textContent = "copied";
    setTimeout(() => (button.textContent = "copy link"), 2000);
  } catch {
    window.prompt("The link to this view:", link);
  }
}

/** A step back or forward, or a link within the page. */
function moved(/** @type {PopStateEvent} */ event) {
  if (models.length && /^#?$|=/.test(location.hash)) {
    fromAddress();
    controls();
    draw();
  }
  if (!event.state) reveal();
}

/** Opens what the address points to, and what it stands in, and goes there: a head's room, or a part by its name. */
function reveal() {
  const name = location.hash.slice(1),
    isRefused = part("refused").textContent !== "";
  const target = part(isRefused ? "refused" : /(^|&)(layer|head)=/.test(name) ? "room" : name);
  if (!target && name && !name.includes("=")) part("refused").textContent = `This page has no part “${name}”.`;
  if (!target) return;
  for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  target.scrollIntoView();
}

/** Draw the map of heads, or say why there is none. */
function drawHeads(data) {
  models = data.filter(({ quantities }) => quantities.length);
  part("loading").hidden = true;
  if (models.length) {
    part("instrument").hidden = false; // what is drawn takes its width from it
    part("copy").hidden = location.protocol === "about:"; // in a notebook
    fromAddress();
    controls();
    draw();
    listen();
    listenToPatterns();
    return;
  }
  const [reason] = data.flatMap(({ without_values }) =>
    Object.entries(without_values).map(([name, words]) => `${name}: ${words}`),
  );
  const words = `There is no map of heads: ${reason ?? "the run measured no numbers per head"}.`;
  part("heads").replaceChildren(html("p", { className: "note", textContent: words }));
}

async function start() {
  const preferred = matchMedia("(prefers-color-scheme: dark)");
  part("theme").addEventListener("click", () => theme(root.dataset.theme === "dark" ? "light" : "dark"));
  preferred.addEventListener("change", () => theme(preferred.matches ? "dark" : "light"));
  let before = root.dataset.theme ?? "light"; // paper is white, and as wide as page.css says
  addEventListener("beforeprint", () => {
    before = root.dataset.theme ?? "light";
    root.dataset.paper = "paper";
    theme("light");
  });
  addEventListener("afterprint", () => {
    delete root.dataset.paper;
    theme(before);
  });
  try {
    drawHeads(JSON.parse(await squeezed("data")).models);
  } catch (error) {
    part("loading").hidden = false;
    part("loading").textContent = `The numbers of this page cannot be shown: ${error}. A newer browser may help.`;
    throw error;
  }
  root.dataset.ready = "yes";
  addEventListener("popstate", moved);
  reveal();
  redrawFigures = figures();
}
start();
