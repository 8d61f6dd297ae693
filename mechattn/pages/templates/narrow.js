// @ts-check
// A figure for a narrow page: panels below each other, the legend under them, titles in as many lines as they need.

const PANEL = 270, // pixels of a panel with its title and its axis
  GAP = 92,
  LETTER = 6.6; // pixels

/** Words in lines of at most some letters. Line breaks that the text has stay.
 * @param {string} text
 * @param {number} letters */
export function wrapped(text, letters) {
  const lines = text.split("<br>").flatMap((line) => {
    const pieces = [""];
    for (const word of line.split(" ")) {
      const last = pieces[pieces.length - 1],
        longer = last ? `${last} ${word}` : word;
      if (longer.replace(/<[^>]*>/g, "").length > letters && last) pieces.push(word);
      else pieces[pieces.length - 1] = longer;
    }
    return pieces;
  });
  return lines.join("<br>");
}

/** The axes of a layout with their places, x and y of each panel together.
 * @param {any} layout */
function panelsOf(layout) {
  const axis = (name) => layout[name.replace(/^([xy])/, "$1axis")];
  return Object.keys(layout)
    .filter((name) => /^xaxis\d*$/.test(name) && layout[name].domain)
    .map((name) => ({ x: layout[name], y: axis(layout[name].anchor ?? "y") }))
    .filter(({ y }) => y?.domain && !y.overlaying);
}

/** From a panel's old place to its new one; panels go down line by line. */
function places(panels) {
  const starts = (axis, sign) => {
    const ofPanels = panels.map((panel) => panel[axis].domain[0]);
    return [...new Set(ofPanels)].sort((a, b) => sign * (a - b));
  };
  const [columns, rows] = [starts("x", 1), starts("y", -1)],
    count = columns.length * rows.length,
    gap = GAP / (count * PANEL),
    height = (1 - gap * (count - 1)) / count;
  return panels.map(({ x, y }) => {
    const index = rows.indexOf(y.domain[0]) * columns.length + columns.indexOf(x.domain[0]),
      top = 1 - index * (height + gap);
    return { old: { x: [...x.domain], y: [...y.domain] }, x: [0, 1], y: [Math.max(0, top - height), top], count };
  });
}

/** A note of the layout, moved along with the panel over which it stands. */
function moved(note, places) {
  if (note.xref !== "paper" || note.yref !== "paper") return note;
  const placesBelow = places.filter(({ old }) => note.x >= old.x[0] - 1e-6 && note.x <= old.x[1] + 1e-6);
  const distance = ({ old }) => Math.abs(note.y - old.y[1]);
  const [place] = placesBelow.sort((a, b) => distance(a) - distance(b));
  if (!place || distance(place) > 0.05) return note;
  const x = (note.x - place.old.x[0]) / (place.old.x[1] - place.old.x[0]);
  return { ...note, x, y: place.y[1] + (note.y - place.old.y[1]) };
}

/** Notes and titles of axes in lines that fit, and panels at their new places. */
function placed(layout, letters) {
  const panels = panelsOf(layout),
    newPlaces = places(panels),
    count = newPlaces[0]?.count ?? 1;
  const annotations = layout.annotations ?? [],
    notes = count > 1 ? annotations.map((note) => moved(note, newPlaces)) : annotations;
  panels.forEach(({ x, y }, i) => {
    if (count > 1) [x.domain, y.domain] = [newPlaces[i].x, newPlaces[i].y];
    if (x.title?.text) x.title.text = wrapped(x.title.text, letters - 10);
    if (y.title?.text) y.title.text = wrapped(y.title.text, 30);
  });
  return { count, annotations: notes.map((note) => ({ ...note, text: wrapped(note.text ?? "", letters - 8) })) };
}

/** A figure as it fits into some pixels.
 * @param {{data: any[], layout: any}} figure
 * @param {number} width */
export function narrowed({ data, layout: { legend2, ...layout } }, width) {
  const letters = Math.floor(width / LETTER),
    { count, annotations } = placed(layout, letters),
    text = wrapped((layout.title?.text ?? "").replace(/<br>/g, " "), letters - 6),
    lines = (words) => words.split("<br>").length,
    top = 26 + 17 * (lines(text) + Math.max(1, ...annotations.map((note) => lines(note.text)))),
    height = count > 1 ? count * PANEL + top + 60 : Math.max(layout.height ?? 450, 380);
  const container = { x: 0, xref: "container", y: 1, yref: "container", yanchor: "top", pad: { t: 14, l: 4 } };
  const below = { orientation: "h", x: 0, xref: "paper", y: -64 / (height - top - 60), yref: "paper", yanchor: "top" };
  const margin = { l: 62, r: 12, t: top, b: 60 };
  // Names that stood between two rows of panels go to the others, under all panels.
  const thin = ({ legend, ...trace }) =>
    trace.colorbar ? { ...trace, colorbar: { ...trace.colorbar, thickness: 10 } } : trace;
  const rest = { title: { ...layout.title, text, ...container }, legend: { ...layout.legend, ...below } };
  layout.sliders?.forEach((slider) => (slider.pad = { t: 96 }));
  return { data: data.map(thin), layout: { ...layout, annotations, height, margin, ...rest } };
}
