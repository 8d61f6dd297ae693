// @ts-check
// What a page shows, as its address says: read against what the page has, and written back as a step of the history.

import { SHOWS, indexOf, measured, showsOf } from "./data.js";
import { largest } from "./heads_map.js";
import { measuresOf } from "./scatter.js";

/** @typedef {{model: string, layer: string, head: string, condition: string, show: string, quantity: string,
 *   beside: string, x: string, y: string}} Asked What was asked for; a part that was not is empty */

const NAMES = ["model", "layer", "head", "condition", "show", "quantity", "beside", "x", "y"];
let isWalking = false;

/** A measure as one text.
 * @param {{quantity: string, condition: string, show: string}} measure */
export const key = (measure) => [measure.quantity, measure.condition, measure.show].join(" · ");

/** What an address asks for; a head may be written as in the tables, L1H2.
 * @param {string} hash
 * @returns {Asked} */
export function asked(hash) {
  const given = new URLSearchParams(hash.slice(1).replace(/head=L(\d+)H(\d+)/, "layer=$1&head=$2"));
  return /** @type {any} */ (Object.fromEntries(NAMES.map((name) => [name, given.get(name) ?? ""])));
}

/** The address of a view.
 * @param {Asked} view */
export const hashOf = (view) =>
  `#${new URLSearchParams(NAMES.filter((name) => view[name] !== "").map((name) => [name, String(view[name])]))}`;

/** Put a view into the address; heads walked over with the arrow keys are one step of the history. The frame of a
 * notebook has no address that can be changed.
 * @param {Asked} view
 * @param {boolean} walked */
export function toAddress(view, walked) {
  try {
    history[walked && isWalking ? "replaceState" : "pushState"]({ chosen: true }, "", hashOf(view));
  } catch {
    /* an address that can't be changed */
  }
  isWalking = walked;
}

/** What is shown of what was asked for. What this model lacks stays in the address, since another may have it.
 * @param {any[]} models
 * @param {Asked} view */
export function resolved(models, view) {
  const modelIndex = Math.max(
      0,
      models.findIndex((model) => model.name === view.model),
    ),
    model = models[modelIndex];
  const pick = (name, known, otherwise) => (known.includes(view[name]) ? view[name] : otherwise);
  const { conditions, quantities } = model;
  const names = quantities.map((candidate) => candidate.name),
    quantity = pick("quantity", names, names[0]),
    condition = pick("condition", conditions, firstCompared(conditions)),
    shows = showsOf(quantities[names.indexOf(quantity)], condition);
  const others = models.map((candidate) => candidate.name).filter((name) => name !== model.name);
  const measures = measuresOf(model, condition).map(key);
  return {
    ...{ model: modelIndex, quantity, condition, show: pick("show", shows, shows[0] ?? "value") },
    ...headOf(model, view),
    beside: pick("beside", others, ""),
    x: pick("x", measures, measures[0]),
    y: pick("y", measures, measures[1] ?? measures[0]),
  };
}

/** The first condition besides the baseline, or the baseline if there is no other. */
const firstCompared = (conditions) => conditions.find((name) => name !== "baseline") ?? conditions[0];

/** The head that was asked for; else the one that the page starts with, else the one that differs most. */
function headOf(model, view) {
  const [layer, head] = [view.layer, view.head].map((text) => (text === "" ? NaN : Number(text)));
  if (indexOf(model, layer, head) >= 0) return { layer, head };
  if (model.start) return { layer: model.start[0], head: model.start[1] };
  const [first] = model.quantities,
    condition = firstCompared(model.conditions);
  const measurement = measured(model, { quantity: first.name, condition, show: showsOf(first, condition)[0] });
  return measurement ? largest(measurement, model) : { layer: model.layers[0], head: 0 };
}

/** What an address asks for and this page does not have, in words; empty if it has all of it.
 * @param {any[]} models
 * @param {Asked} view
 * @param {any} shown What resolved() gave */
export function refused(models, view, shown) {
  const model = models[shown.model],
    absences = [];
  const known = {
    model: models.map((candidate) => candidate.name),
    condition: model.conditions,
    quantity: model.quantities.map((candidate) => candidate.name),
    show: SHOWS,
    beside: models.map((candidate) => candidate.name),
    ...{ x: measuresOf(model, shown.condition).map(key), y: measuresOf(model, shown.condition).map(key) },
  };
  for (const [name, choices] of Object.entries(known))
    if (view[name] !== "" && !choices.includes(view[name])) absences.push(`${name} “${view[name]}”`);
  const { layers, heads } = model,
    [layer, head] = [view.layer, view.head];
  if (layer + head !== "" && indexOf(model, layer === "" ? NaN : Number(layer), head === "" ? NaN : Number(head)) < 0)
    absences.push(`layer ${layer || "?"}, head ${head || "?"} (it has layers ${layers.join(", ")} and ${heads} heads)`);
  return absences.length ? `This page does not have what the link asks for: ${absences.join("; ")}.` : "";
}
