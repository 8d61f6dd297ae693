// @ts-check
// The other figures of a page, by plotly: drawn when they are opened, light or dark; CSV and SVG of each.

import { squeezed } from "./data.js";
import { COLOURS } from "./drawing.js";
import { narrowed } from "./narrow.js";
import { fileName, saveCsv } from "./words.js";

const NARROW = 620; // pixels, below which panels don't fit beside each other
const ON_PAPER = 0.75; // the size of a figure there, as in page.css
const CONFIG = { displaylogo: false, responsive: true };
const ON_A_PHONE = { ...CONFIG, displayModeBar: false }; // the bar would lie on the small print
/** @type {Promise<void> | undefined} */
let loading;

/** Run plotly's script, which the page holds packed; once. */
function load() {
  loading ??= (async () => {
    const script = document.createElement("script");
    script.textContent = await squeezed("plotly");
    document.head.append(script);
  })();
  return loading;
}

/** The library, once it is loaded. */
const plotly = () => /** @type {any} */ (window).Plotly;

/** A figure from its JSON, its colours those of a dark ground where it is dark. */
function spec(text, dark) {
  const figure = JSON.parse(
    dark ? Object.entries(COLOURS.figures).reduce((t, [light, on]) => t.replaceAll(light, on), text) : text,
  );
  if (!dark) return figure;
  const { layout } = figure;
  Object.assign(layout, { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)" });
  layout.font = { ...layout.font, color: "#e6e6e3" };
  const lines = { gridcolor: "#343a42", zerolinecolor: "#4a525c", linecolor: "#4a525c" };
  for (const part of [layout, layout.template.layout]) {
    for (const name of ["xaxis", "yaxis", ...Object.keys(part).filter((key) => /^[xy]axis\d/.test(key))]) {
      part[name] = { ...part[name], ...lines };
    }
  }
  layout.sliders?.forEach((slider) => Object.assign(slider, { bgcolor: "#343a42", activebgcolor: "#79b0ee" }));
  return figure;
}

const plain = (text) =>
  String(text)
    .replace(/<[^>]*>/g, " ")
    .replace(/&lt;/g, "<")
    .replace(/&gt;/g, ">")
    .replace(/&amp;/g, "&")
    .trim();
const entryAt = (list, i) => (Array.isArray(list) || ArrayBuffer.isView(list) ? list[i] : undefined);

/** What the panel of a trace is called: the title above it and the words under its axis. */
function panelName(plot, trace) {
  const layout = plot._fullLayout,
    [x, y] = [trace.xaxis ?? "x", trace.yaxis ?? "y"].map((name) => layout[name.replace(/^([xy])/, "$1axis")]);
  if (!x?.domain) return "";
  const above = (layout.annotations ?? []).filter(
    (note) =>
      note.xref === "paper" && note.yref === "paper" && note.x >= x.domain[0] - 0.001 && note.x <= x.domain[1] + 0.001,
  );
  const nearest = above.sort((a, b) => Math.abs(a.y - y.domain[1]) - Math.abs(b.y - y.domain[1]))[0];
  return [nearest?.text, x.title?.text].filter(Boolean).map(plain).join(", ");
}

/** The numbers of a drawn figure as rows. */
export function rows(plot) {
  const table = [["panel", "series", "x", "y", "z", "low", "high", "more"]];
  for (const trace of plot._fullData) {
    if (trace.fill === "toself") continue; // the outline of a band, whose ends stand with its line
    const panel = panelName(plot, trace),
      names = Array.isArray(trace.meta) ? trace.meta : [];
    const add = (x, y, z, extra, low, high) => {
      const columns = { x, low, high },
        otherValues = [];
      names.forEach((name, k) => {
        const value = names.length > 1 ? entryAt(extra, k) : extra;
        if (name in columns) columns[name] = value;
        else if (value !== undefined) otherValues.push(`${name}=${value}`);
      });
      table.push([panel, trace.name, columns.x, y, z, columns.low, columns.high, otherValues.join("; ")]);
    };
    if (trace.z) {
      trace.z.forEach((row, j) =>
        [...row].forEach((z, i) =>
          add(entryAt(trace.x, i) ?? i, entryAt(trace.y, j) ?? j, z, entryAt(entryAt(trace.customdata, j), i)),
        ),
      );
      continue;
    }
    const bars = trace.error_y?.visible ? trace.error_y : {};
    [...(trace.y ?? [])].forEach((y, i) => {
      const up = entryAt(bars.array, i),
        down = bars.symmetric === false ? entryAt(bars.arrayminus, i) : up;
      add(
        entryAt(trace.x, i),
        y,
        undefined,
        entryAt(trace.customdata, i),
        down === undefined ? undefined : y - down,
        up === undefined ? undefined : y + up,
      );
    });
  }
  return table;
}

/** Titles as names of files, each its own. */
function names(figures) {
  const counts = new Map();
  return figures.map((figure) => {
    const name = fileName(figure.parentElement.querySelector("summary").textContent),
      count = (counts.get(name) ?? 0) + 1;
    counts.set(name, count);
    return count > 1 ? `${name}-${count}` : name;
  });
}

/** What a figure is drawn for: paper, where it cannot be scrolled, or a narrow or wide screen. */
const form = (figure) =>
  document.documentElement.dataset.paper ?? (figure.clientWidth < NARROW ? "narrow" : "wide");

/** Draw a figure of an opened part. */
async function draw(figure) {
  const plot = figure.querySelector(".plot"),
    theme = document.documentElement.dataset.theme;
  if (!plot.childElementCount) plot.textContent = "Drawing …";
  figure.dataset.form = form(figure);
  await load();
  const wide = spec(figure.querySelector("script").textContent, theme === "dark");
  const { data, layout } = form(figure) === "narrow" ? narrowed(wide, figure.clientWidth) : wide;
  if (form(figure) === "paper") layout.width = figure.clientWidth / ON_PAPER;
  if (!plot.querySelector(".main-svg")) plot.textContent = "";
  plot.style.height = `${layout.height ?? 450}px`;
  await plotly().react(plot, data, layout, form(figure) === "narrow" ? ON_A_PHONE : CONFIG);
  // What was drawn on paper keeps its width until it is told.
  if (form(figure) !== "paper" && plot._fullLayout.width < plot.clientWidth - 1) await plotly().Plots.resize(plot);
  figure.dataset.drawn = theme;
}

/** Everything that is open and not yet drawn in this light and this form. */
function drawOpen() {
  for (const part of document.querySelectorAll("details.section[open]")) {
    part
      .querySelectorAll(":scope > figure")
      .forEach(
        (/** @type {any} */ figure) =>
          (figure.dataset.drawn !== document.documentElement.dataset.theme ||
            figure.dataset.form !== form(figure)) &&
          draw(figure),
      );
  }
}

/** Listen for parts that are opened, and for their buttons. Gives what draws again in another light. */
export function figures() {
  const elements = /** @type {HTMLElement[]} */ ([...document.querySelectorAll("details.section > figure")]),
    fileNames = names(elements);
  document.querySelectorAll("details.section").forEach((part) => part.addEventListener("toggle", drawOpen));
  elements.forEach((figure, i) =>
    figure.querySelectorAll("[data-do]").forEach((/** @type {any} */ button) =>
      button.addEventListener("click", () => {
        const plot = figure.querySelector(".plot");
        if (button.dataset.do === "csv") return saveCsv(fileNames[i], rows(plot));
        // For paper, so always on white.
        const { data, layout } = spec(figure.querySelector("script").textContent, false);
        const size = { width: Math.max(720, plot.clientWidth), height: layout.height ?? 450 };
        return plotly().downloadImage({ data, layout }, { format: "svg", filename: fileNames[i], ...size });
      }),
    ),
  );
  addEventListener("resize", drawOpen);
  drawOpen();
  return drawOpen;
}
