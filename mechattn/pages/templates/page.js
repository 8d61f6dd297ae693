// @ts-check
// A page: what is chosen, in the address too, and everything that is drawn from it. It asks for nothing.

import { headAt, indexOf, measured, showsOf, squeezed } from "./data.js";
import { html } from "./drawing.js";
import { figures } from "./figures.js";
import { drawMap, drawScale, sureHeads } from "./heads_map.js";
import { columnsOf, drawTable, saveTable } from "./heads_table.js";
import { drawRoom } from "./room.js";
import { drawScatter, measuresOf } from "./scatter.js";
import { called, fileName, said, showWords } from "./words.js";

const FEW = 12;
const PICKED =
  "Changes are sorted by their size; a head selected as the largest on these prompts has an interval that is " +
  'too optimistic (select="half" in result.compare avoids this).';
/** @type {any[]} */
let models = [];
const part = (name) => /** @type {any} */ (document.getElementById(name));
const root = document.documentElement;
const state = { model: 0, layer: 0, head: 0, condition: "", show: "", quantity: "", beside: "", x: "", y: "" };
let brushed = null,
  prompt = 0,
  rows = FEW,
  sort = { by: "", down: true },
  redrawFigures = () => {};

const model = () => models[state.model];
const quantity = () => model().quantities.find((one) => one.name === state.quantity);

/** What the address says, as far as this page has it; else what there is. */
function fromAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const pick = (name, known, otherwise) =>
    known.includes(given.get(name)) ? given.get(name) : known.includes(state[name]) ? state[name] : otherwise;
  const asked = models.findIndex((one) => one.name === given.get("model"));
  if (asked >= 0) state.model = asked;
  const { conditions, quantities, start } = model();
  state.beside = pick(
    "beside",
    models.map(({ name }) => name),
    "",
  );
  if (state.beside === model().name) state.beside = "";
  state.quantity = pick(
    "quantity",
    quantities.map((one) => one.name),
    quantities[0].name,
  );
  state.condition = pick("condition", conditions, conditions[1] ?? conditions[0]);
  state.show = pick("show", showsOf(quantity(), state.condition), showsOf(quantity(), state.condition)[0] ?? "value");
  const [layer, head] = ["layer", "head"].map((name) =>
    given.get(name) === null ? state[name] : Number(given.get(name)),
  );
  const known = indexOf(model(), layer, head) >= 0;
  [state.layer, state.head] = known ? [layer, head] : start;
  const measures = measuresOf(model(), state.condition).map(key);
  state.x = pick("x", measures, measures[0]);
  state.y = pick("y", measures, measures[1] ?? measures[0]);
}

/** Put what is chosen into the address; a frame in a notebook has none that can be changed. */
function toAddress() {
  const words = new URLSearchParams({
    model: model().name,
    layer: String(state.layer),
    head: String(state.head),
    condition: state.condition,
    show: state.show,
    quantity: state.quantity,
    beside: state.beside,
    x: state.x,
    y: state.y,
  });
  try {
    history.replaceState(null, "", `#${words}`);
  } catch {
    /* an address that can't be changed */
  }
}

const key = (measure) => [measure.quantity, measure.condition, measure.show].join(" · ");
const fromKey = (text) => measuresOf(model(), state.condition).find((measure) => key(measure) === text);

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
  const shows = showsOf(quantity(), state.condition).map((show) => [show, showWords(show)]);
  const of = (name) => quantities.find((one) => one.name === name);
  const measures = measuresOf(model(), state.condition).map((one) => [key(one), called(of(one.quantity), one)]);
  const others = models.map(({ name }) => name).filter((name) => name !== model().name);
  fill("condition", alike(conditions), state.condition);
  const named = quantities.map((one) => [one.name, one.words]);
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
      tab.addEventListener("click", () => choose({ model: i }));
      return tab;
    }),
  );
  part("instrument").setAttribute("aria-labelledby", `model-${state.model}`);
}

/** Change what is chosen, and draw what hangs on it. */
function choose(change) {
  const focus = document.activeElement?.id,
    row = document.activeElement?.closest("#heads-table tr")?.getAttribute("data-i");
  if (change.model !== undefined && change.model !== state.model) brushed = null;
  Object.assign(state, change);
  sort = change.layer === undefined ? { by: "", down: true } : sort;
  history.replaceState && clearAddress();
  fromAddress();
  if (change.layer === undefined || change.model !== undefined) controls();
  draw();
  toAddress();
  if (row) /** @type {any} */ (document.querySelector(`#heads-table tr[data-i="${row}"] button`))?.focus();
  if (focus && change.layer === undefined) part(focus)?.focus();
}

/** The address says what was chosen before; it is written anew after the choice. */
function clearAddress() {
  try {
    history.replaceState(null, "", "#");
  } catch {
    /* an address that can't be changed */
  }
}

function draw() {
  const measure = { quantity: state.quantity, condition: state.condition, show: state.show },
    made = measured(model(), measure);
  const index = indexOf(model(), state.layer, state.head);
  const on = {
    index,
    brushed,
    choose: (i) => choose(headAt(model(), i)),
    brush: (heads) => {
      brushed = heads;
      draw();
    },
  };
  part("map-title").textContent = made ? called(made.quantity, measure) : "No such number";
  part("about").textContent = `${quantity().about} (${quantity().units}).`;
  if (made) {
    drawMap(part("map"), model(), made, measure, on);
    drawScale(part("scale"), made);
    part("said").textContent = `${said(model(), made, measure, index)}. ${sureHeads(model(), made)}`;
  }
  if (!made) part("map").replaceChildren(quantity().missing[state.condition] ?? "");
  drawBeside(measure);
  drawRoom(part("room"), model(), state.layer, state.head, state.condition);
  announce();
  if (part("scatter-part").open) drawScatter(part("scatter"), model(), [state.x, state.y].map(fromKey), on);
  table(on);
}

/** Tell the widget around the page, if any, what is chosen. */
function announce() {
  const { layer, head, condition, quantity } = state;
  const chosen = { selected: `L${layer}H${head}`, prompt, condition, quantity };
  if (parent !== window) parent.postMessage({ chosen }, "*");
}

/** Take what the widget selects, and the prompt whose pattern is clicked. */
function listenToWidget() {
  addEventListener("message", ({ source, data }) => {
    const [layer, head] = (source === parent && /^L(\d+)H(\d+)$/.exec(data?.select)?.slice(1).map(Number)) || [-1, -1];
    if ((layer !== state.layer || head !== state.head) && indexOf(model(), layer, head) >= 0) choose({ layer, head });
  });
  part("room").addEventListener("click", ({ target }) => {
    if (target.dataset.prompt) prompt = Number(target.dataset.prompt);
    if (target.dataset.prompt) announce();
  });
}

/** The same measure of another model; a click there goes over to it. */
function drawBeside(measure) {
  const other = models.findIndex((one) => one.name === state.beside),
    place = part("map-beside");
  const made = other < 0 ? undefined : measured(models[other], measure);
  if (!made) return place.replaceChildren(other < 0 ? "" : `${state.beside} does not have this quantity.`);
  const there = indexOf(models[other], state.layer, state.head),
    drawn = html("div"),
    scale = html("p", { className: "scale" });
  place.replaceChildren(html("p", { className: "note", textContent: state.beside }), drawn, scale);
  const over = (i) => choose({ model: other, beside: model().name, ...headAt(models[other], i) });
  drawMap(drawn, models[other], made, measure, { index: there, brushed: null, prefix: "beside-", choose: over });
  return drawScale(scale, made);
}

function table(on) {
  const columns = columnsOf(model(), quantity(), state.condition);
  const by = { beyond: "beyond", change: "difference", value: state.condition }[state.show];
  const now = sort.by ? sort : { by, down: true };
  const order = (name) => {
    sort = { by: name, down: now.by === name ? !now.down : name !== "layer" && name !== "q" };
    table(on);
    part(`by-${name}`)?.focus();
  };
  const count = drawTable(part("heads-table"), columns, { ...on, rows, sort: now, order });
  part("more-rows").hidden = count <= FEW;
  part("more-rows").textContent = rows > FEW ? "fewer heads" : `all ${count} heads`;
  const of = brushed ? `${count} brushed heads` : `${count} heads`;
  part("table-note").textContent = `${of}, ${quantity().words}, condition “${state.condition}”. ${PICKED}`;
}

function theme(name) {
  root.dataset.theme = name;
  if (models.length) draw();
  redrawFigures();
}

function listen() {
  for (const name of ["condition", "show", "quantity", "beside", "x", "y"])
    part(name).addEventListener("change", () => choose({ [name]: part(name).value }));
  part("scatter-part").addEventListener("toggle", draw);
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
      state,
      brushed,
    ),
  );
  part("models").addEventListener("keydown", (event) => {
    const to = { ArrowRight: state.model + 1, ArrowLeft: state.model - 1 }[event.key];
    if (to === undefined || !models[to]) return;
    choose({ model: to });
    part(`model-${to}`).focus();
  });
  addEventListener("hashchange", () => {
    fromAddress();
    controls();
    draw();
  });
  let wide = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== wide) draw();
    wide = innerWidth;
  });
}

/** Opens what the address points to, and what it stands in. */
function reveal() {
  const target = part(location.hash.slice(1));
  if (!target) return;
  for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  target.scrollIntoView();
}

async function start() {
  addEventListener("hashchange", reveal);
  reveal();
  const held = JSON.parse(await squeezed("data")).models;
  models = held.filter((one) => one.quantities.length);
  const preferred = matchMedia("(prefers-color-scheme: dark)");
  part("theme").addEventListener("click", () => theme(root.dataset.theme === "dark" ? "light" : "dark"));
  preferred.addEventListener("change", () => theme(preferred.matches ? "dark" : "light"));
  if (models[state.model]) {
    [state.layer, state.head] = model().start;
    fromAddress();
    controls();
    draw();
    listen();
    listenToWidget();
  } else {
    const why = held.flatMap((one) => Object.entries(one.lacking).map(([name, words]) => `${name}: ${words}`))[0];
    part("heads").replaceChildren(
      html("p", {
        className: "note",
        textContent: `There is no map of heads: ${why ?? "the run measured no numbers per head"}.`,
      }),
    );
  }
  redrawFigures = figures();
  root.dataset.ready = "yes";
}
start();
