// Draws the figures of a page from their JSON, light or dark, and gives each as CSV and SVG. It asks for nothing.
(() => {
  "use strict";
  const root = document.documentElement;
  const preferred = matchMedia("(prefers-color-scheme: dark)");
  const figures = [...document.querySelectorAll("figure")].filter((figure) => figure.querySelector(".plot")).map((figure) => ({
    figure,
    plot: figure.querySelector(".plot"),
    text: figure.querySelector("script[type='application/json']").textContent,
    title: figure.closest("section").querySelector("h2").textContent,
  }));
  const DARK = /*COLOURS*/ {};
  const config = { displaylogo: false, responsive: true };

  function spec(text, dark) {
    const made = JSON.parse(dark ? Object.entries(DARK).reduce((t, [light, on]) => t.replaceAll(light, on), text) : text);
    if (!dark) return made;
    const { layout } = made;
    Object.assign(layout, { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)" });
    layout.font = { ...layout.font, color: "#e6e6e3" };
    const lines = { gridcolor: "#343a42", zerolinecolor: "#4a525c", linecolor: "#4a525c" };
    for (const part of [layout, layout.template.layout]) {
      for (const name of ["xaxis", "yaxis", ...Object.keys(part).filter((key) => /^[xy]axis\d/.test(key))]) {
        part[name] = { ...part[name], ...lines };
      }
    }
    layout.sliders?.forEach((slider) => Object.assign(slider, { bgcolor: "#343a42", activebgcolor: "#79b0ee" }));
    return made;
  }

  function draw(at = 0) {  // one after the other, so that the first can be looked at while the others come
    if (at >= figures.length) return root.setAttribute("data-drawn", figures.length);
    const { plot, text } = figures[at];
    const { data, layout } = spec(text, root.dataset.theme === "dark");
    Plotly.react(plot, data, layout, config);
    setTimeout(draw, 0, at + 1);
  }

  function theme(name) {
    root.removeAttribute("data-drawn");
    root.dataset.theme = name;
    draw();
  }

  const cell = (value) => {
    const text = value === null || value === undefined || Number.isNaN(value) ? "" : String(value).replace(/<br>/g, " ");
    return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const at = (list, i) => (Array.isArray(list) || ArrayBuffer.isView(list) ? list[i] : undefined);

  function rows(plot) {
    const out = [["panel", "series", "x", "y", "z", "low", "high", "more"]];
    for (const trace of plot._fullData) {
      if (trace.fill === "toself") continue;  // the outline of a band, whose ends stand with its line
      const panel = `${trace.xaxis ?? "x"}${trace.yaxis ?? "y"}`, names = Array.isArray(trace.meta) ? trace.meta : [];
      const more = (extra) => names.map((name, k) => `${name}=${names.length > 1 ? at(extra, k) : extra}`).join("; ");
      const add = (x, y, z, extra, low, high) => out.push([panel, trace.name, x, y, z, low, high, extra === undefined ? "" : more(extra)]);
      if (trace.z) {
        trace.z.forEach((row, j) => [...row].forEach((z, i) => add(at(trace.x, i) ?? i, at(trace.y, j) ?? j, z, at(at(trace.customdata, j), i))));
      } else {
        const bars = trace.error_y?.visible ? trace.error_y : {};
        [...(trace.y ?? [])].forEach((y, i) => {
          const up = at(bars.array, i), down = bars.symmetric === false ? at(bars.arrayminus, i) : up;
          add(at(trace.x, i), y, undefined, at(trace.customdata, i), down === undefined ? undefined : y - down, up === undefined ? undefined : y + up);
        });
      }
    }
    return out;
  }

  function save(name, type, text) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  const file = (title) => title.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 60) || "figure";
  const does = {
    csv: ({ plot, title }) => save(`${file(title)}.csv`, "text/csv", rows(plot).map((row) => row.map(cell).join(",")).join("\n")),
    svg: ({ plot, text, title }) => {  // for paper, so always on white
      const { data, layout } = spec(text, false);
      Plotly.downloadImage({ data, layout }, { format: "svg", width: plot.clientWidth, height: plot.clientHeight, filename: file(title) });
    },
  };
  for (const one of figures) {
    one.figure.querySelectorAll("[data-do]").forEach((button) => button.addEventListener("click", () => does[button.dataset.do](one)));
  }
  document.getElementById("theme").addEventListener("click", () => theme(root.dataset.theme === "dark" ? "light" : "dark"));
  preferred.addEventListener("change", () => theme(preferred.matches ? "dark" : "light"));
  theme(preferred.matches ? "dark" : "light");
})();
