// One prompt's attention, head by head: the map, the parts of the strongest scores, their course over positions.
// `data` holds every number; nothing is fetched. Plotly draws.
function mechattnExplorer(root, data) {
  const n = data.tokens.length, heads = data.heads;
  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;
  const logs = new Int16Array(bytes(data.logs));
  const parts = data.parts ? { bias: new Float32Array(bytes(data.parts.bias)), alibi: new Float32Array(bytes(data.parts.alibi)) } : null;
  const escape = (t) => t.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/\n/g, "⏎");
  const label = (i) => i + " “" + escape(data.tokens[i]) + "”";
  const size = (n * (n + 1)) / 2;
  const part = (name) => root.querySelector("[data-part=" + name + "]");
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "star", "cross", "x", "pentagon"];
  const MARKED = SYMBOLS.length;
  const dark = window.matchMedia && window.matchMedia("(prefers-color-scheme: dark)").matches;
  const ink = dark ? "#ddd" : "#222", gridcolor = dark ? "#343a42" : "#e3e3e0";
  const [GREEN, PURPLE, ORANGE] = dark ? ["#3fcf9f", "#e39cc3", "#ff9a4d"] : ["#009e73", "#b0568a", "#d55e00"];
  const lines = { gridcolor, linecolor: gridcolor, zerolinecolor: gridcolor };
  const base = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: data.font, size: 13, color: ink },
    margin: { l: 60, r: 20, t: 60, b: 60 },
  };
  // A title in as many lines as the place is wide for; the map makes room for them.
  const titled = (place, words) => {
    const most = Math.max(20, Math.floor((place.clientWidth - 20) / 8.2)), found = [""];
    for (const word of words.split(" ")) {
      const longer = (found[found.length - 1] + " " + word).trim();
      if (longer.length > most && found[found.length - 1]) found.push(word);
      else found[found.length - 1] = longer;
    }
    return { title: { text: found.join("<br>"), x: 0, xref: "container", xanchor: "left", pad: { l: 10 }, font: { size: 15 } }, more: 20 * (found.length - 1) };
  };
  const config = { displaylogo: false, responsive: true };

  // The row of a query: probabilities, the keys in descending order, and the centred parts of the score.
  function row(head, q) {
    const start = head * size + (q * (q + 1)) / 2;
    const log = Array.from({ length: q + 1 }, (_, k) => logs[start + k] * data.step);
    const seen = log.map((_, k) => k).filter((k) => logs[start + k] !== -32768);
    const order = [...seen].sort((a, b) => log[b] - log[a] || a - b);
    const rank = [];
    order.forEach((k, i) => (rank[k] = i));
    const p = log.map((x, k) => (logs[start + k] !== -32768 ? Math.exp(x) : 0));
    const made = { p, order, rank, seen };
    if (parts && seen.length) {
      const centred = (values) => {
        const mean = seen.reduce((s, k) => s + values(k), 0) / seen.length;
        return log.map((_, k) => values(k) - mean);
      };
      made.bias = centred((k) => parts.bias[head * n + k]);
      made.alibi = centred((k) => parts.alibi[head * n + k]);
      const whole = centred((k) => log[k]);
      made.content = whole.map((x, k) => x - made.bias[k] - made.alibi[k]);
    }
    return made;
  }

  const said = (r, k) =>
    r.content ? "<br>content " + r.content[k].toFixed(2) + ", bias " + r.bias[k].toFixed(2) + ", ALiBi " + r.alibi[k].toFixed(2) + " logits (centred)" : "";
  const colour = (q, k) => (k === q ? GREEN : k === 0 ? PURPLE : ORANGE);

  function drawMap(head) {
    const narrow = part("map").clientWidth < 600;
    const z = [], text = [], marks = { x: [], y: [], symbol: [], color: [], text: [] };
    for (let q = 0; q < n; q++) {
      const r = row(head, q), values = new Array(n).fill(null), words = new Array(n).fill("");
      r.seen.forEach((k) => {
        values[k] = r.p[k];
        words[k] = label(q) + " → " + label(k) + "<br>p = " + r.p[k].toPrecision(3) + ", rank " + (r.rank[k] + 1) + said(r, k);
      });
      z.push(values);
      text.push(words);
      let mass = 0;
      for (let i = 0; i < r.order.length && mass < 0.5 && i < MARKED; i++) {
        const k = r.order[i];
        mass += r.p[k];
        marks.x.push(k); marks.y.push(q); marks.symbol.push(SYMBOLS[i]); marks.color.push(colour(q, k)); marks.text.push(words[k]);
      }
    }
    const traces = [
      { type: "heatmap", z, text, hovertemplate: "%{text}<extra></extra>", colorscale: [[0, dark ? "#111418" : "#ffffff"], [0.25, "#9ec5e8"], [1, dark ? "#e8f3ff" : "#0b3d78"]], zmin: 0, colorbar: narrow ? { title: { text: "p" }, orientation: "h", thickness: 10, y: 1.02, yanchor: "bottom" } : { title: { text: "p" } }, hoverongaps: false },
      { type: "scatter", mode: "markers", x: marks.x, y: marks.y, text: marks.text, hovertemplate: "%{text}<extra></extra>",
        marker: { symbol: marks.symbol, color: marks.color, size: Math.max(3, Math.min(8, 560 / n)) } },
    ];
    const every = Math.ceil(n / (narrow ? 24 : 60)), at = data.tokens.map((_, i) => i).filter((i) => i % every === 0);
    const ticks = { tickvals: at, ticktext: at.map((i) => escape(data.tokens[i])), tickfont: { size: 9 } };
    const { title, more } = titled(part("map"), "Figure 1: attention map, " + heads[head].name);
    Plotly.react(part("map"), traces, { ...base, margin: { ...base.margin, t: (narrow ? 110 : 60) + more }, height: (narrow ? part("map").clientWidth + 200 : 720) + more, showlegend: false, title,
      xaxis: { title: { text: "target (key)" }, ...lines, ...ticks, tickangle: 90, constrain: "domain" },
      yaxis: { title: { text: "query" }, ...lines, ...ticks, autorange: "reversed", scaleanchor: "x", constrain: "domain" } }, config);
  }

  function drawParts(head, rank) {
    const axis = { gridcolor, linecolor: ink };
    const at = { a: [], b: [], c: [], text: [], color: [] };
    for (let q = 0; q < n; q++) {
      const r = row(head, q), k = r.order[rank];
      if (k === undefined || r.seen.length < 2) continue;
      const sum = Math.abs(r.content[k]) + Math.abs(r.bias[k]) + Math.abs(r.alibi[k]);
      if (!sum) continue;
      at.a.push(Math.abs(r.content[k]) / sum); at.b.push(Math.abs(r.bias[k]) / sum); at.c.push(Math.abs(r.alibi[k]) / sum);
      at.text.push(label(q) + " → " + label(k) + "<br>p = " + r.p[k].toPrecision(3) + ", rank " + (rank + 1) + said(r, k));
      at.color.push(colour(q, k));
    }
    const above = titled(part("parts"), "Figure 2: what makes the score of the target of rank " + (rank + 1) + ", " + heads[head].name);
    Plotly.react(part("parts"), [{ type: "scatterternary", mode: "markers", a: at.a, b: at.b, c: at.c, text: at.text,
      hovertemplate: "%{text}<extra></extra>", marker: { color: at.color, size: 8, opacity: 0.8 } }],
      { ...base, height: 520 + above.more, margin: { l: 60, r: 60, t: 90 + above.more, b: 60 }, title: above.title,
        ternary: { bgcolor: "rgba(0,0,0,0)", aaxis: { title: { text: "content" }, ...axis }, baxis: { title: { text: "bias" }, ...axis }, caxis: { title: { text: "ALiBi" }, ...axis } } }, config);
    const under = titled(part("course"), "Figure 3: bias and ALiBi of each target, " + heads[head].name + " (only the trend matters)");
    const x = data.tokens.map((_, i) => i), words = x.map(label);
    const line = (name, colour) => ({ type: "scatter", mode: "lines+markers", name, x, y: Array.from(x, (k) => parts[name === "ALiBi" ? "alibi" : "bias"][head * n + k]),
      text: words, hovertemplate: "%{text}: %{y:.3f} logits<extra>" + name + "</extra>", line: { color: colour }, marker: { size: 4 } });
    Plotly.react(part("course"), [line("bias", dark ? "#ff9a4d" : "#d55e00"), line("ALiBi", dark ? "#56b4e9" : "#0072b2")],
      { ...base, height: 420 + under.more, margin: { ...base.margin, t: 100 + under.more }, title: under.title,
        xaxis: { title: { text: "position of the target" }, ...lines }, yaxis: { title: { text: "logits" }, ...lines }, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 } }, config);
  }

  for (const [name, colour] of Object.entries({ itself: GREEN, first: PURPLE, another: ORANGE })) part("key-" + name).style.color = colour;
  const layers = [...new Set(heads.map((h) => h.layer))];
  const slider = part("layer"), choice = part("head"), rank = part("rank");
  slider.max = layers.length - 1;
  function heads_here() {
    const layer = layers[+slider.value], before = choice.value;
    const here = heads.map((h, i) => [h, i]).filter(([h]) => h.layer === layer);
    choice.replaceChildren(...here.map(([h]) => new Option("head " + h.head, h.head)));
    if (here.some(([h]) => String(h.head) === before)) choice.value = before;
  }
  function draw() {
    const layer = layers[+slider.value];
    part("layer-name").textContent = layer;
    const head = heads.findIndex((h) => h.layer === layer && String(h.head) === choice.value);
    drawMap(head);
    if (parts) drawParts(head, +rank.value);
  }
  slider.addEventListener("input", () => { heads_here(); draw(); });
  choice.addEventListener("change", draw);
  rank.addEventListener("change", draw);
  heads_here();
  draw();
}
